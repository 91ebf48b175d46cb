"""Maps KV blocks of one layout to blocks of another. Pure: computes copies, moves no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kaveri.kv.layout.layout import ELEMENT_BYTES, KvLayout
from kaveri.kv.layout.regions import RegionCopy, TokenPlaces, map_regions


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Conversion from a source pool's blocks to those of a destination pool with another layout, whose layers and KV
    heads are the source's or some of them. Made by map_blocks().

    >>> whole = KvLayout("model", 4, block_tokens=32, kv_head_count=2, head_dim=8, dtype="float16")
    >>> upper = KvLayout("model", 2, 16, 1, 8, "float16", first_layer=2, first_kv_head=1)
    >>> mapped = map_blocks(whole, upper)
    >>> mapped.source_layer(0)
    2
    >>> for copy in mapped.copies(range(16, 32), [5], 0, [7], 16):  # K and V of 16 tokens, a head of 16 bytes each
    ...     print(copy.counts, copy.run_bytes, copy.source_strides, copy.destination_strides)
    (2, 16) 16 (1024, 32) (256, 16)
    """

    source: KvLayout
    destination: KvLayout

    def source_layer(self, layer: int) -> int:
        """Convert a layer's index in the destination pool to the same layer's index in the source pool."""
        return self.destination.first_layer + layer - self.source.first_layer

    def copies(
        self,
        tokens: range,
        source_ids: Sequence[int],
        source_first: int,
        destination_ids: Sequence[int],
        destination_first: int,
    ) -> tuple[RegionCopy, ...]:
        """Return the copies, per layer, that move the KV of `tokens` (positions in the request) between blocks.

        source_first, destination_first: position of the first token of the first block on that side.
        """
        if not self.destination.has_known_order:
            # The place of a token's bytes within the block is unknown: only whole blocks.
            block_tokens = self.destination.block_tokens
            stop = destination_first + -(-(tokens.stop - destination_first) // block_tokens) * block_tokens
            tokens = range(tokens.start, stop)
        heads = self.destination.kv_heads
        source_head = heads.start - self.source.first_kv_head
        source = TokenPlaces.of_blocks(self.source, source_ids, source_head, source_first)
        destination = TokenPlaces.of_blocks(self.destination, destination_ids, 0, destination_first)
        head_bytes = self.source.head_dim * ELEMENT_BYTES[self.source.dtype]
        return map_regions(tokens, len(heads), head_bytes, source, destination)


@lru_cache(maxsize=256)
def map_blocks(source: KvLayout, destination: KvLayout) -> BlockMap:
    """Return the map between two layouts (cached). The destination's layers and KV heads must be the source's or some
    of them. Raises LayoutMismatch if the blocks cannot be converted."""
    source.require_part(destination)
    return BlockMap(source, destination)
