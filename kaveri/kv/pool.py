"""The memory that holds KV blocks. Owns bytes, knows nothing of requests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kaveri.kv.layout import KvLayout


class KvPool:
    """`block_count` blocks in each of the layout's layers, in one piece of host memory, prefaulted.

    memory: [layer_count, block_count, block_bytes], uint8, C-contiguous, page-aligned. First touch of fresh memory is
    several times slower than copying, so every page is touched here and never on the way of a request.
    """

    def __init__(self, layout: KvLayout, block_count: int) -> None:
        self.layout = layout
        self.block_count = block_count
        shape = (layout.layer_count, block_count, layout.block_bytes)
        page_bytes = 4096
        raw = np.empty(int(np.prod(shape)) + page_bytes, np.uint8)
        offset = -raw.ctypes.data % page_bytes
        raw.fill(0)
        self.memory: npt.NDArray[np.uint8] = raw[offset : offset + raw.size - page_bytes].reshape(shape)
        self._layers = [layer.data.cast("B") for layer in self.memory.reshape(shape[0], -1)]

    def regions(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of these blocks of one layer, in this order; neighbours are one region. Views, not copies.

        block_ids must lie in [0, block_count): a view beyond the end is silently short.
        """
        view, block_bytes = self._layers[layer], self.layout.block_bytes
        regions: list[memoryview] = []
        start = end = -1  # the run being gathered: blocks [start, end)
        for block in block_ids:
            if block != end:
                if end > start:
                    regions.append(view[start * block_bytes : end * block_bytes])
                start = block
            end = block + 1
        if end > start:
            regions.append(view[start * block_bytes : end * block_bytes])
        return regions
