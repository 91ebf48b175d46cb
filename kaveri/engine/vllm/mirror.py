"""A copy in host memory of a KV cache on a device: pushes read from it, and landings write to it.

Block i of the pool mirrors block i of the cache. Copies wait for the device: the KV of a chunk is copied after the
whole chunk, so a push overlaps with the chunks that follow, not with the layers of its own. They go through a window on
the pool (host_window.py), or through ordinary memory if there is none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kaveri.engine.host_window import copy_blocks, host_window, in_words
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool


class Mirror:
    """Copies blocks between the pool and the cache. Called by the engine's thread alone.

    cache: [layer_count, block_count, block_bytes], uint8, on any device: a view of vLLM's own memory.
    """

    def __init__(self, layout: KvLayout, cache: Tensor) -> None:
        self.pool = KvPool(layout, cache.shape[1])
        window = host_window(self.pool.memory, cache.device, self)
        self._host = in_words(torch.from_numpy(self.pool.memory) if window is None else window)
        self._cache = in_words(cache)

    def take_out(self, block_ids: Sequence[int]) -> None:
        """Copy blocks of all layers from the cache to the pool; KV computed before the call is in the copy."""
        if block_ids:
            copy_blocks(self._cache, self._host, block_ids)

    def bring_in(self, block_ids: Sequence[int]) -> None:
        """Copy blocks of all layers to the cache; later readers find them there when it returns."""
        if block_ids:
            copy_blocks(self._host, self._cache, block_ids)
            if self._cache.is_cuda:
                # vLLM computes on a stream of its own choosing.
                torch.cuda.synchronize(self._cache.device)
