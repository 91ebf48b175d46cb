"""State that all layers of a step share: the packing of its slices into one row, and the places of their KV.

The row is ordered for attention, not for the caller: slices of many tokens (prefill chunks) first, one after the other,
then slices of one token (decode), the longest context first, cut into groups of similar length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.kv.layout.layout import KvLayout

# A group costs one more round of kernels, padding is gathered and attended to for nothing. On a CPU they break even
# somewhere between 128 and 256 KiB of one layer's KV.
_PADDING_BYTES = 192 * 1024
# A GPU moves three times as much within the 50 us in which the kernels of one more group are launched.
_GPU_PADDING_BYTES = 32 * 2**20


@dataclass(slots=True)
class Segment:
    """Rows [first, last) of the step that attend together: one prefill chunk, or decoding sequences of similar length,
    one row each."""

    first: int
    last: int
    positions: Tensor
    """Positions of the rows' tokens, int64: [tokens, 1] for a chunk, else [sequences, 1, 1, 1]."""
    halves: Tensor | None
    """[2, sequences, blocks], int64: K and V of the context; shorter sequences repeat their last block. None for a
    chunk that is its whole context."""
    context_tokens: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Mask added to the scores, 0 for visible positions and -inf elsewhere. None: plain causal.

        Returns [tokens, context] for a chunk, else [sequences, 1, 1, context].
        """
        if self.halves is None and (window is None or window >= self.context_tokens):
            return None
        if window not in self._masks:
            context = torch.arange(self.context_tokens, device=self.positions.device)
            visible = context <= self.positions
            if window is not None:
                visible &= context > self.positions - window
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[window] = zeros.masked_fill_(~visible, -torch.inf)
        return self._masks[window]


@dataclass(slots=True)
class Step:
    """One packed batch. T tokens in all."""

    token_ids: Tensor
    """[1, T], int64."""
    position_ids: Tensor
    """[1, T], int64."""
    kv_rows: Tensor
    """[2 * T], int64: rows to which the tokens' keys, then their values, are written."""
    fresh_halves: Tensor | None
    """Half blocks that a slice enters without filling them. They are cleared first: an earlier owner's data there is
    masked, yet a NaN among it would survive the mask's zero weight."""
    chunks: list[Segment]
    decodes: list[Segment]
    drawn_rows: Tensor
    """[draws], int64: rows of the step after which a token is drawn."""
    drawn_slices: list[int]
    """Index of each draw's slice in the caller's batch."""
    scored_rows: Tensor
    """[scored], int64: rows whose next token, which is known, gets a log-probability."""
    scored_slices: list[int]
    """The slices of the caller's batch that these rows belong to, one after the other."""
    written_blocks: Tensor
    """[blocks], int64: every block that the step writes to, for the mirror; empty without a listener."""
    on_layer: Callable[[int], None] | None
    _under_way: tuple[int, torch.cuda.Event] | None = None
    """The last layer, and the copy of its KV to the pool."""

    def tell(self, layer: int, copied: torch.cuda.Event | None) -> None:
        """Call the listener for a layer whose KV is in the pool, or for the layer before it.

        copied: passes when the KV is in the pool; None: it is. By the next layer it nearly always has, and the device
        has had work of this layer meanwhile.
        """
        self.tell_last()
        if copied is not None:
            self._under_way = layer, copied
        elif self.on_layer is not None:
            self.on_layer(layer)

    def tell_last(self) -> None:
        """Call the listener for the layer whose copy is in flight, if any. Called once more after the last layer."""
        if self._under_way is None:
            return
        layer, copied = self._under_way
        self._under_way = None
        copied.synchronize()
        if self.on_layer is not None:
            self.on_layer(layer)


