import asyncio
import threading
from collections.abc import Sequence

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import Phase
from kaveri.engine.contract import EngineEvent, EngineKey, EngineRequest
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, SequenceSlice
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import BROKEN_STATUS
from tests.library.hosting.idle_service import IdleService

SOON_S = 60.0


class BusyService(IdleService):
    """Never becomes idle."""

    async def wait_idle(self) -> None:
        await asyncio.Event().wait()


class BrokenService(BusyService):
    """Fails on every event."""

    def handle(self, events: Sequence[EngineEvent]) -> None:
        raise LookupError(f"cannot take {len(events)} events")


def host_of(
    engine: StepwiseEngine, service: IdleService, store: MemoryStore, stuck_after_s: float = 30.0
) -> EngineHost:
    config = InstanceConfig(instance_id="prefill-0", engine="fake", stuck_after_s=stuck_after_s)
    phases = ServedPhases({Phase.PREFILL: service}, [Phase.PREFILL])
    return EngineHost(config, engine, store, phases, ["kaveri.v1.PrefillService"], lambda _: None, incarnation=1)


async def test_instance_whose_role_loses_an_event_fails_its_requests_and_leaves() -> None:
    service, engine = BrokenService(), StepwiseEngine(FakeRunner(), 1024)
    async with MemoryStore(MemoryCluster()) as store:
        host = host_of(engine, service, store)
        serving = asyncio.create_task(host.serve(asyncio.Event()))
        await asyncio.wait_for(host.started.wait(), SOON_S)
        engine.prefill(EngineRequest(EngineKey("a", 1), (1, 2, 3), 0, ResolvedParams(max_tokens=1, seed=0)))
        assert await asyncio.wait_for(serving, SOON_S) == BROKEN_STATUS
        assert "LookupError" in service.failed_with
        assert "prefill-0" not in store.view().instances


class StuckRunner(FakeRunner):
    """Never ends steps of long prompts, like a device that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        if any(len(one.token_ids) > 10 for one in batch):
            self.go_on.wait(SOON_S)
        return super().run(batch, on_layer)


async def test_instance_whose_engine_makes_no_step_any_more_fails_its_requests_and_leaves() -> None:
    service, runner = BusyService(), StuckRunner()
    engine = StepwiseEngine(runner, 1024)
    params = ResolvedParams(max_tokens=1, seed=0)
    async with MemoryStore(MemoryCluster()) as store:
        host = host_of(engine, service, store, stuck_after_s=0.5)
        serving = asyncio.create_task(host.serve(asyncio.Event()))
        try:
            await asyncio.wait_for(host.started.wait(), SOON_S)
            engine.prefill(EngineRequest(EngineKey("short", 1), (1, 2, 3), 0, params))
            engine.prefill(EngineRequest(EngineKey("long", 1), (1,) * 20, 0, params))
            assert await asyncio.wait_for(serving, SOON_S) == BROKEN_STATUS
        finally:
            runner.go_on.set()
        assert "the engine is stuck" in service.failed_with
        assert "prefill-0" not in store.view().instances
