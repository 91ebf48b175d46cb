"""The simulated engine does what every engine must, and its KV shows what went wrong."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from kaveri.engine.stepwise.fake import FakeModel
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_endings import EndingConformance
from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance
from kaveri.testing.engine_rules import RulesConformance
from tests.simulation.cluster.engine import SimulatedEngine
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.kv_sender import SimulatedSender
from tests.simulation.cluster.kv_wire import LoopWire

ResultT = TypeVar("ResultT")
_STEP_S = 5e-4


class _LoopThread:
    """A loop in real time on a thread of its own, for a suite that calls engines from any thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.wire = LoopWire()
        self.rng = random.Random(1)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """The result of `function`, called on the loop."""
        if threading.current_thread() is self._thread:
            return function()

        async def run() -> ResultT:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20.0)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class _OnThread:
    """A simulated engine or replica store that any thread may call."""

    def __init__(self, thread: _LoopThread, make: Callable[[], object]) -> None:
        self._thread = thread
        self._target = thread.call(make)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if not callable(member):
            return member
        return lambda *arguments, **named: self._thread.call(lambda: member(*arguments, **named))


def _simulated_replicas(thread: _LoopThread, layout: KvLayout, block_count: int) -> Replicas:
    model = FakeModel(layer_count=1, block_tokens=layout.block_tokens, eos_probability=_EOS)
    memory = KvMemory(model, block_count)
    epoch = thread.rng.getrandbits(63)
    return Replicas(
        layout,
        BlockAllocator(block_count),
        lambda told: SimulatedReceiver(memory, layout, thread.wire, epoch, told),
        lambda told: SimulatedSender(memory, layout, thread.wire, told),
        token_bytes=thread.rng.randbytes,
    )


_EOS = 0.02
"""Chance of each token to be the end of its answer."""


class _SimulatedHarness:
    def __init__(self, thread: _LoopThread, block_tokens: int) -> None:
        self._thread = thread
        self._block_tokens = block_tokens

    def _engine(self, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int) -> _OnThread:
        model = FakeModel(
            max_model_len=max_model_len, layer_count=1, block_tokens=self._block_tokens, eos_probability=_EOS
        )
        return _OnThread(
            self._thread,
            lambda: SimulatedEngine(
                model,
                wire=self._thread.wire,
                rng=random.Random(self._thread.rng.getrandbits(64)),
                block_count=total_blocks,
                chunk_tokens=chunk_tokens,
                max_batch=max_batch,
                step_s=_STEP_S,
            ),
        )

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> _OnThread:
        return self._engine(max_model_len, total_blocks, chunk_tokens, 8)

    def decode_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int) -> _OnThread:
        return self._engine(max_model_len, total_blocks, chunk_tokens, max_batch)

    def replica_store(self, layout: KvLayout, block_count: int) -> _OnThread:
        return _OnThread(self._thread, lambda: _simulated_replicas(self._thread, layout, block_count))

    def kept_replicas(self, engine: Any) -> _OnThread:
        return _OnThread(self._thread, lambda: engine._target.keep_replicas((), 0))

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return FakeModel(eos_probability=_EOS).answer(token_ids, 0, token_count)


class TestSimulatedEngine(
    EngineConformance,
    EndingConformance,
    RulesConformance,
    ResumptionConformance,
    ReplicationConformance,
    ReleaseConformance,
):
    @pytest.fixture(params=[4, 16], ids=["blocks of 4", "blocks of 16"])
    def harness(self, request: pytest.FixtureRequest) -> Iterator[_SimulatedHarness]:
        thread = _LoopThread()
        try:
            yield _SimulatedHarness(thread, request.param)
        finally:
            thread.stop()
