"""vLLM engines for tests: a process loads one model once, and makes many small engines on it, one after another."""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from kaveri.engine.settings import EngineSettings
from kaveri.engine.transformers import sampler
from kaveri.engine.vllm import connector_worker
from kaveri.engine.vllm.core import VllmCore
from kaveri.engine.vllm.engine import VllmEngine
from kaveri.engine.vllm.loading import load_core
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from tests.support.forked_ranks import fork_ranks

_VACATE_STEPS = 100


def prepare(model: str, loading: dict[str, Any]) -> Callable[..., VllmEngine]:
    """Load the model; return the function that makes engines on it, for EngineProcess. loading: fields of
    EngineSettings, and "mirrored": True to mirror the KV cache in host memory, as with a GPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork_ranks()
    if loading.pop("mirrored", False):
        # The ranks are forked, and have it, too.
        connector_worker.pool_over = lambda *_: None  # type: ignore[attr-defined]
    core = load_core(EngineSettings(model=model, **loading))

    def make(
        total_blocks: int,
        max_batch: int,
        listen: Sequence[KvEndpoint] = (),
        transports: Sequence[str] | None = None,
        pause_s: float = 0.0,
        deadly_token: int | None = None,
        deadly_seed: int | None = None,
    ) -> VllmEngine:
        spoken = None if transports is None else partial(make_transports, tuple(transports), None)
        lent = LentCore(core, total_blocks, pause_s)
        if deadly_token is not None:
            lent.plant(_in_forward_pass(core, deadly_token))
        if deadly_seed is not None:
            lent.plant(_in_draw(deadly_seed))
        return VllmEngine(lent, max_batch=max_batch, listen=listen, transports=spoken)

    return make


def _in_forward_pass(core: VllmCore, deadly_token: int) -> AbstractContextManager[object]:
    """Patch the model to raise in every step with a request whose prompt begins with this token."""
    executor = core._llm.engine_core.engine_core.model_executor
    execute, deadly = executor.execute_model, set[str]()

    def raises(scheduled: Any, *arguments: Any, **named: Any) -> Any:
        deadly.update(new.req_id for new in scheduled.scheduled_new_reqs if new.prompt_token_ids[0] == deadly_token)
        if deadly & scheduled.num_scheduled_tokens.keys():
            raise RuntimeError("a forward pass that raises")
        return execute(scheduled, *arguments, **named)

    return patch.object(executor, "execute_model", raises)


def _in_draw(deadly_seed: int) -> AbstractContextManager[object]:
    """Patch the sampler to raise at the third token of a request with this seed."""
    stream_state = sampler.stream_state

    def raises(seed: int, index: int) -> int:
        if (seed, index) == (deadly_seed, 2):
            raise IndexError("a draw that raises")
        return stream_state(seed, index)

    return patch.object(sampler, "stream_state", raises)


class LentCore(VllmCore):
    """Loaded vLLM that outlives the engines made on it. total_blocks: KV blocks that the engine may use. pause_s:
    seconds before each step, so that tests can observe the state between steps."""

    def __init__(
        self,
        core: VllmCore,
        total_blocks: int,
        pause_s: float = 0.0,
    ) -> None:
        vars(self).update(vars(core))
        self._pause_s = pause_s
        self._planted = ExitStack()
        self._llm.reset_prefix_cache()
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self._withheld = self._blocks.get_new_blocks(self._blocks.get_num_free_blocks() - total_blocks)

    def step(self, batch_count: int, held: Collection[Any] = ()) -> list[Any]:
        if self._pause_s:
            threading.Event().wait(self._pause_s)
        return super().step(batch_count, held)

    def reference_counts(self) -> dict[int, int]:
        withheld = {block.block_id for block in self._withheld}
        counts = super().reference_counts()
        return {block: count for block, count in counts.items() if block not in withheld}

    def plant(self, fault: AbstractContextManager[object]) -> None:
        self._planted.enter_context(fault)

    def shutdown(self) -> None:
        """Clean up the loaded model for the next engine."""
        self._planted.close()
        self._vacate()
        self._blocks.free_blocks(self._withheld)

    def _vacate(self) -> None:
        """End every request and free its blocks. No transfer may be open."""
        for vllm_id in tuple(self._scheduler.requests):
            self.abort(vllm_id)
            if self.holds(vllm_id):
                self.scheduler_side._next_orders.released.append(vllm_id)
        for _ in range(_VACATE_STEPS):
            if not self._scheduler.requests:
                return
            self._llm.step()
        raise AssertionError(f"vLLM keeps {len(self._scheduler.requests)} requests")
