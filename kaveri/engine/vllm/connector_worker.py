"""The connector's side beside the model: the pool over vLLM's memory, and what of a step may be pushed when.

Bytes are moved by the KV sender and receiver, which belong to the engine that attaches itself here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kaveri.engine.stepwise_pushes import Pushes
from kaveri.engine.stepwise_sequence import Source
from kaveri.engine.vllm.memory import SharedCache, layout_of, pool_over
from kaveri.kv.pool import KvPool

StepAdvances = Sequence[tuple[Source, int]]
"""The prompts that a step computes, each with how many of its tokens are computed behind it."""


class WorkerSide:
    """Called by vLLM on the thread that steps it, but for what says otherwise."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, model_fingerprint: str) -> None:
        self.cache = SharedCache()
        self.pushes: Pushes | None = None
        """Of the engine that is attached."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._model_fingerprint = model_fingerprint
        self._pool: KvPool | None = None
        self._layers: dict[str, int] = {}
        self._in_step = False
        self._sent: set[str] = set()
        self._received: set[str] = set()

    @property
    def pool(self) -> KvPool:
        """Over vLLM's own memory, once that is there."""
        assert self._pool is not None, "vLLM has not registered its KV cache"
        return self._pool

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """vLLM's KV cache is there. Raises ConfigError when it is none that we can push."""
        layout = layout_of(self._vllm_config, self._kv_cache_config, self._model_fingerprint)
        self._pool = pool_over(caches, layout, self.cache.memory)
        self._layers = {name: index for index, name in enumerate(caches)}

    def begin_step(self, advances: StepAdvances) -> None:
        """The model is about to compute these prompts."""
        if advances and self.pushes is not None:
            self.pushes.begin_step(advances)
            self._in_step = True

    def layer_done(self, layer_name: str) -> None:
        """The step's KV of this layer is in the pool."""
        if self._in_step and self.pushes is not None:
            self.pushes.layer_done(self._layers[layer_name])

    def end_step(self) -> None:
        """All layers are computed."""
        if self._in_step and self.pushes is not None:
            self.pushes.end_step()
        self._in_step = False

    def report_received(self, vllm_id: str) -> None:
        """With the next step vLLM hears that a request's KV is there, and computes it from then on."""
        self._received.add(vllm_id)

    def report_released(self, vllm_id: str) -> None:
        """With the next step vLLM takes back the blocks of a request that has ended. Once for each."""
        # One that ends before vLLM has heard that its KV is there is not reported twice.
        self._received.discard(vllm_id)
        self._sent.add(vllm_id)

    @property
    def has_reports(self) -> bool:
        """Whether vLLM is to be told something."""
        return bool(self._sent or self._received)

    def take_reports(self) -> tuple[set[str], set[str]]:
        """What vLLM is told at the end of a step: sent and received, each id once."""
        reports = self._sent, self._received
        self._sent, self._received = set(), set()
        return reports
