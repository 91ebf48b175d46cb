import asyncio
from typing import Any

import grpc

from kaveri.domain.view import FIRST_ORDER, Phase, PhaseOrder
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses

PREFILL, DECODE, BOTH = (Phase.PREFILL,), (Phase.DECODE,), (Phase.PREFILL, Phase.DECODE)
WAIT_S = 60.0
SLOW = {"fake_step_s": 0.002}
ANSWER_TOKENS = 60


async def test_a_phase_that_stops_finishes_what_it_has_and_takes_nothing_new(cluster: Any) -> None:
    instance = await cluster.colocated(**{**SLOW, "fake_step_s": 0.01})
    router = await cluster.router()
    call = router.prefill(instance, "a", prompt(1, 50), max_tokens=100)
    await eventually(lambda: ("a", 1) in router.tokens, "it decodes")
    switching = asyncio.create_task(instance.host.switch(PREFILL, PhaseOrder(0, 2)))
    await eventually(lambda: instance.load().ending_phases == DECODE, "decode ends")
    assert instance.load().phases == BOTH
    assert not switching.done()
    assert await router.answer(call, "a") == cluster.expected(prompt(1, 50), 100)
    assert await asyncio.wait_for(switching, WAIT_S)
    assert (instance.load().phases, instance.load().ending_phases) == (PREFILL, ())


async def test_a_newer_order_replaces_one_that_is_being_carried_out_and_an_older_one_does_not_count(
    cluster: Any,
) -> None:
    instance = await cluster.colocated(**{**SLOW, "fake_step_s": 0.01})
    router = await cluster.router()
    call = router.prefill(instance, "a", prompt(1, 50), max_tokens=100)
    await eventually(lambda: ("a", 1) in router.tokens, "it decodes")
    switching = asyncio.create_task(instance.host.switch(PREFILL, PhaseOrder(0, 5)))
    await eventually(lambda: instance.load().ending_phases == DECODE, "decode ends")
    assert not await instance.host.switch(DECODE, PhaseOrder(0, 5))
    assert not await instance.host.switch(DECODE, PhaseOrder(0, 4))
    assert await instance.host.switch(BOTH, PhaseOrder(0, 6))
    load = instance.load()
    assert (load.phases, load.ending_phases, load.phase_order) == (
        BOTH,
        (),
        PhaseOrder(0, 6),
    )
    again = router.prefill(instance, "b", prompt(2, 50), max_tokens=3)
    assert await router.answer(again, "b") == cluster.expected(prompt(2, 50), 3)
    assert await router.answer(call, "a") == cluster.expected(prompt(1, 50), 100)
    assert not await asyncio.wait_for(switching, WAIT_S)


async def test_an_instance_that_has_stopped_a_phase_refuses_its_requests_until_it_starts_it_again(cluster: Any) -> None:
    instance = await cluster.prefill()
    await cluster.decode()
    router = await cluster.router()
    assert (instance.load().phases, instance.load().phase_order) == (PREFILL, FIRST_ORDER)
    view = (await cluster.store()).view
    await eventually(lambda: "prefill-0" in view().instances, "it has registered")
    assert view().instances["prefill-0"].record.phases == BOTH
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await instance.reserve("a", 20)
    assert await instance.host.switch((), PhaseOrder(0, 2))
    assert instance.load().phases == ()
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await router.prefill(instance, "b", prompt(1, 50), max_tokens=3).ended()
    assert not await instance.host.switch(DECODE, PhaseOrder(0, 1))
    assert await instance.host.switch(PREFILL, PhaseOrder(0, 3))
    answer = router.prefill(instance, "c", prompt(1, 50), max_tokens=3)
    assert await router.answer(answer, "c") == cluster.expected(prompt(1, 50), 3)
