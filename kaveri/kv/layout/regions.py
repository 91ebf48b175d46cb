"""Strided copies between KV blocks. Knows no ranks.

Within a block, the KV of some tokens and heads consists of short pieces at regular distances. A RegionCopy describes
many such pieces at once, merged where they are contiguous on both sides: consecutive whole blocks are one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from kaveri.errors import InvalidArgument
from kaveri.kv.layout.layout import ELEMENT_BYTES, KvLayout

_MERGED_BYTES = 1 << 22
"""Approximate bytes per copy of merge_parts()."""
_WORDS = {size: np.dtype(f"u{size}") for size in (8, 4, 2, 1)}


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """Strided copy, within a layer, of as many runs as the product of `counts`, each of `run_bytes` contiguous bytes.

    Run (i, j, ...) starts at source_offset + i * source_strides[0] + j * source_strides[1] + ..., in the destination
    likewise. Offsets and strides are in bytes, offsets from the start of the layer.
    """

    run_bytes: int
    counts: tuple[int, ...]
    """Outermost dimension first; empty for a single run."""
    source_offset: int
    source_strides: tuple[int, ...]
    destination_offset: int
    destination_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Byte addresses, within one layer, of a request's KV for a range of heads. Offsets and strides in bytes."""

    first_token: int
    """Index of the token at the start of the first block."""
    block_tokens: int
    block_ids: tuple[int, ...]
    block_bytes: int
    head_offset: int
    """Offset of the first of the heads within a block."""
    kv_stride: int
    """Distance from K to V."""
    token_stride: int
    head_stride: int

    @classmethod
    def of_blocks(
        cls, layout: KvLayout, block_ids: Sequence[int], first_head: int, first_token: int = 0
    ) -> "TokenPlaces":
        """Locate tokens in a pool's blocks. Block i holds block_tokens tokens from first_token + i * block_tokens on.

        layout: the pool's. If its order is not in ORDERS, heads come first and only whole blocks are addressed.
        first_head: index of the first of the heads within the pool.
        """
        head_bytes = layout.head_dim * ELEMENT_BYTES[layout.dtype]
        kv, token, head = _strides(layout.order, layout.block_tokens, layout.kv_head_count, head_bytes)
        head_offset = first_head * head
        return cls(first_token, layout.block_tokens, tuple(block_ids), layout.block_bytes, head_offset, kv, token, head)

    def offsets(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offsets, within the layer, of the first head's K for tokens at these positions in the request."""
        index, within = np.divmod(tokens - self.first_token, self.block_tokens)
        blocks = np.asarray(self.block_ids, np.int64)
        return np.asarray(blocks[index] * self.block_bytes + within * self.token_stride + self.head_offset, np.int64)


def map_regions(
    tokens: range, head_count: int, head_bytes: int, source: TokenPlaces, destination: TokenPlaces
) -> tuple[RegionCopy, ...]:
    """Return the copies, as few as possible, that move K and V of `tokens` (positions in the request).

    head_bytes: bytes of one head's K for one token. Raises InvalidArgument when a side has too few blocks.
    """
    if not tokens:
        return ()
    for places in (source, destination):
        needed = -(-(tokens.stop - places.first_token) // places.block_tokens)
        if tokens.start < places.first_token or len(places.block_ids) < needed:
            raise InvalidArgument("block_ids", len(places.block_ids), f"at least {needed} blocks for {tokens}")
    cuts = {tokens.start, tokens.stop}
    for places in (source, destination):
        beyond = places.first_token + -(-(tokens.start + 1 - places.first_token) // places.block_tokens) * (
            places.block_tokens
        )
        cuts.update(range(beyond, tokens.stop, places.block_tokens))
    edges = sorted(cuts)
    starts = np.array(edges[:-1], np.int64)
    lengths = [end - start for start, end in pairwise(edges)]
    source_offsets, destination_offsets = source.offsets(starts).tolist(), destination.offsets(starts).tolist()
    copies = []
    i = 0
    while i < len(lengths):
        # [i, j) is a series of pieces at constant distances on both sides.
        j = i + 1
        source_step = destination_step = 0
        while j < len(lengths) and lengths[j] == lengths[i]:
            steps = source_offsets[j] - source_offsets[j - 1], destination_offsets[j] - destination_offsets[j - 1]
            if j == i + 1:
                source_step, destination_step = steps
            elif steps != (source_step, destination_step):
                break
            j += 1
        run_bytes, counts, source_strides, destination_strides = _join(
            (
                (j - i, source_step, destination_step),
                (2, source.kv_stride, destination.kv_stride),
                (lengths[i], source.token_stride, destination.token_stride),
                (head_count, source.head_stride, destination.head_stride),
            ),
            head_bytes,
        )
        copies.append(
            RegionCopy(
                run_bytes, counts, source_offsets[i], source_strides, destination_offsets[i], destination_strides
            )
        )
        i = j
    return tuple(copies)


def copy_regions(
    copies: Sequence[RegionCopy], source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8]
) -> None:
    """Run strided copies between two pools' memory, the same ones in every layer.

    source, destination: [layer_count, layer_bytes of that side], uint8, C-contiguous, not overlapping. Raises
    ValueError, possibly after some copies, for a copy beyond the array; one from a layer into the next is not detected.
    """
    layer_count, source_layer_bytes = source.shape
    destination_layer_bytes = destination.shape[1]
    assert layer_count == destination.shape[0], "source and destination differ in layers"
    base = gcd(
        source.__array_interface__["data"][0],
        destination.__array_interface__["data"][0],
        *((source_layer_bytes, destination_layer_bytes) if layer_count > 1 else ()),
    )
    for copy in copies:
        size = gcd(
            8,
            base,
            copy.run_bytes,
            copy.source_offset,
            copy.destination_offset,
            *copy.source_strides,
            *copy.destination_strides,
        )
        word, shape = _WORDS[size], (layer_count, *copy.counts, copy.run_bytes // size)
        from_strides = (source_layer_bytes, *copy.source_strides, size)
        to_strides = (destination_layer_bytes, *copy.destination_strides, size)
        np.copyto(
            np.ndarray(shape, word, destination, copy.destination_offset, to_strides),
            np.ndarray(shape, word, source, copy.source_offset, from_strides),
        )


def merge_parts(layout: KvLayout, memory: npt.NDArray[np.uint8], block_ids: Sequence[int], ways: int) -> None:
    """Put blocks' heads in order, in place, after their KV has arrived as `ways` head ranges in adjacent sub-blocks.

    layout, memory: those of the whole pool; memory: [layer_count, block_count, block_bytes]. No-op for opaque orders.
    """
    if ways == 1 or not layout.has_known_order:
        return
    tokens, heads = layout.block_tokens, layout.kv_head_count // ways
    landed, order = ((ways, 2, tokens, heads, -1), (0, 2, 3, 1, 4, 5))
    if layout.order == "2HND":
        landed, order = ((ways, 2, heads, tokens, -1), (0, 2, 1, 3, 4, 5))
    step = max(1, _MERGED_BYTES // layout.block_bytes)
    for blocks in memory:
        for first in range(0, len(block_ids), step):
            chosen = list(block_ids[first : first + step])
            parts = blocks[chosen].reshape(len(chosen), *landed)
            blocks[chosen] = parts.transpose(order).reshape(len(chosen), layout.block_bytes)


def _strides(order: str, tokens: int, heads: int, head_bytes: int) -> tuple[int, int, int]:
    kv = tokens * heads * head_bytes
    if order == "2NHD":
        return kv, heads * head_bytes, head_bytes
    if order == "2HND":
        return kv, head_bytes, tokens * head_bytes
    # The order within a head does not matter: all of it is copied.
    return tokens * head_bytes, head_bytes, 2 * tokens * head_bytes


@lru_cache(maxsize=4096)
def _join(
    dimensions: tuple[tuple[int, int, int], ...], run_bytes: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Merge dimensions (count, source stride, destination stride) that are contiguous on both sides.

    Returns run bytes, counts, source strides and destination strides, in order of descending destination stride.
    """
    joined: list[tuple[int, int, int]] = []  # innermost first
    for count, source, destination in sorted(dimensions, key=lambda dimension: abs(dimension[2])):
        if count == 1:
            continue
        if not joined and source == destination == run_bytes:
            run_bytes *= count
            continue
        if joined:
            inner_count, inner_source, inner_destination = joined[-1]
            if source == inner_source * inner_count and destination == inner_destination * inner_count:
                joined[-1] = (inner_count * count, inner_source, inner_destination)
                continue
        joined.append((count, source, destination))
    counts, sources, destinations = zip(*reversed(joined), strict=True) if joined else ((), (), ())
    return run_bytes, tuple(counts), tuple(sources), tuple(destinations)
