"""Phases that start and stop while their instance lives: real services on the fake engine, under load."""

import asyncio
from typing import Any

import grpc

from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import ClusterView, Phase
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses
from tests.services.session_client import SessionRouters

PREFILL, DECODE, BOTH = (Phase.PREFILL,), (Phase.DECODE,), (Phase.PREFILL, Phase.DECODE)
WAIT_S = 60.0
SLOW = {"fake_step_s": 0.002}
ANSWER_TOKENS = 60


def ready(view: ClusterView) -> dict[Phase, list[str]]:
    return {phase: [one.record.instance_id for one in view.ready(phase)] for phase in Phase}


class _Load:
    """Requests one after another, several at a time, each of which must be answered exactly."""

    def __init__(self, cluster: Any, client: AsyncClient) -> None:
        self._cluster = cluster
        self._client = client
        self._stop = False
        self.answered = 0
        self.transports: set[str] = set()
        self.paths: set[tuple[str, str]] = set()

    async def keep_asking(self, worker: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            token_ids = prompt(1000 * worker + number, 5 + 37 * ((worker + number) % 5))
            params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=0, ignore_eos=True)
            answer = await self._client.generate(prompt_token_ids=token_ids, params=params, timeout_s=WAIT_S)
            assert list(answer.token_ids) == self._cluster.expected(token_ids, ANSWER_TOKENS)
            server = answer.timing.server
            self.transports.add(server.kv_transport)
            self.paths.add((server.prefill_instance_id, server.decode_instance_id))
            self.answered += 1

    async def answer_more(self, count: int) -> None:
        until = self.answered + count
        await eventually(lambda: self.answered >= until, f"{count} more requests are answered")

    def stop(self) -> None:
        self._stop = True


async def test_requests_under_load_are_answered_exactly_while_instances_switch_phases(
    cluster: Any, routers: SessionRouters
) -> None:
    cluster.needs_fake_engines("it compares with the fake model's answers")
    first, second, third = [await cluster.colocated(f"c{number}", **SLOW) for number in range(3)]
    lives = [instance.host.address for instance in (first, second, third)]
    router = await routers.start("router-0")
    async with AsyncClient(routers.address("router-0")) as client, asyncio.TaskGroup() as tasks:
        view = router.store.view
        await eventually(lambda: len(view().instances) >= 3, "the router knows them")
        load = _Load(cluster, client)
        for worker in range(6):
            tasks.create_task(load.keep_asking(worker))
        await load.answer_more(10)
        assert load.transports == {"none"}
        orders = ((PREFILL, DECODE), (DECODE, PREFILL), (BOTH, ()), (BOTH, BOTH))
        for order, (phases_of_first, phases_of_second) in enumerate(orders, 2):
            switched = await asyncio.gather(
                first.host.switch(phases_of_first, order), second.host.switch(phases_of_second, order)
            )
            assert switched == [True, True]
            for instance, phases in ((first, phases_of_first), (second, phases_of_second)):
                shown = instance.load()
                assert (shown.phases, shown.ending_phases, shown.phase_order) == (phases, (), order)
            serving = {
                phase: [
                    name
                    for name, phases in (("c0", phases_of_first), ("c1", phases_of_second), ("c2", BOTH))
                    if phase in phases
                ]
                for phase in Phase
            }
            await eventually(lambda serving=serving: ready(view()) == serving, "the view follows")  # type: ignore[misc]
            await load.answer_more(20)
        load.stop()
    assert {"c0", "c1"} >= {name for path in load.paths if path[0] != path[1] for name in path}, load.paths
    assert {("c0", "c1"), ("c1", "c0")} <= load.paths, "prompts of one are decoded by the other, both ways"
    assert len(load.transports) > 1
    assert lives == [instance.host.address for instance in (first, second, third)]
    await cluster.all_free()


async def test_a_phase_that_stops_finishes_what_it_has_and_takes_nothing_new(cluster: Any) -> None:
    instance = await cluster.colocated(**{**SLOW, "fake_step_s": 0.01})
    router = await cluster.router()
    call = router.prefill(instance, "a", prompt(1, 50), max_tokens=100)
    await eventually(lambda: ("a", 1) in router.tokens, "it decodes")
    switching = asyncio.create_task(instance.host.switch(PREFILL, 2))
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
    switching = asyncio.create_task(instance.host.switch(PREFILL, 5))
    await eventually(lambda: instance.load().ending_phases == DECODE, "decode ends")
    assert not await instance.host.switch(DECODE, 5)
    assert not await instance.host.switch(DECODE, 4)
    assert await instance.host.switch(BOTH, 6)
    assert (instance.load().phases, instance.load().ending_phases, instance.load().phase_order) == (BOTH, (), 6)
    again = router.prefill(instance, "b", prompt(2, 50), max_tokens=3)
    assert await router.answer(again, "b") == cluster.expected(prompt(2, 50), 3)
    assert await router.answer(call, "a") == cluster.expected(prompt(1, 50), 100)
    assert not await asyncio.wait_for(switching, WAIT_S)


async def test_an_instance_that_has_stopped_a_phase_refuses_its_requests_until_it_starts_it_again(cluster: Any) -> None:
    instance = await cluster.prefill()
    await cluster.decode()
    router = await cluster.router()
    assert (instance.load().phases, instance.load().phase_order) == (PREFILL, 1)
    view = (await cluster.store()).view
    await eventually(lambda: "prefill-0" in view().instances, "it has registered")
    assert view().instances["prefill-0"].record.phases == BOTH
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await instance.reserve("a", 20)
    assert await instance.host.switch((), 2)
    assert instance.load().phases == ()
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await router.prefill(instance, "b", prompt(1, 50), max_tokens=3).ended()
    assert not await instance.host.switch(DECODE, 1)
    assert await instance.host.switch(PREFILL, 3)
    answer = router.prefill(instance, "c", prompt(1, 50), max_tokens=3)
    assert await router.answer(answer, "c") == cluster.expected(prompt(1, 50), 3)
