"""Layout of a block of KV cache; conditions for exchanging blocks byte by byte, and for mapping them. Pure; moves
nothing.

KV is split by heads between the ranks of two instances. Each rank of the source holds a range of the heads, and so does
each rank of the destination. A part is what one of each have in common: every part has the same number of heads. Equal
numbers of ranks have one part for each rank, all of it.

    source, 2 ranks        [h0 h1] [h2 h3]          parts        destination, 1 rank
                               |       +---- heads 2, 3 ------->  [h0 h1 h2 h3]
                               +------------ heads 0, 1 ------->

Where several ranks of the source hold the same heads, each rank of the destination gets them from one of those.

Blocks of a rank of the destination that gets several parts take them side by side: sub-block `ways * b + i` of its pool
is place i of block b, in the order of heads. With the heads first they stay so; else merge_parts() puts them in order.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from kaveri.errors import LayoutMismatch

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ORDERS = ("2NHD", "2HND")
"""Byte orders within a block that can be mapped to one another: K then V, then token and head or head and token, then
element. Any other order is opaque: its blocks fit only blocks of the same order and size."""

HEADS_FIRST = "H-"
"""Prefix of opaque orders with one head after another: the KV of one head in a block is one run of bytes, itself
opaque. Such blocks can be split by heads."""

MAPPED_TOKENS_MAX = 1024
"""Max tokens of a mapped block: the mapping side buffers a few such blocks of each layer."""

_MAPPED = frozenset({"block_tokens", "order"})
"""Fields that may differ between mapped blocks."""
_PART = frozenset({"layer_count", "kv_head_count", "first_layer", "first_kv_head"})
"""Fields that identify the part of the model in a pool."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a pool: `layer_count` layers of blocks, each block [2, block_tokens, kv_head_count, head_dim].

    It may hold only a part of the model, as the ranks of one instance do: the layers from first_layer on, of each the
    KV heads from first_kv_head on.
    """

    model_fingerprint: str
    """Equal only for the same weights and shape."""
    layer_count: int
    block_tokens: int
    kv_head_count: int
    head_dim: int
    dtype: str
    """A key of ELEMENT_BYTES."""
    order: str = "2NHD"
    """Order of the bytes in a block: K then V, token, head, element."""
    first_layer: int = 0
    """Index in the model of the pool's layer 0."""
    first_kv_head: int = 0
    """Index in the model of the pool's KV head 0."""
    tensor_ranks: int = 1
    """Number of tensor-parallel ranks. Each holds some of the heads in a pool of its own (rank()), under one block
    allocator. With more ranks than heads each head is on several. See PartPlace for different numbers of
    ranks."""

    @property
    def layers(self) -> range:
        """The model's layers that the pool holds."""
        return range(self.first_layer, self.first_layer + self.layer_count)

    @property
    def kv_heads(self) -> range:
        """The model's KV heads that the pool holds."""
        return range(self.first_kv_head, self.first_kv_head + self.kv_head_count)

    def rank(self, rank: int) -> "KvLayout":
        """Layout of a tensor-parallel rank's pool. One of the numbers of heads and ranks must be a multiple of the
        other."""
        heads, ranks = self.kv_head_count, self.tensor_ranks
        first = self.first_kv_head + rank * heads // ranks
        return replace(self, kv_head_count=max(1, heads // ranks), first_kv_head=first, tensor_ranks=1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, over all ranks that hold different heads."""
        return 2 * self.block_tokens * self.kv_head_count * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layer_count * self.block_bytes // self.block_tokens

    def block_count(self, token_count: int) -> int:
        """Number of blocks for `token_count` tokens; the last one may be partly full."""
        return -(-token_count // self.block_tokens)

    def require_same(self, other: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the first field that differs."""
        self._require_equal(other, frozenset())

    def require_mappable(self, other: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the field, unless blocks can be mapped in both directions without loss.

        Blocks of the same part of the same model may differ in size, up to MAPPED_TOKENS_MAX, and in order, if both are
        known. Blocks with distinguishable heads may be split over another number of ranks.
        """
        if self != other:
            self._require_equal(other, _MAPPED | {"tensor_ranks"})
            self._require_known(other)
            self.heads_in_part(other)

    def is_mappable(self, other: "KvLayout | None") -> bool:
        """Return True if require_mappable() raises nothing; None is never mappable."""
        try:
            if other is not None:
                self.require_mappable(other)
        except LayoutMismatch:
            return False
        return other is not None

    def require_part(self, part: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the field, unless `part` has layers and heads of this one, and is mappable."""
        self._require_equal(part, _MAPPED | _PART)
        if self != part:
            self._require_known(part)
        for name, ours, theirs in (("layers", self.layers, part.layers), ("kv_heads", self.kv_heads, part.kv_heads)):
            if not (theirs and ours.start <= theirs.start and theirs.stop <= ours.stop):
                raise LayoutMismatch(name, ours, theirs)

    def heads_in_part(self, other: "KvLayout") -> int:
        """Number of KV heads that a rank of this layout shares with an overlapping rank of the other.

        Raises LayoutMismatch if the heads do not divide evenly: the number then differs between ranks.
        """
        for layout in (self, other):
            heads, ranks = layout.kv_head_count, layout.tensor_ranks
            if ranks < 1 or (heads % ranks and ranks % heads):
                raise LayoutMismatch("tensor_ranks", self.tensor_ranks, other.tensor_ranks)
        fewest, most = sorted(layout.rank(0).kv_head_count for layout in (self, other))
        if most % fewest:
            raise LayoutMismatch("tensor_ranks", self.tensor_ranks, other.tensor_ranks)
        return fewest

    @property
    def has_known_order(self) -> bool:
        """True if the place of each token's KV within a block is known."""
        return self.order in ORDERS

    def _require_equal(self, other: "KvLayout", but: frozenset[str]) -> None:
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs and field.name not in but:
                raise LayoutMismatch(field.name, ours, theirs)

    def _require_known(self, other: "KvLayout") -> None:
        """Raise LayoutMismatch unless the order is known where bytes change places; of opaque heads, where each
        begins."""
        if not (self.has_known_order and other.has_known_order):
            if self.order != other.order:
                raise LayoutMismatch("order", self.order, other.order)
            if self.block_tokens != other.block_tokens:
                raise LayoutMismatch("block_tokens", self.block_tokens, other.block_tokens)
            if not self.order.startswith(HEADS_FIRST):
                self._require_equal(other, frozenset())
        if self.dtype not in ELEMENT_BYTES:
            raise LayoutMismatch("dtype", self.dtype, other.dtype)
        for layout in (self, other):
            if not 1 <= layout.block_tokens <= MAPPED_TOKENS_MAX:
                raise LayoutMismatch("block_tokens", self.block_tokens, other.block_tokens)


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
