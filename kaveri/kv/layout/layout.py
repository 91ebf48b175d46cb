"""Layout of a pool's KV blocks; which layouts' blocks can be copied or converted into one another. Pure.

Each tensor-parallel rank of an instance holds a range of the KV heads. Between two instances, a push is split into
parts: a part is the heads that one source rank and one destination rank have in common, the same number for all parts.

    source, 2 ranks        [h0 h1] [h2 h3]          parts        destination, 1 rank
                               |       +---- heads 2, 3 ------->  [h0 h1 h2 h3]
                               +------------ heads 0, 1 ------->

Where several source ranks hold copies of the same heads, each destination rank takes them from one of those.

A destination rank that receives several (`ways`) parts stores part i of its block b in sub-block `ways * b + i` of its
pool. In a heads-first order the block is complete then; otherwise merge_parts() reorders its bytes.
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
"""Prefix of opaque orders in which a head's KV within a block is one run of bytes, so that heads can be split."""

MAPPED_TOKENS_MAX = 1024
"""Max tokens of a block that is converted to another layout: the sender buffers a few such blocks of each layer."""

_MAPPED = frozenset({"block_tokens", "order"})
"""Fields that may differ between mapped blocks."""
_PART = frozenset({"layer_count", "kv_head_count", "first_layer", "first_kv_head"})
"""Fields that identify the part of the model in a pool."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a KV pool: `layer_count` layers of blocks, each block [K or V, block_tokens, kv_head_count, head_dim].

    A pool may hold a part of the model, as a rank's does: layers from first_layer on, KV heads from first_kv_head on.
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
    """Number of tensor-parallel ranks. Each holds some of the heads in its own pool (rank()), under one shared block
    allocator. With more ranks than heads, each head is on several ranks."""

    @property
    def layers(self) -> range:
        """Indices, within the model, of the layers that the pool holds."""
        return range(self.first_layer, self.first_layer + self.layer_count)

    @property
    def kv_heads(self) -> range:
        """Indices, within the model, of the KV heads that the pool holds."""
        return range(self.first_kv_head, self.first_kv_head + self.kv_head_count)

    def rank(self, rank: int) -> "KvLayout":
        """Layout of one tensor-parallel rank's pool. kv_head_count must be a multiple of tensor_ranks or vice versa."""
        heads, ranks = self.kv_head_count, self.tensor_ranks
        first = self.first_kv_head + rank * heads // ranks
        return replace(self, kv_head_count=max(1, heads // ranks), first_kv_head=first, tensor_ranks=1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, summed over ranks; heads that several ranks hold count once."""
        return 2 * self.block_tokens * self.kv_head_count * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, summed over all layers."""
        return self.layer_count * self.block_bytes // self.block_tokens

    def block_count(self, token_count: int) -> int:
        """Number of blocks that hold `token_count` tokens, rounded up."""
        return -(-token_count // self.block_tokens)

    def require_same(self, other: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the first field that differs, unless the two layouts are equal."""
        self._require_equal(other, frozenset())

    def require_mappable(self, other: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the field, unless the two layouts' blocks convert into each other without loss.

        Both must hold the same layers and heads of the same model. Block size (up to MAPPED_TOKENS_MAX tokens) and byte
        order may differ if both orders are in ORDERS; the number of ranks, if the order allows a split by heads.
        """
        if self != other:
            self._require_equal(other, _MAPPED | {"tensor_ranks"})
            self._require_known(other)
            self.heads_in_part(other)

    def is_mappable(self, other: "KvLayout | None") -> bool:
        """True if require_mappable(other) would not raise; False for None."""
        try:
            if other is not None:
                self.require_mappable(other)
        except LayoutMismatch:
            return False
        return other is not None

    def require_part(self, part: "KvLayout") -> None:
        """Raise LayoutMismatch, naming the field, unless blocks convert to layout `part`, which holds all or some of
        the layers and heads."""
        self._require_equal(part, _MAPPED | _PART)
        if self != part:
            self._require_known(part)
        for name, ours, theirs in (("layers", self.layers, part.layers), ("kv_heads", self.kv_heads, part.kv_heads)):
            if not (theirs and ours.start <= theirs.start and theirs.stop <= ours.stop):
                raise LayoutMismatch(name, ours, theirs)

    def heads_in_part(self, other: "KvLayout") -> int:
        """Number of KV heads that a rank of this layout has in common with each overlapping rank of the other. Raises
        LayoutMismatch unless it is the same for all pairs of ranks."""
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
        """True if the byte order within a block is in ORDERS, so that each token's KV can be located."""
        return self.order in ORDERS

    def _require_equal(self, other: "KvLayout", but: frozenset[str]) -> None:
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs and field.name not in but:
                raise LayoutMismatch(field.name, ours, theirs)

    def _require_known(self, other: "KvLayout") -> None:
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
    """Destination of one part of a push (heads that two ranks share): the rank, and the block layout of those heads."""

    rank: int
    layout: KvLayout


@lru_cache(maxsize=256)
def part_places(source: KvLayout, destination: KvLayout) -> tuple[PartPlace, ...]:
    """Return the parts of a push, one per pair of ranks with common heads, by destination rank. Raises
    LayoutMismatch."""
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
    """Source rank that pushes this part (head range for one destination rank). If several hold its heads, one is chosen
    by the destination rank."""
    first_head = place.layout.first_kv_head
    holders = [rank for rank in range(source.tensor_ranks) if first_head in source.rank(rank).kv_heads]
    return holders[place.rank % len(holders)]


def part_index(destination: KvLayout, place: PartPlace) -> tuple[int, int]:
    """Return (index of this part, number of parts) among the head ranges that its destination rank receives."""
    whole, head_count = destination.rank(place.rank), place.layout.kv_head_count
    return (place.layout.first_kv_head - whole.first_kv_head) // head_count, whole.kv_head_count // head_count
