"""How the KV of one instance's ranks comes together in another's, by KV heads. Pure; moves nothing.

Each rank of the source holds a range of the heads, and so does each rank of the destination. A part is what one of each
have in common: every part has the same number of heads. Equal numbers of ranks have one part for each rank, all of it.

    source, 2 ranks        [h0 h1] [h2 h3]          parts        destination, 1 rank
                               |       +---- heads 2, 3 ------->  [h0 h1 h2 h3]
                               +------------ heads 0, 1 ------->

Where several ranks of the source hold the same heads, each rank of the destination gets them from one of those.

Blocks of a rank of the destination that gets several parts take them side by side: sub-block `ways * b + i` of its pool
is place i of block b, in the order of heads. With the heads first that is how they stay (merge_parts).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kaveri.kv.layout.layout import KvLayout

_MERGED_BYTES = 1 << 22
"""About what is copied at a time."""


class PartPlace(NamedTuple):
    """One part: which rank of the destination takes it, and what a block of it looks like there."""

    rank: int
    layout: KvLayout


def part_places(source: KvLayout, destination: KvLayout) -> tuple[PartPlace, ...]:
    """All parts of KV that goes from one instance to the other, rank by rank. Raises LayoutMismatch."""
    source.require_mappable(destination)
    head_count = source.heads_in_part(destination)
    return tuple(
        PartPlace(rank, replace(whole, kv_head_count=head_count, first_kv_head=first_head))
        for rank in range(destination.tensor_ranks)
        for whole in (destination.rank(rank),)
        for first_head in whole.kv_heads[::head_count]
    )


def source_rank(source: KvLayout, place: PartPlace) -> int:
    """The rank of the source that pushes a part."""
    first_head = place.layout.first_kv_head
    holders = [rank for rank in range(source.tensor_ranks) if first_head in source.rank(rank).kv_heads]
    return holders[place.rank % len(holders)]


def part_index(destination: KvLayout, place: PartPlace) -> tuple[int, int]:
    """Which part of its rank's blocks it is, and how many there are."""
    whole, head_count = destination.rank(place.rank), place.layout.kv_head_count
    return (place.layout.first_kv_head - whole.first_kv_head) // head_count, whole.kv_head_count // head_count


def merge_parts(layout: KvLayout, memory: npt.NDArray[np.uint8], block_ids: Sequence[int], ways: int) -> None:
    """Puts the heads of blocks in their places, where `ways` parts of each have landed side by side.

    layout, memory: of the pool, [layer_count, block_count, block_bytes].
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
