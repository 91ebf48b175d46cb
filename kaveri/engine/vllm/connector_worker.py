"""The connector's side in the model's process: the pool over vLLM's memory, and each step's progress for its rank."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from kaveri.engine.vllm.memory import Mirror, SharedCache, blocks_of, layout_of, pool_over
from kaveri.engine.vllm.rank import StepOrders
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.engine.vllm.rank_server import serve_rank


class WorkerSide:
    """Worker side of the KV connector. Called by vLLM on the thread that computes.

    ranks_at: address where the engine listens for its ranks, if this one is in a process of its own; else empty.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        model_fingerprint: str,
        ranks_at: str = "",
    ) -> None:
        self.cache = SharedCache()
        self._layout_of = partial(layout_of, vllm_config, kv_cache_config, model_fingerprint)
        self._ranks_at = ranks_at
        self._mirror: Mirror | None = None
        self._plane: RankPlane | None = None
        self._layers: dict[str, int] = {}
        self._orders = StepOrders()
        _permit_matrix_tiles()

    @property
    def plane(self) -> RankPlane:
        assert self._plane is not None, "vLLM has not registered its KV cache"
        return self._plane

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Make the rank's KV pool over vLLM's cache tensors, by layer name. Raises ConfigError for their layout."""
        rank = get_tensor_model_parallel_rank()
        layout = self._layout_of()
        part = layout.rank(rank)
        cache = blocks_of(caches, part)
        pool = pool_over(cache, part, self.cache.memory)
        if pool is None:
            self._mirror = Mirror(part, cache)
            pool = self._mirror.pool
        self._plane = RankPlane(layout, pool)
        self._layers = {name: index for index, name in enumerate(caches)}
        if self._ranks_at:
            serve_rank(self._plane, rank, self._ranks_at)

    def begin_step(self, orders: StepOrders) -> None:
        self._orders = orders
        if self._mirror is not None:
            self._mirror.take_out(orders.left_block_ids)
            self._mirror.bring_in(orders.landed_block_ids)
        if self._plane is not None:
            self._plane.begin_step(orders.chunks)

    def layer_done(self, layer_name: str) -> None:
        """Push the step's KV of a layer whose attention has ended. With a mirror, end_step() pushes it instead."""
        if self._mirror is None and self._plane is not None:
            self._plane.layer_done(self._layers[layer_name])

    def end_step(self) -> None:
        """Handle the end of the model's forward: all of the step's KV is in vLLM's cache."""
        if self._plane is not None:
            if self._mirror is not None:
                self._mirror.take_out(sorted(self._plane.written_blocks().union(self._orders.completed_block_ids)))
            self._plane.end_step()

    def take_released(self) -> set[str]:
        """Return ids, in vLLM, of ended requests whose blocks vLLM gets back after this step; each once."""
        orders, self._orders = self._orders, StepOrders()
        return set(orders.released)


def _permit_matrix_tiles() -> None:
    """Request AMX tile registers from the kernel if the CPU has them.

    vLLM's bfloat16 attention uses AMX without this request, and the kernel kills a process without the permission
    (SIGILL). The permission is per process; oneDNN requests it only in some kernels.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
