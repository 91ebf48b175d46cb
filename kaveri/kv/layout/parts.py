"""Splits KV by heads between the ranks of two instances. Pure; moves nothing.

Each rank of the source holds a range of the heads, and so does each rank of the destination. A part is what one of each
have in common: every part has the same number of heads. Equal numbers of ranks have one part for each rank, all of it.

    source, 2 ranks        [h0 h1] [h2 h3]          parts        destination, 1 rank
                               |       +---- heads 2, 3 ------->  [h0 h1 h2 h3]
                               +------------ heads 0, 1 ------->

Where several ranks of the source hold the same heads, each rank of the destination gets them from one of those.

Blocks of a rank of the destination that gets several parts take them side by side: sub-block `ways * b + i` of its pool
is place i of block b, in the order of heads. With the heads first they stay so; else merge_parts() puts them in order.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kaveri.kv.layout.layout import KvLayout


class PartPlace(NamedTuple):
    """One part: the receiving rank of the destination, and the layout of a block of it there."""

    rank: int
    layout: KvLayout


@lru_cache(maxsize=256)
def part_places(source: KvLayout, destination: KvLayout) -> tuple[PartPlace, ...]:
    """All parts of KV from one instance to the other, rank by rank. Raises LayoutMismatch."""
    source.require_mappable(destination)
    head_count = source.heads_in_part(destination)
    return tuple(
        PartPlace(rank, replace(whole, kv_head_count=head_count, first_kv_head=first_head))
        for rank in range(destination.tensor_ranks)
        for whole in (destination.rank(rank),)
        for first_head in whole.kv_heads[::head_count]
    )


@lru_cache(maxsize=1024)
def source_rank(source: KvLayout, place: PartPlace) -> int:
    """The source rank that pushes a part."""
    first_head = place.layout.first_kv_head
    holders = [rank for rank in range(source.tensor_ranks) if first_head in source.rank(rank).kv_heads]
    return holders[place.rank % len(holders)]


def part_index(destination: KvLayout, place: PartPlace) -> tuple[int, int]:
    """Index of the part within its rank's blocks, and the number of parts there."""
    whole, head_count = destination.rank(place.rank), place.layout.kv_head_count
    return (place.layout.first_kv_head - whole.first_kv_head) // head_count, whole.kv_head_count // head_count
