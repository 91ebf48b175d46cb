import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kaveri.cluster.store import RequestClaim
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, InstanceStatus, Phase, Role
from kaveri.v1 import inference_pb2
from services.router import metrics, service
from services.router.peers import has_another_router
from services.router.recovery import departures
from services.router.recovery.departures import Departures
from services.router.request_table import RequestTable
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import (
    PROMPT,
    SECRET,
    answer,
    ask,
    collect,
    eventually,
    finish,
    refused,
    rest_of,
    tokens_of,
)


async def moved(call: Any) -> list[inference_pb2.GenerateResponse]:
    responses: list[inference_pb2.GenerateResponse] = []
    await refused(rest_of(call, responses), grpc.StatusCode.UNAVAILABLE, "another router")
    return responses


@pytest.mark.parametrize("phase", ["queued", "decoding"])
async def test_clients_get_what_is_there_and_the_other_routers_and_nothing_is_aborted(
    cluster: ScriptedCluster, phase: str
) -> None:
    decode = cluster.pausing()
    if phase == "queued":
        cluster.hold("started")
    async with cluster.router(drain_timeout_s=10) as router, cluster.router(instance_id="router-1") as other:
        await eventually(lambda: router.addresses(includes_own=False))
        call = router.ask(request_id="mine", secret=SECRET)
        if phase == "decoding":
            await eventually(lambda: any(len(entry.answer.token_ids) == 7 for entry in router.router.table.entries()))
        else:
            await cluster.until_held()
        began_s = time.monotonic()
        draining = asyncio.create_task(router.drain())
        responses = await moved(call)
        await draining
        assert time.monotonic() - began_s < 20
        assert tokens_of(responses) == answer(PROMPT, 7 if phase == "decoding" else 0)
        assert list(responses[-1].routers) == [other.address]
        assert responses[0].max_tokens == 20
        assert decode.aborted == []


async def test_a_draining_prefill_instance_is_asked_until_it_has_answered(cluster: ScriptedCluster) -> None:
    cluster.hold("started")
    async with cluster.router() as router:
        call = router.stub.Generate(ask(), timeout=20)
        await cluster.until_held()
        draining, other = sorted(cluster.prefills.values(), key=lambda prefill: -prefill.waiting_requests)[:2]
        other.hold.clear()
        draining.lost_questions = 3
        instance = cluster.instances[draining.instance_id]
        instance.load = replace(instance.load, state=InstanceState.DRAINING)
        assert tokens_of(await collect(call)) == answer(PROMPT, 20)
        assert draining.lost_questions == 0
        assert len(other.requests) == 1


async def test_a_draining_prefill_instance_is_not_asked_for_what_it_has_begun_meanwhile(
    cluster: ScriptedCluster,
) -> None:
    cluster.hold("started")
    async with cluster.router() as router:
        call = router.stub.Generate(ask(), timeout=20)
        await cluster.until_held()
        draining = max(cluster.prefills.values(), key=lambda prefill: prefill.waiting_requests)
        draining.lost_questions = 1000
        instance = cluster.instances[draining.instance_id]
        instance.load = replace(instance.load, state=InstanceState.DRAINING)
        await eventually(lambda: draining.lost_questions < 1000)
        draining.hold.clear()
        draining.release.set()
        assert tokens_of(await collect(call)) == answer(PROMPT, 20)
        asking = router.router.placer._prefills._asking
        await eventually(lambda: not asking)
        assert draining.lost_questions > 990


async def test_tokens_of_a_request_that_was_sent_away_do_not_abort_it(cluster: ScriptedCluster) -> None:
    decode = cluster.pausing()
    async with cluster.router() as router, cluster.router(instance_id="router-1"):
        await eventually(lambda: router.addresses(includes_own=False))
        call = router.ask(request_id="mine", secret=SECRET)
        await eventually(lambda: decode.is_paused)
        router.router.drain()
        await moved(call)
        await router.check_integrity()
        # Without an Attach elsewhere, tokens still come on the former router's stream.
        decode.may_step.set()
        await eventually(lambda: not decode.running)
        assert decode.aborted == []


