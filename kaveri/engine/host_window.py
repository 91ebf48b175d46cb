"""Maps host memory into a GPU's address space: kernels then gather and scatter blocks across the bus themselves.

A copy through pageable memory is made twice, on one CPU thread, and waits for the device: 1 to 6 GB/s on a host with an
H100, whose bus takes 52.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kaveri.telemetry.logs import get_logger

_PORTABLE_AND_MAPPED = 1 | 2


def host_window(memory: npt.NDArray[np.uint8], device: torch.device, owner: object) -> Tensor | None:
    """Return `memory` as a uint8 tensor on the GPU, in the same shape; None if the device is no GPU or cannot pin it.

    memory: C-contiguous. owner: the pages stay pinned while this object lives; no copy may be under way when it dies.
    The caller synchronizes the device before the host reads what the device wrote.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE_AND_MAPPED)
        if int(error) != 0:
            _forget_error(device)
            get_logger().warning("kv_pool_not_locked", pool_bytes=memory.nbytes, cuda_error=int(error))
            return None
        window: Tensor = torch.as_tensor(_Pages(memory), device=device)
    # It references the memory, too: pages must be unlocked before they are unmapped.
    weakref.finalize(owner, _unlock, memory)
    return window


def in_words(blocks: Tensor) -> Tensor:
    """View uint8 blocks [..., bytes] as int64 if `bytes` is a multiple of 8: kernels copy element by element."""
    return blocks.view(torch.int64) if blocks.shape[-1] % 8 == 0 else blocks


def copy_blocks(source: Tensor, target: Tensor, block_ids: Sequence[int]) -> None:
    """Copy the blocks `block_ids` of all layers between pools, and wait for the device.

    source, target: [layer_count, block_count, ...], of one dtype and size. One may be a window on the host's memory.
    """
    ids = torch.tensor(block_ids)
    taken = source.index_select(1, ids.to(source.device))
    target.index_copy_(1, ids.to(target.device), taken.to(target.device))
    if taken.is_cuda:
        torch.cuda.current_stream(taken.device).synchronize()


class _Pages:
    """Offers memory by __cuda_array_interface__, so that torch wraps it without a copy."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.ctypes.data, False),
            "version": 2,
        }


def _unlock(memory: npt.NDArray[np.uint8]) -> None:
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(memory.ctypes.data)


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which is kept until it is read: the next kernel would be blamed for it."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError:
        torch.cuda.synchronize(device)
