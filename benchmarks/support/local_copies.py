"""Memory copies within one process, for kv.transfer to compare shared memory with."""

from collections.abc import Sequence

import numpy as np

from kaveri.kv.tiers.pool import KvPool

MEMCPY = "memcpy"
"""np.copyto, a layer at a time; of contiguous blocks."""
GATHER_SCATTER = "gather + scatter"
"""np.take into a buffer, and from there to the places, indexed; of scattered blocks."""
EACH = "copy of each"
"""np.copyto from place to place, a block at a time; of scattered blocks."""
_STAGED_BYTES = 1 << 19


class LocalCopies:
    """Copies out of `pool` into another of the same shape."""

    def __init__(self, pool: KvPool) -> None:
        block_bytes = pool.layout.block_bytes
        # As words: numpy moves indexed bytes one at a time.
        self._source = pool.memory.view(np.int64)
        self._target = KvPool(pool.layout, pool.block_count).memory.view(np.int64)
        self._staged = np.zeros((max(1, _STAGED_BYTES // block_bytes), block_bytes // 8), np.int64)

    def copy(self, how: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Moves source[i] of each layer to target[i]."""
        for own, other in zip(self._source, self._target, strict=True):
            if how == MEMCPY:
                np.copyto(other[target[0] : target[-1] + 1], own[source[0] : source[-1] + 1])
            elif how == GATHER_SCATTER:
                for start in range(0, len(source), len(self._staged)):
                    blocks = source[start : start + len(self._staged)]
                    staged = self._staged[: len(blocks)]
                    np.take(own, blocks, axis=0, out=staged, mode="clip")
                    other[target[start : start + len(blocks)]] = staged
            else:
                for from_block, to_block in zip(source, target, strict=True):
                    np.copyto(other[to_block], own[from_block])