def pack(
    batch: Sequence[SequenceSlice],
    layout: KvLayout,
    device: torch.device,
    on_layer: Callable[[int], None] | None,
) -> Step:
    """Pack one step. Neither `batch` nor a slice of it is empty."""
    block_tokens = layout.block_tokens
    chunk_order = [index for index, piece in enumerate(batch) if len(piece.token_ids) > 1]
    decode_order = [index for index, piece in enumerate(batch) if len(piece.token_ids) == 1]
    decode_order.sort(key=lambda index: -batch[index].start)
    order = chunk_order + decode_order
    bounds = [0, *accumulate(len(batch[index].token_ids) for index in order)]

    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    fresh: list[int] = []
    written: list[int] = []
    for index in order:
        piece = batch[index]
        start, end = piece.start, piece.start + len(piece.token_ids)
        tokens.extend(piece.token_ids)
        positions.extend(range(start, end))
        slots.extend(
            piece.block_ids[position // block_tokens] * 2 * block_tokens + position % block_tokens
            for position in range(start, end)
        )
        last_block = (end - 1) // block_tokens
        if end % block_tokens and start <= last_block * block_tokens:
            fresh.append(piece.block_ids[last_block])
        if on_layer is not None:
            written.extend(piece.block_ids[start // block_tokens : last_block + 1])

    first_decode = bounds[len(chunk_order)]
    drawn = [(bounds[row + 1] - 1, index) for row, index in enumerate(order) if batch[index].draw]
    scored = [(bounds[row], index) for row, index in enumerate(order) if batch[index].scored_ids]
    slot_array = np.asarray(slots, np.int64)
    row_positions = _on(device, positions)
    return Step(
        token_ids=_on(device, tokens).unsqueeze(0),
        position_ids=row_positions.unsqueeze(0),
        kv_rows=_on(device, np.concatenate((slot_array, slot_array + block_tokens))),
        fresh_halves=_on(device, _halves(np.asarray(fresh, np.int64)).ravel()) if fresh else None,
        chunks=[
            _chunk_segment(batch[index], bounds[row], row_positions, layout) for row, index in enumerate(chunk_order)
        ],
        decodes=_decode_segments([batch[index] for index in decode_order], first_decode, row_positions, layout),
        drawn_rows=_on(device, [row for row, _ in drawn]),
        drawn_slices=[index for _, index in drawn],
        scored_rows=_on(
            device, [row for first, index in scored for row in range(first, first + len(batch[index].scored_ids))]
        ),
        scored_slices=[index for _, index in scored],
        written_blocks=_on(device, written),
        on_layer=on_layer,
    )


def _chunk_segment(piece: SequenceSlice, first: int, positions: Tensor, layout: KvLayout) -> Segment:
    """positions: of the step's rows."""
    last = first + len(piece.token_ids)
    end = piece.start + len(piece.token_ids)
    queries = positions[first:last].view(-1, 1)
    if piece.start == 0:
        return Segment(first, last, queries, None, end)
    blocks = np.asarray(piece.block_ids[: layout.block_count(end)], np.int64)
    return Segment(
        first, last, queries, _on(positions.device, _halves(blocks[None])), len(blocks) * layout.block_tokens
    )


def _decode_segments(pieces: Sequence[SequenceSlice], first: int, positions: Tensor, layout: KvLayout) -> list[Segment]:
    """Group decoding sequences of similar length. pieces: longest context first. positions: of the step's rows."""
    block_counts = [piece.start // layout.block_tokens + 1 for piece in pieces]
    segments = []
    padding_bytes = _PADDING_BYTES if positions.device.type == "cpu" else _GPU_PADDING_BYTES
    for group in _groups(block_counts, padding_bytes // layout.block_bytes):
        members, counts = pieces[group], block_counts[group]
        table = np.empty((len(members), counts[0]), np.int64)
        for row, piece, count in zip(table, members, counts, strict=True):
            row[:count] = piece.block_ids[:count]
            row[count:] = piece.block_ids[count - 1]
        start, stop = first + group.start, first + group.stop
        queries = positions[start:stop].view(-1, 1, 1, 1)
        halves = _on(positions.device, _halves(table))
        segments.append(Segment(start, stop, queries, halves, counts[0] * layout.block_tokens))
    return segments


def _groups(block_counts: Sequence[int], padding_blocks: int) -> list[slice]:
    """Cut descending lengths into runs of which none is padded by more than `padding_blocks`."""
    groups = []
    first, padding = 0, 0
    for index, count in enumerate(block_counts):
        padding += block_counts[first] - count
        if padding > padding_blocks:
            groups.append(slice(first, index))
            first, padding = index, 0
    if block_counts:
        groups.append(slice(first, len(block_counts)))
    return groups


def _halves(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Convert block ids [...] to half blocks [2, ...], K before V."""
    return np.stack((2 * blocks, 2 * blocks + 1))


def _on(device: torch.device, values: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)
