import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.view import BOTH_PHASES, Phase
from kaveri.engine.contract import EngineStopped
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, NoToken, SequenceSlice
from kaveri.errors import ConfigError
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import BROKEN_STATUS
from kaveri.hosting.trial import Trial
from kaveri.kv.transfer.ticket import KvEndpoint
from tests.library.hosting.idle_service import IdleService

SOON_S = 60.0


PREFILL, DECODE = (Phase.PREFILL,), (Phase.DECODE,)


class _Runner(FakeRunner):
    """Records (first position, token count) of each step's slices."""

    def __init__(self, model: FakeModel | None = None) -> None:
        super().__init__(model)
        self.steps: list[list[tuple[int, int]]] = []

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        self.steps.append([(part.start, len(part.token_ids)) for part in batch])
        return super().run(batch, on_layer)


class _Incapable(_Runner):
    """Cannot compute chunks (prefill), or single tokens after others (decode)."""

    def __init__(self, phases: tuple[Phase, ...], failure: BaseException | None) -> None:
        super().__init__()
        self._phases = phases
        self._failure = failure

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        drawn = super().run(batch, on_layer)
        fails = [len(part.token_ids) > 1 if self._phases == PREFILL else part.start > 0 for part in batch]
        if any(fails) and self._failure is not None:
            raise self._failure
        return [NoToken("not a number") if failed else each for each, failed in zip(drawn, fails, strict=True)]


def _host(store: MemoryStore, phases: tuple[Phase, ...], engine: StepwiseEngine, hosted: IdleService) -> EngineHost:
    config = InstanceConfig(instance_id="a", engine="fake")
    served = ServedPhases(dict.fromkeys(phases, hosted), phases)
    return EngineHost(config, engine, store, served, ["kaveri.v1.X"], lambda _: None, incarnation=1)


@asynccontextmanager
async def _serving(phases: tuple[Phase, ...], engine: StepwiseEngine, hosted: IdleService) -> AsyncIterator[EngineHost]:
    stopping = asyncio.Event()
    async with MemoryStore(MemoryCluster()) as store:
        host = _host(store, phases, engine, hosted)
        serving = asyncio.create_task(host.serve(stopping))
        await asyncio.wait_for(host.started.wait(), SOON_S)
        yield host
        stopping.set()
        assert await asyncio.wait_for(serving, SOON_S) == 0


@pytest.mark.parametrize(
    ("phases", "slices"),
    [
        (PREFILL, [(0, 1), (0, 2)]),
        (DECODE, [(0, 1), (0, 2), (2, 1)]),
        (BOTH_PHASES, [(0, 1), (0, 2), (2, 1)]),
    ],
)
async def test_engine_computes_a_chunk_and_where_it_decodes_a_decode_step_and_keeps_nothing(
    phases: tuple[Phase, ...], slices: list[tuple[int, int]], tmp_path: Path
) -> None:
    runner, hosted = _Runner(), IdleService()
    listen = [KvEndpoint("unix", str(tmp_path / "kv.sock"))] if phases == DECODE else []
    engine = StepwiseEngine(runner, 300, listen=listen)
    async with _serving(phases, engine, hosted):
        # One prompt step, or two if the engine began the first prompt early; and a decode step.
        assert sorted(part for step in runner.steps for part in step) == slices
        assert hosted.events == []
        stats = engine.stats()
        assert (stats.free_blocks, stats.context_tokens, stats.running_requests) == (300, 0, 0)
        engine.check_integrity()


@pytest.mark.parametrize("phases", [PREFILL, DECODE])
@pytest.mark.parametrize(
    ("kind", "reason"), [(None, "not a number"), (RuntimeError, "head size 6"), (SystemExit, "gone")]
)
async def test_engine_that_cannot_run_its_model_never_registers(
    phases: tuple[Phase, ...], kind: type[BaseException] | None, reason: str
) -> None:
    # Its traceback keeps the engine and the server until the interpreter ends.
    failure = None if kind is None else kind(reason)
    engine = StepwiseEngine(_Incapable(phases, failure), 300)
    async with MemoryStore(MemoryCluster()) as store:
        host = _host(store, phases, engine, IdleService())
        with pytest.raises(ConfigError, match="cannot run this model") as raised:
            await asyncio.wait_for(host.serve(asyncio.Event()), SOON_S)
        assert raised.value.field == "engine"
        assert reason in raised.value.reason
        assert not host.started.is_set()
        assert not store.view().instances


@pytest.mark.parametrize(
    ("max_model_len", "total_blocks", "block_tokens"), [(2, 1, 16), (2, 2, 1), (3, 3, 1), (16, 1, 16)]
)
@pytest.mark.parametrize("phases", [PREFILL, BOTH_PHASES])
async def test_smallest_engines_pass(
    phases: tuple[Phase, ...], max_model_len: int, total_blocks: int, block_tokens: int
) -> None:
    runner = _Runner(FakeModel(max_model_len=max_model_len, block_tokens=block_tokens, vocab_size=2))
    async with _serving(phases, StepwiseEngine(runner, total_blocks), IdleService()):
        assert runner.steps


async def test_stopping_during_the_trial_ends_the_instance() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class SlowRunner(FakeRunner):
        def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
            begun.set()
            go_on.wait(SOON_S)
            return super().run(batch, on_layer)

    stopping = asyncio.Event()
    async with MemoryStore(MemoryCluster()) as store:
        host = _host(store, PREFILL, StepwiseEngine(SlowRunner(), 300), IdleService())
        serving = asyncio.create_task(host.serve(stopping))
        assert await asyncio.to_thread(begun.wait, SOON_S)
        stopping.set()
        go_on.set()
        assert await asyncio.wait_for(serving, SOON_S) == 0
        assert not host.started.is_set()


async def test_engine_that_computes_nothing_is_given_up() -> None:
    engine = StepwiseEngine(FakeRunner(), 300)
    try:
        with pytest.raises(ConfigError, match=r"did not end in 0\.1 s"):
            await Trial(engine, decodes=True).run(timeout_s=0.1)
    finally:
        engine.close()


async def test_engine_that_stops_right_behind_its_trial_breaks_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepwiseEngine(_Runner(), 300)
    run = Trial.run
    async with MemoryStore(MemoryCluster()) as store:
        host = _host(store, PREFILL, engine, IdleService())

        async def run_and_stop(trial: Trial) -> None:
            await run(trial)
            host._handle([EngineStopped("late")])

        monkeypatch.setattr(Trial, "run", run_and_stop)
        assert await asyncio.wait_for(host.serve(asyncio.Event()), SOON_S) == BROKEN_STATUS
