"""Orders and load of an instance with one phase. tests/services/instance switches real ones."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.view import FIRST_ORDER, DrainWay, InstanceLoad, Phase, PhaseOrder
from kaveri.errors import InvalidArgument
from kaveri.hosting.metrics import PhaseMetrics
from kaveri.hosting.served_phases import ServedPhases
from tests.library.hosting.idle_service import IdleService

SECOND_ORDER = PhaseOrder(0, 2)


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
        await phases.switch([Phase.DECODE], SECOND_ORDER)
    load = phases.load()
    assert (load.phases, load.ending_phases, load.phase_order) == ((Phase.PREFILL,), (), FIRST_ORDER)
    assert not service.drained


async def test_a_phase_that_is_not_served_from_the_start_takes_nothing_until_it_is_ordered() -> None:
    service = OneRequest()
    service.idle.set()
    phases = ServedPhases({Phase.PREFILL: service}, [])
    assert (phases.load().phases, phases.load().total_blocks, service.drained) == ((), 8, True)
    assert await phases.switch([Phase.PREFILL], SECOND_ORDER)
    assert (phases.load().phases, service.drained) == ((Phase.PREFILL,), False)


async def test_a_phase_that_gets_a_request_back_while_it_ends_is_waited_for_again() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.DECODE: decode, Phase.PREFILL: prefill}, [Phase.PREFILL, Phase.DECODE])
    decode.idle.set()
    switching = asyncio.create_task(phases.switch([], SECOND_ORDER))
    await asyncio.sleep(0.01)
    decode.idle.clear()
    prefill.idle.set()
    await asyncio.sleep(0.01)
    assert phases.load().ending_phases == (Phase.DECODE,)
    decode.idle.set()
    assert await switching


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
    assert not await phases.switch([Phase.PREFILL], SECOND_ORDER)
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
    assert await phases.switch([Phase.PREFILL], SECOND_ORDER)
    assert ready() == [1, 0]


async def test_an_order_whose_deadline_passes_is_taken_back_and_the_load_says_why() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    prefill.idle.set()
    assert not await phases.switch([Phase.PREFILL], SECOND_ORDER, 0.05)
    load = phases.load()
    assert (load.phases, load.ending_phases, load.phase_order) == ((Phase.DECODE,), (), SECOND_ORDER)
    assert "after 0.05 s" in load.phase_fault
    assert (prefill.drained, decode.drained) == (True, False)
    decode.idle.set()
    assert await phases.switch([Phase.PREFILL], PhaseOrder(0, 3), 60.0)
    assert not phases.load().phase_fault


async def test_orders_of_a_later_leader_replace_those_of_an_earlier_one_whatever_their_numbers() -> None:
    service = OneRequest()
    service.idle.set()
    phases = ServedPhases({Phase.PREFILL: service}, [])
    assert phases.order([Phase.PREFILL], PhaseOrder(4, 9))
    assert phases.order([], PhaseOrder(5, 1))
    assert not phases.order([Phase.PREFILL], PhaseOrder(4, 10))
    assert phases.order([], PhaseOrder(5, 1)), "the order that it has"
    assert phases.ordered == frozenset()


async def test_an_order_that_is_repeated_with_a_new_number_is_taken_back_to_what_was_carried_out() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    prefill.idle.set()
    assert phases.order([Phase.PREFILL], SECOND_ORDER, 60.0)
    assert not await phases.switch([Phase.PREFILL], PhaseOrder(0, 3), 0.05)
    assert phases.load().phases == (Phase.DECODE,)


async def test_other_phases_under_a_number_that_is_known_are_no_order() -> None:
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    assert phases.order([Phase.PREFILL], SECOND_ORDER)
    assert phases.order([Phase.PREFILL], SECOND_ORDER)
    assert not phases.order([Phase.DECODE], SECOND_ORDER)


@pytest.mark.parametrize("served", [[Phase.PREFILL], [Phase.DECODE], [], [Phase.PREFILL, Phase.DECODE]])
async def test_a_phase_forgets_ended_requests_whether_it_is_served_or_not(served: list[Phase]) -> None:
    """load() is what forgets them."""
    looked: list[Phase] = []

    class Looked(OneRequest):
        def __init__(self, phase: Phase) -> None:
            super().__init__()
            self.phase = phase
            self.idle.set()

        def load(self) -> InstanceLoad:
            looked.append(self.phase)
            return super().load()

    phases = ServedPhases({phase: Looked(phase) for phase in Phase}, served)
    assert phases.load().phases == tuple(served)
    assert set(looked) == set(Phase)


async def test_an_order_during_a_drain_leaves_the_drain_as_it_is() -> None:
    """The order changes neither the drain way nor the retry time of refusals."""
    prefill, decode = OneRequest(), OneRequest()
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: decode}, [Phase.DECODE])
    phases.drain()
    calls = len(prefill.calls), len(decode.calls)
    assert phases.order([Phase.PREFILL], SECOND_ORDER, way=DrainWay.FINISH)
    assert (len(prefill.calls), len(decode.calls)) == calls
    phases.undrain()
    assert (prefill.drained, decode.drained) == (False, True)


async def test_a_partner_holds_until_an_order_with_a_greater_number_names_another_one() -> None:
    phases = ServedPhases({Phase.DECODE: OneRequest()}, [Phase.DECODE], is_paired=True)
    assert phases.load().partner_id == ""
    assert phases.set_partner("engine-1", PhaseOrder(4, 9))
    assert not phases.set_partner("engine-2", PhaseOrder(4, 9))
    assert not phases.set_partner("engine-2", PhaseOrder(3, 10))
    assert phases.set_partner("engine-1", PhaseOrder(4, 9)), "the order that it has"
    assert phases.load().partner_id == "engine-1"
    assert phases.set_partner("", PhaseOrder(5, 1))
    assert (phases.load().partner_id, phases.load().phase_order) == ("", FIRST_ORDER)


async def test_an_instance_that_is_not_to_be_in_a_pair_refuses_a_partner() -> None:
    phases = ServedPhases({Phase.DECODE: OneRequest()}, [Phase.DECODE])
    with pytest.raises(InvalidArgument, match="partner_id"):
        phases.set_partner("engine-1", SECOND_ORDER)
    assert phases.load().partner_id is None
