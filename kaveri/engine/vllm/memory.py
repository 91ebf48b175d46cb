"""Where vLLM's KV cache lies and what a block of it looks like: one pool over vLLM's own memory, nothing is copied."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import vllm
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kaveri.errors import ConfigError
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool, SharedMemory

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SharedCache:
    """Lets vLLM allocate its KV cache in a memory file, so that others of this host can write into it (shm)."""

    def __init__(self) -> None:
        self.memory: SharedMemory | None = None
        """The file, once vLLM has allocated its cache from it."""

    @contextmanager
    def allocation(self) -> Iterator[None]:
        """What vLLM allocates within, where it is told to by the connector's get_mem_pool_context."""
        with _ZerosFromFile(self):
            yield


class _ZerosFromFile(TorchFunctionMode):
    """vLLM makes its whole cache by one torch.zeros(byte_count, dtype=torch.int8). On the host that one comes from a
    memory file; whatever else is called is left alone."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__()
        self._cache = cache

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8:
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "cpu" and self._cache.memory is None:
                self._cache.memory = SharedMemory(args[0])
                return torch.from_numpy(self._cache.memory.bytes).view(torch.int8)
        return func(*args, **kwargs)


def pool_over(caches: Mapping[str, Tensor], layout: KvLayout, shared: SharedMemory | None) -> KvPool:
    """The pool whose memory is vLLM's own.

    caches: what vLLM registers: a tensor [block_count, kv_head_count, block_tokens, 2 * head_dim] for each layer, in
    the order of the layers. Raises ConfigError when they are not evenly spaced runs of whole blocks in host memory.
    """
    tensors = list(caches.values())
    first = tensors[0]
    layer_bytes = first.numel() * first.element_size()
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise ConfigError("device", f"vLLM's KV cache is on {tensor.device}; only host memory is pushed as yet")
        if tensor.shape != first.shape or not tensor.is_contiguous():
            raise ConfigError("kv_cache_layout", f"layer {index} of vLLM's KV cache is not a run of whole blocks")
        if tensor.data_ptr() != first.data_ptr() + index * layer_bytes:
            raise ConfigError("kv_cache_layout", f"layer {index} of vLLM's KV cache does not follow on the one before")
    shape = (len(tensors), first.shape[0], layout.block_bytes)
    whole = first.as_strided((len(tensors), first.numel()), (first.numel(), 1), int(first.storage_offset()))
    memory: npt.NDArray[np.uint8] = whole.view(torch.uint8).numpy().reshape(shape)
    if shared is not None and shared.bytes.ctypes.data != memory.ctypes.data:
        shared = None
    if shared is None:
        # What is first touched on the way of a request costs several times a copy.
        memory.reshape(-1)[:: os.sysconf("SC_PAGE_SIZE")] = 0
    return KvPool.over(layout, memory, shared)


def layout_of(vllm_config: Any, kv_cache_config: Any, model_fingerprint: str) -> KvLayout:
    """What a block of this vLLM engine looks like. Raises ConfigError for a cache whose blocks we cannot name."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigError("model", f"only models with full attention in every layer are served on vLLM; it has {kinds}")
    spec = groups[0].kv_cache_spec
    if spec.head_size_v != spec.head_size or spec.dtype not in _DTYPE_NAMES:
        raise ConfigError("model", f"its KV cache is {spec.dtype}, {spec.head_size} and {spec.head_size_v} wide")
    return KvLayout(
        model_fingerprint=model_fingerprint,
        layer_count=len(groups[0].layer_names),
        block_tokens=spec.block_size,
        kv_head_count=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=_DTYPE_NAMES[spec.dtype],
        order=_order(vllm_config, groups[0].layer_names),
    )


def _order(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Names what lies where within a block. Blocks may be copied between two engines only when all of it is equal.

    On the CPU the instruction set decides: "vec" holds K transposed, "amx" in tiles.
    """
    context = vllm_config.compilation_config.static_forward_context
    kinds = {
        f"{context[name].get_attn_backend().get_name()}-{getattr(context[name], 'isa', '')}" for name in layer_names
    }
    if len(kinds) != 1:
        raise ConfigError("model", f"its layers have different attention backends on vLLM: {', '.join(sorted(kinds))}")
    physical = vllm_config.cache_config.get_resolved_kv_cache_layout()
    return f"vllm-{vllm.__version__}-{kinds.pop().rstrip('-').lower()}-{physical.name}"
