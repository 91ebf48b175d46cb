"""Packs the slices of a step (each one sequence's part) into one row of tokens, with the locations of their KV.

The row is ordered for attention: slices of many tokens (prefill chunks) first, one after the other, then slices of one
token (decode), the longest context first, cut into groups of similar length.
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
# Block ids [...], times two and plus this: half blocks [2, 1, ...], K before V.
_K_AND_V = np.arange(2).reshape(2, 1, 1)


@dataclass(slots=True)
class Segment:
    """Rows [first, last) of a step that attend together: a prefill chunk, or decoding sequences of similar length."""

    first: int
    last: int
    positions: Tensor
    """Positions of the rows' tokens, int64: [tokens, 1] for a chunk, else [sequences, 1, 1, 1]."""
    halves: Tensor | None
    """[2, sequences, blocks], int64: half blocks with K and V of the context; shorter sequences repeat their last
    block. None for a chunk without earlier context."""
    context_tokens: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Attention masks computed by earlier layers, by sliding window."""


@dataclass(slots=True)
class LayerReports:
    """Reports to on_layer the layers whose KV of the step is in the host pool."""

    on_layer: Callable[[int], None]
    block_ids: Tensor
    """[blocks], int64: every block that the step writes to."""
    under_way: tuple[int, torch.cuda.Event] | None = None
    """Last layer, and the pending copy of its KV to the host pool."""


@dataclass(slots=True)
class Step:
    """One packed batch of T tokens, as all layers of the model use it."""

    token_ids: Tensor
    """[1, T], int64."""
    position_ids: Tensor
    """[1, T], int64."""
    kv_rows: Tensor
    """[2 * T], int64: rows of the pool for the tokens' keys, then for their values."""
    fresh_halves: Tensor | None
    """Half blocks that a slice enters without filling them, to be cleared first: an earlier owner's data there is
    masked, yet a NaN among it would survive the mask's zero weight."""
    chunks: list[Segment]
    decodes: list[Segment]
    logits_rows: Tensor
    """[draws + scored], int64: rows after which a token is drawn, then rows whose next token is to be scored."""
    drawn_slices: list[int]
    """Index, in the caller's batch, of the slice of each drawn token."""
    scored_slices: list[int]
    """Indexes, in the caller's batch, of the slices of the scored rows, in order."""
    reports: LayerReports | None


def pack(
    batch: Sequence[SequenceSlice],
    layout: KvLayout,
    device: torch.device,
    on_layer: Callable[[int], None] | None,
) -> Step:
    """Pack one step. `batch` and its slices must not be empty. on_layer: None if no KV is pushed."""
    block_tokens = layout.block_tokens
    chunk_order = [index for index, piece in enumerate(batch) if len(piece.token_ids) > 1]
    decode_order = [index for index, piece in enumerate(batch) if len(piece.token_ids) == 1]
    decode_order.sort(key=lambda index: -batch[index].start)
    order = chunk_order + decode_order
    bounds = [0, *accumulate(len(batch[index].token_ids) for index in order)]

    tokens, positions, slots = list[int](), list[int](), list[int]()
    fresh, written, logits_rows, scored_rows = list[int](), list[int](), list[int](), list[int]()
    for first, index in zip(bounds, order, strict=False):
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
        if piece.draw:
            logits_rows.append(first + end - start - 1)
        scored_rows.extend(range(first, first + len(piece.scored_ids)))

    slot_array = np.asarray(slots, np.int64)
    row_positions = _on(device, positions)
    chunks = []
    for first, index in zip(bounds, chunk_order, strict=False):
        piece = batch[index]
        last, context_tokens, halves = first + len(piece.token_ids), piece.start + len(piece.token_ids), None
        if piece.start > 0:
            blocks = np.asarray(piece.block_ids[: layout.block_count(context_tokens)], np.int64)
            halves, context_tokens = _on(device, 2 * blocks + _K_AND_V), len(blocks) * block_tokens
        chunks.append(Segment(first, last, row_positions[first:last].view(-1, 1), halves, context_tokens))
    decoding = [batch[index] for index in decode_order]
    return Step(
        token_ids=_on(device, tokens).unsqueeze(0),
        position_ids=row_positions.unsqueeze(0),
        kv_rows=_on(device, np.concatenate((slot_array, slot_array + block_tokens))),
        fresh_halves=_on(device, (2 * np.asarray(fresh) + _K_AND_V).ravel()) if fresh else None,
        chunks=chunks,
        decodes=_decode_segments(decoding, bounds[len(chunk_order)], row_positions, layout),
        logits_rows=_on(device, logits_rows + scored_rows),
        drawn_slices=[index for index in order if batch[index].draw],
        scored_slices=[index for index in order if batch[index].scored_ids],
        reports=LayerReports(on_layer, _on(device, written)) if on_layer is not None else None,
    )


def _decode_segments(pieces: Sequence[SequenceSlice], first: int, positions: Tensor, layout: KvLayout) -> list[Segment]:
    """Group decoding sequences so that no group is padded by more than a constant number of bytes.

    pieces: longest context first. first: row of the first one. positions: of the step's rows.
    """
    segments = []
    counts = [piece.start // layout.block_tokens + 1 for piece in pieces]
    padding_bytes = _PADDING_BYTES if positions.device.type == "cpu" else _GPU_PADDING_BYTES
    start = 0
    while start < len(pieces):
        stop, padding = start, 0
        while stop < len(pieces) and padding + counts[start] - counts[stop] <= padding_bytes // layout.block_bytes:
            padding += counts[start] - counts[stop]
            stop += 1
        table = np.empty((stop - start, counts[start]), np.int64)
        for row, piece, count in zip(table, pieces[start:stop], counts[start:stop], strict=True):
            row[:count] = piece.block_ids[:count]
            row[count:] = piece.block_ids[count - 1]
        rows = slice(first + start, first + stop)
        halves = _on(positions.device, 2 * table + _K_AND_V)
        context_tokens = counts[start] * layout.block_tokens
        segments.append(Segment(rows.start, rows.stop, positions[rows].view(-1, 1, 1, 1), halves, context_tokens))
        start = stop
    return segments


def _on(device: torch.device, values: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)
