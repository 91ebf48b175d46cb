"""Which rank gives which part of a model's KV to which rank, when the two sides are partitioned differently. Pure.

Split at the source, merged at the destination (DéjàVu, section 4.1.2). Depths, tensor-parallel ranks, block sizes and
orders may differ; requests are mapped one by one, so the two sides may batch them as they like.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kaveri.errors import InvalidArgument
from kaveri.kv.layout import KvLayout
from kaveri.kv.partition import KvPartition
from kaveri.kv.regions import RegionCopy, TokenPlaces, map_regions


@dataclass(frozen=True, slots=True)
class Share:
    """What one source rank gives to one destination rank, of every token. Layers and heads are the model's."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a share that travels as one contiguous piece, [layers, 2, tokens, heads, head_dim] in the destination's
    order of tokens and heads."""

    layers: range
    """Of the model."""
    tokens: range
    byte_count: int


@dataclass(frozen=True, slots=True)
class KvPlan:
    """All shares between two partitions of one model (make_plan); every byte of the destination is in exactly one."""

    source: KvPartition
    destination: KvPartition
    shares: tuple[Share, ...]

    def shares_from(self, rank: int) -> tuple[Share, ...]:
        """What a source rank has to give."""
        return tuple(share for share in self.shares if share.source_rank == rank)

    def shares_to(self, rank: int) -> tuple[Share, ...]:
        """What a destination rank is given."""
        return tuple(share for share in self.shares if share.destination_rank == rank)

    def share_layout(self, share: Share) -> KvLayout:
        """The layout of a pool for a share alone, in the destination's blocks: that of a ticket for one share."""
        return self.destination.part_layout(share.layers, share.heads)

    def chunks(self, share: Share, layers: range, tokens: range, chunk_bytes: int) -> Iterator[Chunk]:
        """Cuts those of `layers` that the share has into chunks of at most `chunk_bytes`: several layers of all tokens
        while they fit, else some tokens of one layer. Both sides find the same ones from the same arguments.

        Raises InvalidArgument when not even one token of one layer fits.
        """
        shared = range(max(layers.start, share.layers.start), min(layers.stop, share.layers.stop))
        token_bytes = 2 * len(share.heads) * self.source.head_bytes
        if token_bytes > chunk_bytes:
            raise InvalidArgument("chunk_bytes", chunk_bytes, f"at least the {token_bytes} bytes of a token of a layer")
        if not tokens:
            return
        layer_step = max(1, chunk_bytes // (token_bytes * len(tokens)))
        token_step = min(len(tokens), chunk_bytes // token_bytes)
        for first_layer in range(shared.start, shared.stop, layer_step):
            chunk_layers = range(first_layer, min(first_layer + layer_step, shared.stop))
            for first_token in range(tokens.start, tokens.stop, token_step):
                chunk_tokens = range(first_token, min(first_token + token_step, tokens.stop))
                yield Chunk(chunk_layers, chunk_tokens, len(chunk_layers) * len(chunk_tokens) * token_bytes)

    def packing(self, share: Share, tokens: range, block_ids: Sequence[int]) -> tuple[RegionCopy, ...]:
        """From the source rank's blocks into a chunk, per layer. block_ids: the request's, from its first token on."""
        places = self._source_places(share, block_ids)
        return map_regions(tokens, len(share.heads), self.source.head_bytes, places, self._chunk_places(share, tokens))

    def unpacking(self, share: Share, tokens: range, block_ids: Sequence[int]) -> tuple[RegionCopy, ...]:
        """From a chunk into the destination rank's blocks, per layer."""
        places = self._destination_places(share, block_ids)
        return map_regions(tokens, len(share.heads), self.source.head_bytes, self._chunk_places(share, tokens), places)

    def direct(
        self, share: Share, tokens: range, source_ids: Sequence[int], destination_ids: Sequence[int]
    ) -> tuple[RegionCopy, ...]:
        """From blocks into blocks, per layer: for one who reaches both memories."""
        source, destination = self._source_places(share, source_ids), self._destination_places(share, destination_ids)
        return map_regions(tokens, len(share.heads), self.source.head_bytes, source, destination)

    def source_layers(self, share: Share, layers: range) -> slice:
        """The model's layers as layers of the source rank's pool."""
        return _within(self.source.layers(share.source_rank), layers)

    def destination_layers(self, share: Share, layers: range) -> slice:
        """The model's layers as layers of the destination rank's pool."""
        return _within(self.destination.layers(share.destination_rank), layers)

    def _source_places(self, share: Share, block_ids: Sequence[int]) -> TokenPlaces:
        first_head = share.heads.start - self.source.heads(share.source_rank).start
        return TokenPlaces.of_blocks(self.source.rank_layout(share.source_rank), block_ids, first_head)

    def _destination_places(self, share: Share, block_ids: Sequence[int]) -> TokenPlaces:
        first_head = share.heads.start - self.destination.heads(share.destination_rank).start
        return TokenPlaces.of_blocks(self.destination.rank_layout(share.destination_rank), block_ids, first_head)

    def _chunk_places(self, share: Share, tokens: range) -> TokenPlaces:
        return TokenPlaces.of_chunk(self.destination.layout.order, tokens, len(share.heads), self.source.head_bytes)


@lru_cache(maxsize=256)
def make_plan(source: KvPartition, destination: KvPartition) -> KvPlan:
    """The plan from one partition to another; computed once per pair. Raises LayoutMismatch naming the first field in
    which the two models differ: what cannot be mapped byte for byte is refused.

    Where the source holds a head several times, the destination's ranks take it from different ones.

    >>> from kaveri.kv.layout import KvLayout
    >>> layout = KvLayout("model", 4, block_tokens=16, kv_head_count=2, head_dim=8, dtype="float16")
    >>> plan = make_plan(KvPartition.even(layout, tensor_ranks=2), KvPartition.even(layout, pipeline_stages=2))
    >>> for share in plan.shares_from(0):
    ...     print(share)
    Share(source_rank=0, destination_rank=0, layers=range(0, 2), heads=range(0, 1))
    Share(source_rank=0, destination_rank=1, layers=range(2, 4), heads=range(0, 1))
    """
    source.layout.require_mappable(destination.layout)
    shares = []
    for source_rank in range(source.rank_count):
        replica = source_rank % source.tensor_ranks % source.replica_count
        for destination_rank in range(destination.rank_count):
            layers = _overlap(source.layers(source_rank), destination.layers(destination_rank))
            heads = _overlap(source.heads(source_rank), destination.heads(destination_rank))
            chosen = destination_rank % destination.tensor_ranks % source.replica_count == replica
            if layers and heads and chosen:
                shares.append(Share(source_rank, destination_rank, layers, heads))
    return KvPlan(source, destination, tuple(shares))


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(held: range, layers: range) -> slice:
    assert held.start <= layers.start <= layers.stop <= held.stop, "layers that the rank does not hold"
    return slice(layers.start - held.start, layers.stop - held.start)
