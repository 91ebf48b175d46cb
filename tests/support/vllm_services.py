"""vLLM engines for service tests, with the sizes and step times that tests set for the fake engine."""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from kaveri.engine.settings import EngineSettings
from kaveri.engine.vllm.core import VllmCore
from kaveri.engine.vllm.engine import VllmEngine
from kaveri.engine.vllm.loading import load_core
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from tests.support.vllm_engines import LentCore


def prepare(model: str, loading: dict[str, Any]) -> Callable[..., VllmEngine]:
    """Load the model with these EngineSettings; return the function that makes engines on it, for EngineProcess."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    core = load_core(EngineSettings(model=model, **loading))

    def make(
        total_blocks: int,
        max_model_len: int,
        step_tokens: int,
        max_batch: int,
        step_s: float,
        listen: Sequence[KvEndpoint],
        transports: Sequence[str],
        advertise_host: str | None,
    ) -> VllmEngine:
        shaped = ShapedCore(core, total_blocks, max_model_len, step_tokens, step_s)
        spoken = partial(make_transports, tuple(transports), advertise_host)
        return VllmEngine(shaped, max_batch=max_batch, listen=listen, transports=spoken)

    return make


class ShapedCore(LentCore):
    """LentCore with smaller limits. step_tokens: max tokens per step. step_s: added to each step that computes."""

    def __init__(self, core: VllmCore, total_blocks: int, max_model_len: int, step_tokens: int, step_s: float) -> None:
        super().__init__(core, total_blocks)
        self.max_model_len = max_model_len
        self._scheduler.max_model_len = max_model_len
        self._chunk_tokens = step_tokens
        self._step_s = step_s

    def step(self, batch_count: int, held: Collection[Any] = ()) -> list[Any]:
        outputs = super().step(batch_count, held)
        if self._step_s and (outputs or self._scheduler.get_request_counts()[0]):
            threading.Event().wait(self._step_s)
        return outputs
