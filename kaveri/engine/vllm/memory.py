"""Exposes vLLM's KV cache as a pool: its location, the layout of a block, and a host copy of a device cache."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import vllm
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kaveri.engine.host_window import copy_blocks, host_window, in_words
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import HEADS_FIRST, KvLayout
from kaveri.kv.tiers.pool import KvPool, SharedMemory

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SharedCache(TorchFunctionMode):
    """Makes vLLM allocate its KV cache in a shared memory file, so that other local processes can write to it (shm).

    While active, as the connector's get_mem_pool_context(), it replaces the single torch.zeros(byte_count,
    dtype=torch.int8) on the host that allocates vLLM's whole cache; other calls are unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: SharedMemory | None = None
        """Shared memory file, once vLLM has allocated its cache from it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8:
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "cpu" and self.memory is None:
                self.memory = SharedMemory(args[0])
                return torch.from_numpy(self.memory.bytes).view(torch.int8)
        return func(*args, **kwargs)


def blocks_of(caches: Mapping[str, Tensor], layout: KvLayout) -> Tensor:
    """View vLLM's KV cache as [layer_count, block_count, block_bytes], uint8, on the cache's device.

    caches: as registered by vLLM: a tensor [block_count, kv_head_count, block_tokens, 2 * head_dim] per layer, in layer
    order, with any byte order. Raises ConfigError if a layer's block is not contiguous, or layers are not evenly
    spaced.
    """
    tensors = list(caches.values())
    first = tensors[0]
    element_bytes = first.element_size()
    layer_stride = 0
    if len(tensors) > 1:
        layer_stride = (tensors[1].data_ptr() - first.data_ptr()) // element_bytes
    for index, tensor in enumerate(tensors):
        if (tensor.shape, tensor.stride()) != (first.shape, first.stride()) or not _is_one_run(tensor):
            raise ConfigError("kv_cache_layout", f"a block of layer {index} of vLLM's KV cache is not one run of bytes")
        if tensor.data_ptr() != first.data_ptr() + index * layer_stride * element_bytes:
            raise ConfigError("kv_cache_layout", f"layer {index} of vLLM's KV cache lies apart from the others")
    size = (len(tensors), first.shape[0], first[0].numel())
    view = first.as_strided(size, (layer_stride, first.stride(0), 1), int(first.storage_offset())).view(torch.uint8)
    assert view.shape[2] == layout.block_bytes, f"a block of {view.shape[2]} bytes where {layout.block_bytes} are due"
    return view


def pool_over(cache: Tensor, layout: KvLayout, shared: SharedMemory | None) -> KvPool | None:
    """Return a KV pool over vLLM's own memory; None if transports cannot access it, as on a GPU. cache: from
    blocks_of(). shared: file in which vLLM may have allocated the cache."""
    if cache.device.type != "cpu" or not cache.is_contiguous():
        return None
    memory: npt.NDArray[np.uint8] = cache.numpy()
    if shared is not None and shared.bytes.ctypes.data != memory.ctypes.data:
        shared = None
    if shared is None:
        # The first access to a page during a request would cost several times a copy.
        memory.reshape(-1)[:: os.sysconf("SC_PAGE_SIZE")] = 0
    return KvPool.over(layout, memory, shared)


def _is_one_run(tensor: Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


class Mirror:
    """Copy in host memory of a KV cache on a device: pushes read from it, and incoming transfers write to it.

    Block i of the pool mirrors block i of the cache. Copies block until the device is done: KV is copied after a step,
    so a push overlaps with later steps, not with the layers of its own. Called only by the thread that computes.

    cache: [layer_count, block_count, block_bytes], uint8, on any device: a view of vLLM's own memory.
    """

    def __init__(self, layout: KvLayout, cache: Tensor) -> None:
        self.pool = KvPool(layout, cache.shape[1])
        window = host_window(self.pool.memory, cache.device, self)
        self._host = in_words(torch.from_numpy(self.pool.memory) if window is None else window)
        self._cache = in_words(cache)

    def take_out(self, block_ids: Sequence[int]) -> None:
        """Copy blocks of all layers from the device to the host, including KV computed before this call."""
        if block_ids:
            copy_blocks(self._cache, self._host, block_ids)

    def bring_in(self, block_ids: Sequence[int]) -> None:
        """Copy blocks of all layers from the host to the device; visible to later readers on return."""
        if block_ids:
            copy_blocks(self._host, self._cache, block_ids)
            if self._cache.is_cuda:
                # vLLM computes on its own stream.
                torch.cuda.synchronize(self._cache.device)


def layout_of(vllm_config: Any, kv_cache_config: Any, model_fingerprint: str) -> KvLayout:
    """Return the KV layout of this vLLM engine over all ranks. Call after the model is loaded.

    model_fingerprint: of the checkpoint; the layout's fingerprint also covers vLLM's choices. Raises ConfigError if the
    layout is unsupported.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigError("model", f"only models with full attention in every layer are served on vLLM; it has {kinds}")
    spec = groups[0].kv_cache_spec
    if spec.head_size_v != spec.head_size or spec.dtype not in _DTYPE_NAMES:
        raise ConfigError("model", f"its KV cache is {spec.dtype}, {spec.head_size} and {spec.head_size_v} wide")
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layout = KvLayout(
        model_fingerprint=_with_rotary_choice(model_fingerprint),
        layer_count=len(groups[0].layer_names),
        block_tokens=spec.block_size,
        kv_head_count=vllm_config.model_config.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype=_DTYPE_NAMES[spec.dtype],
        order=_order(vllm_config, groups[0].layer_names),
        tensor_ranks=ranks,
    )
    if layout.rank(0).kv_head_count != spec.num_kv_heads:
        reason = f"{ranks} ranks of {layout.kv_head_count} KV heads have {spec.num_kv_heads} each on vLLM"
        raise ConfigError("model", reason)
    return layout


def _with_rotary_choice(model_fingerprint: str) -> str:
    """Add vLLM's choice of rotary factors to a fingerprint: LongRoPE (Ding et al. 2024, arXiv 2402.13753) has two sets,
    and vLLM picks one for all positions by its configured length. Their KV is incompatible."""
    chosen = {rotary.use_long_rope for rotary in _ROPE_DICT.values() if hasattr(rotary, "use_long_rope")}
    return model_fingerprint + "-long" if True in chosen else model_fingerprint


def _order(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Return the name of the data order within a block. Two engines exchange blocks only if names are equal. If heads
    come first, their rank counts may differ: vLLM computes each head separately.

    On the CPU the instruction set decides: "vec" holds K transposed, "amx" in tiles.
    """
    context = vllm_config.compilation_config.static_forward_context
    kinds = {
        f"{context[name].get_attn_backend().get_name()}-{getattr(context[name], 'isa', '')}" for name in layer_names
    }
    if len(kinds) != 1:
        raise ConfigError("model", f"its layers have different attention backends on vLLM: {', '.join(sorted(kinds))}")
    physical = vllm_config.cache_config.get_resolved_kv_cache_layout()
    # Letters of vLLM's layout: layer, block, head, token, and the data of one token and head.
    heads_first = HEADS_FIRST if physical.name.startswith("LBH") else ""
    return f"{heads_first}vllm-{vllm.__version__}-{kinds.pop().rstrip('-').lower()}-{physical.name}"
