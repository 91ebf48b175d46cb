"""Reorders the heads of blocks whose parts have landed side by side (parts.py)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kaveri.kv.layout.layout import KvLayout

_MERGED_BYTES = 1 << 22
"""Approximate bytes per copy."""


def merge_parts(layout: KvLayout, memory: npt.NDArray[np.uint8], block_ids: Sequence[int], ways: int) -> None:
    """Reorder the heads of blocks in which `ways` parts have landed side by side.

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