async def test_tokens_of_a_session_do_not_abort_it_while_the_input_of_the_next_one_is_checked(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = cluster.pausing()
    async with cluster.router() as router:
        former = router.ask(request_id="mine", secret=SECRET)
        await eventually(lambda: decode.is_paused)
        open_claim, is_checked, may_go_on = router.router.claims.open, asyncio.Event(), asyncio.Event()

        async def open_late(claim: RequestClaim, ttl_s: float) -> bytes:
            is_checked.set()
            await may_go_on.wait()
            return await open_claim(claim, ttl_s)

        monkeypatch.setattr(router.router.claims, "open", open_late)
        again = ask(request_id="mine", secret=SECRET, session=1)
        later = asyncio.create_task(collect(router.stub.Generate(again, timeout=60)))
        await is_checked.wait()
        read: list[int] = []
        monkeypatch.setattr(metrics.RELAYED_TOKENS, "inc", read.append)
        decode.pause_at = decode.running["mine"].next_index + 5
        decode.may_step.set()
        await eventually(lambda: sum(read) == 5)
        decode.attachable.add("mine")
        may_go_on.set()
        cluster.let_all_go()
        assert tokens_of(await later) == answer(PROMPT, 20)
        assert decode.aborted == []
        assert len(cluster.taken()) == 1
        former.cancel()


async def test_a_single_router_waits_and_sends_clients_away_when_another_one_comes(cluster: ScriptedCluster) -> None:
    decode = cluster.pausing()
    async with cluster.router(drain_timeout_s=30) as router:
        call = router.ask(request_id="mine", secret=SECRET)
        await eventually(lambda: decode.is_paused)
        draining = asyncio.create_task(router.drain())
        await eventually(lambda: router.router.draining)
        await refused(collect(router.ask()), grpc.StatusCode.UNAVAILABLE)
        assert not draining.done()
        async with cluster.router(instance_id="router-1") as other:
            assert list((await moved(call))[-1].routers) == [other.address]
            await draining


async def test_routers_that_drain_together_send_no_client_to_one_another(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than this test takes on a busy machine.
    monkeypatch.setattr(service, "_OTHERS_DRAIN_WITHIN_S", 20.0)
    decode = cluster.pausing()
    async with cluster.router(drain_timeout_s=30) as router, cluster.router(instance_id="router-1") as other:
        await eventually(lambda: len(router.addresses()) == len(other.addresses()) == 2)
        call = router.ask(request_id="mine", secret=SECRET)
        (first,) = await cluster.read_until_paused(call)
        began_s = time.monotonic()
        draining = [asyncio.create_task(router.drain())]
        await eventually(
            lambda: (
                router.router.draining and has_another_router(router.router.store.view(), router.router.config, began_s)
            )
        )
        draining.append(asyncio.create_task(other.drain()))
        await draining[1]
        assert not draining[0].done()
        decode.may_step.set()
        await finish(call, [first])
        await draining[0]


async def test_at_the_end_of_its_time_a_single_router_leaves_requests_where_they_are(cluster: ScriptedCluster) -> None:
    decode = cluster.pausing()
    async with cluster.router(drain_timeout_s=0.1) as router:
        call = router.ask(request_id="mine", secret=SECRET)
        await eventually(lambda: decode.is_paused)
        draining = asyncio.create_task(router.drain())
        await moved(call)
        await draining
        assert decode.aborted == []


@pytest.mark.parametrize("session", [0, 1])
async def test_a_request_whose_input_is_checked_meanwhile_is_sent_away_then(
    cluster: ScriptedCluster, session: int
) -> None:
    for name in ("prefill-0", "prefill-1"):
        await cluster.leave(name)
    async with cluster.router(drain_timeout_s=10) as router, cluster.router(instance_id="router-1") as other:
        await eventually(lambda: len(other.addresses()) == 2)
        request = ask(request_id="early", secret=SECRET, session=session)
        call = router.stub.Generate(request, timeout=60)
        await eventually(lambda: router.router.table.slot_of("early") is not None)
        draining = asyncio.create_task(router.drain())
        await eventually(lambda: router.router.table._sends_away)
        await cluster.add_prefill("prefill-2")
        with capture_logs() as logs:
            assert list((await moved(call))[-1].routers) == [other.address]
            await draining
        assert [line["event"] for line in logs if line["log_level"] == "error"] == []
        assert not cluster.prefills["prefill-2"].requests


async def test_a_draining_router_is_not_named_to_clients(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router, cluster.router(instance_id="router-1") as other:
        await eventually(lambda: len(other.addresses()) == 2)
        router.stopping.set()
        await eventually(lambda: other.addresses() == [other.address])
        await router.serving


async def test_the_last_router_serves_what_it_has_sent_away_when_the_other_one_dies(cluster: ScriptedCluster) -> None:
    decode = cluster.pausing()
    async with cluster.router() as router:
        async with cluster.router(instance_id="router-1") as other:
            await eventually(lambda: router.addresses(includes_own=False))
            call = router.ask(request_id="mine", secret=SECRET)
            await eventually(lambda: decode.is_paused)
            await router.host.drain()
            assert list((await moved(call))[-1].routers) == [other.address]
            await router.check_integrity()
        await eventually(lambda: not router.addresses(includes_own=False))
        again = ask(request_id="mine", secret=SECRET, session=1)
        decode.may_step.set()
        assert tokens_of(await collect(router.stub.Generate(again, timeout=60))) == answer(PROMPT, 20)


class Instances(dict[str, Any]):
    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_instances_are_looked_at_once_a_view_not_with_each_heartbeat() -> None:
    instances = Instances()
    watch = Departures(RequestTable(1), None, None)  # type: ignore[arg-type]
    view = ClusterView(instances)
    for _ in range(10):
        watch.update(view)
    assert instances.looks == 1


def test_only_an_instance_that_lets_no_request_go_for_three_seconds_is_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise requests in transit were moved again, and lost what their replicas lacked."""
    clock = SimpleNamespace(now_s=0.0, let_go_s=0.0)
    feeds: Any = SimpleNamespace(let_go_s=lambda life: clock.let_go_s)
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    looked: list[float] = []
    table: Any = SimpleNamespace(entries=lambda: looked.append(clock.now_s) or ())
    load = InstanceLoad(state=InstanceState.DRAINING)
    record = InstanceRecord("decode-0", 1, Role.ENGINE, "h:1", "tiny", phases=(Phase.DECODE,))
    view = ClusterView({"decode-0": InstanceStatus(record, load)})
    watch = Departures(table, None, feeds)  # type: ignore[arg-type]
    for now_s, let_go_s in ((0.0, 0.0), (2.9, 2.5), (5.4, 5.0), (7.9, 5.0), (8.1, 5.0)):
        clock.now_s, clock.let_go_s = now_s, let_go_s
        watch.update(view)
    assert looked == [8.1]
