"""Orders and load of an instance with one phase. tests/services/instance switches real ones."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.view import InstanceLoad, Phase
from kaveri.errors import InvalidArgument
from kaveri.hosting.metrics import PhaseMetrics
from kaveri.hosting.served_phases import FIRST_ORDER, ServedPhases
from tests.library.hosting.idle_service import IdleService


class OneRequest(IdleService):
    """A phase with one request until the test ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = asyncio.Event()

    @property
    def drained(self) -> bool:
        return self.calls[-1:] == ["drain"]

    def load(self) -> InstanceLoad:
        return InstanceLoad(running_requests=1 - self.is_idle, total_blocks=8)

    @property
    def is_idle(self) -> bool:
        return self.idle.is_set()

    async def wait_idle(self) -> None:
        await self.idle.wait()


async def test_a_phase_that_the_instance_cannot_serve_is_refused_and_changes_nothing() -> None:
    service = OneRequest()
    phases = ServedPhases({Phase.PREFILL: service}, [Phase.PREFILL])
    with pytest.raises(InvalidArgument, match="phases"):
        await phases.switch([Phase.DECODE], 2)
    load = phases.load()
    assert (load.phases, load.ending_phases, load.phase_order) == ((Phase.PREFILL,), (), FIRST_ORDER)
    assert not service.drained


async def test_a_phase_that_is_not_served_from_the_start_takes_nothing_until_it_is_ordered() -> None:
    service = OneRequest()
    service.idle.set()
    phases = ServedPhases({Phase.PREFILL: service}, [])
    assert (phases.load().phases, phases.load().total_blocks, service.drained) == ((), 8, True)
    assert await phases.switch([Phase.PREFILL], FIRST_ORDER + 1)
    assert (phases.load().phases, service.drained) == ((Phase.PREFILL,), False)


async def test_the_end_of_a_drain_starts_only_the_phases_that_are_ordered() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    phases.drain()
    phases.undrain()
    assert (prefill.drained, decode.drained) == (True, False)


async def test_an_order_that_comes_during_a_drain_is_served_when_the_drain_ends() -> None:
    prefill, decode = OneRequest(), OneRequest()
    decode.idle.set()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    phases.drain()
    assert not await phases.switch([Phase.PREFILL], FIRST_ORDER + 1)
    assert (prefill.drained, decode.drained) == (True, True)
    phases.undrain()
    assert (prefill.drained, decode.drained) == (False, True)


async def test_metrics_say_which_phases_take_requests_and_a_drain_or_an_order_changes_that() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.PREFILL, Phase.DECODE])
    registry = CollectorRegistry()
    phases.on_loads = PhaseMetrics("tiny", registry).note

    def ready() -> list[float | None]:
        phases.load()
        labels = [{"phase": phase.value, "model": "tiny"} for phase in (Phase.PREFILL, Phase.DECODE)]
        return [registry.get_sample_value("kaveri_phase_ready", each) for each in labels]

    assert ready() == [1, 1]
    phases.drain()
    assert ready() == [0, 0]
    phases.undrain()
    assert ready() == [1, 1]
    decode.idle.set()
    assert await phases.switch([Phase.PREFILL], FIRST_ORDER + 1)
    assert ready() == [1, 0]
