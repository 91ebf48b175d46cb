"""Rejects engine settings that cannot work, before and after the model is loaded. Imports neither torch nor vLLM."""

import contextlib
import os
import re
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout

SHORTEST_MODEL_LEN = 2
"""One token of prompt and one of answer: no request is shorter."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver, of AMD's, and of Windows' subsystem for Linux."""


def require_model_len(max_model_len: int) -> None:
    """Raise ConfigError if max_model_len, in tokens, is too short for any request."""
    if max_model_len < SHORTEST_MODEL_LEN:
        reason = f"is {max_model_len}; it must be at least {SHORTEST_MODEL_LEN}: one token of prompt and one of answer"
        raise ConfigError("max_model_len", reason)


def require_room(max_model_len: int, layout: KvLayout, total_blocks: int) -> None:
    """Raise ConfigError unless a request of max_model_len tokens fits into the empty KV pool."""
    require_model_len(max_model_len)
    needed_blocks = layout.block_count(max_model_len)
    if needed_blocks > total_blocks:
        reason = (
            f"{max_model_len} tokens need {needed_blocks} KV blocks of {layout.block_tokens} tokens; "
            f"the pool has {total_blocks}"
        )
        raise ConfigError("max_model_len", reason)


def require_memory(kv_cache_memory: int) -> None:
    """Raise ConfigError for a KV pool, in bytes, that is larger than the memory of this machine or container."""
    available_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # No container, or one without a limit ("max"): no number to read.
    with contextlib.suppress(OSError, ValueError):
        available_bytes = min(available_bytes, int(_CGROUP_LIMIT.read_text()))
    if kv_cache_memory > available_bytes:
        reason = f"is {kv_cache_memory} bytes; this machine has {available_bytes}"
        raise ConfigError("kv_cache_memory", reason)


def has_gpu() -> bool:
    """Return True if a GPU driver is installed. Loads no library."""
    return any(path.exists() for path in _GPU_DEVICES)


def require_device(device: str) -> None:
    """Raise ConfigError unless the device is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ConfigError("device", f"is {device!r}; choose auto, cpu, cuda or cuda:N")
