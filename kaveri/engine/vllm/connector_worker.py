"""The connector's side beside the model: the pool over vLLM's memory, and what of a step may be pushed when.

Bytes are moved by the KV sender and receiver, which belong to the engine that attaches itself here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kaveri.engine.stepwise_pushes import Pushes
from kaveri.engine.stepwise_sequence import Source
from kaveri.engine.vllm.memory import SharedCache, blocks_of, layout_of, pool_over
from kaveri.engine.vllm.mirror import Mirror
from kaveri.kv.pool import KvPool

StepAdvances = Sequence[tuple[Source, int, int]]
"""The prompts that a step computes: of each, how many tokens it had computed, those of the prefix cache not counted,
and how many it has behind the step, those counted."""


class WorkerSide:
    """Called by vLLM on the thread that steps it, but for what says otherwise.

    mirrored: have a mirror of vLLM's cache even where it lies in host memory; for tests of what devices need.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, model_fingerprint: str, *, mirrored: bool = False
    ) -> None:
        self.cache = SharedCache()
        self.pushes: Pushes | None = None
        """Of the engine that is attached."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._model_fingerprint = model_fingerprint
        self._mirrored = mirrored
        self._mirror: Mirror | None = None
        self._pool: KvPool | None = None
        self._layers: dict[str, int] = {}
        self._in_step: StepAdvances = ()
        self._sent: set[str] = set()
        self._received: set[str] = set()

    @property
    def pool(self) -> KvPool:
        """Over vLLM's own memory, or over its mirror where that is on a device; once it is there."""
        assert self._pool is not None, "vLLM has not registered its KV cache"
        return self._pool

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """vLLM's KV cache is there. Raises ConfigError when it is none that we can push."""
        layout = layout_of(self._vllm_config, self._kv_cache_config, self._model_fingerprint)
        cache = blocks_of(caches, layout)
        self._pool = None if self._mirrored else pool_over(cache, layout, self.cache.memory)
        if self._pool is None:
            self._mirror = Mirror(layout, cache)
            self._pool = self._mirror.pool
        self._layers = {name: index for index, name in enumerate(caches)}

    def begin_step(self, advances: StepAdvances) -> None:
        """The model is about to compute these prompts."""
        if advances and self.pushes is not None:
            self.pushes.begin_step((source, computed) for source, _, computed in advances)
            self._in_step = advances

    def layer_done(self, layer_name: str) -> None:
        """The step's KV of this layer is in vLLM's cache, or will be when the device gets there."""
        if self._in_step and self._mirror is None and self.pushes is not None:
            self.pushes.layer_done(self._layers[layer_name])

    def end_step(self) -> None:
        """The same of all layers."""
        if self._in_step and self.pushes is not None:
            if self._mirror is not None:
                self._mirror.take_out(sorted(self._written_blocks()))
            self.pushes.end_step()
        self._in_step = ()

    def _written_blocks(self) -> set[int]:
        """Those that the step has completed; with a prompt's first chunk those of the prefix cache, too."""
        block_tokens = self.pool.layout.block_tokens
        return {
            block
            for source, before, _ in self._in_step
            for block in source.block_ids[before // block_tokens : source.ready_in_step]
        }

    def report_received(self, vllm_id: str, block_ids: Sequence[int]) -> None:
        """With the next step vLLM hears that a request's KV, which has landed in these blocks, is there."""
        if self._mirror is not None:
            self._mirror.bring_in(block_ids)
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
