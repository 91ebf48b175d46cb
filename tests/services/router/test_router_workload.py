import asyncio
from functools import partial

import pytest
from grpc import aio

from kaveri.rpc.server import open_channel
from kaveri.v1 import cluster_pb2
from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
from services.router import request_table
from services.router.request_table import RecentRequests, RequestTable
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import (
    PROMPT,
    SECRET,
    ask,
    ask_again,
    collect,
    eventually,
    read_tokens,
    rest_of,
    tokens_of,
)

_WITHIN_S = 30.0


async def workload_of(address: str) -> cluster_pb2.GetWorkloadResponse:
    async with open_channel(address) as channel:
        found: cluster_pb2.GetWorkloadResponse = await ClusterServiceStub(channel).GetWorkload(
            cluster_pb2.GetWorkloadRequest(), timeout=_WITHIN_S
        )
        return found


def lengths_of(some: cluster_pb2.SampledRequests) -> list[tuple[int, int]]:
    return list(zip(some.prompt_tokens, some.answer_tokens, strict=True))


async def test_whole_answers_are_told_with_their_lengths_and_arrivals_with_their_times(
    cluster: ScriptedCluster,
) -> None:
    async with cluster.router() as router:
        empty = await workload_of(router.address)
        assert not (empty.arrived_ago_s)
        assert not (empty.answered.prompt_tokens)
        assert not (empty.running.prompt_tokens)
        for max_tokens in (3, 20):
            await collect(router.ask(max_tokens=max_tokens))
        found = await workload_of(router.address)
    assert found.router_instance_id == "router-0"
    assert lengths_of(found.answered) == [(len(PROMPT), 3), (len(PROMPT), 20)]
    assert not lengths_of(found.cut_short)
    first_ago_s, second_ago_s = found.arrived_ago_s
    assert found.observed_s > first_ago_s > found.answered.ended_ago_s[0] > second_ago_s > 0


async def test_a_request_that_runs_has_the_tokens_that_it_has_so_far_and_is_cut_short_when_its_client_goes(
    cluster: ScriptedCluster,
) -> None:
    for decode in cluster.decodes.values():
        decode.pause_at = 10
    async with cluster.router() as router:
        call = router.ask(request_id="one")
        await read_tokens(call, 10)
        during = await workload_of(router.address)
        assert lengths_of(during.running) == [(len(PROMPT), 10)]
        assert len(during.arrived_ago_s) == 1
        assert not (lengths_of(during.answered))
        assert not (lengths_of(during.cut_short))
        call.cancel()
        await eventually(lambda: not len(router.router.table))
        after = await workload_of(router.address)
        assert lengths_of(after.cut_short) == [(len(PROMPT), 10)]
        assert len(after.arrived_ago_s) == 1
        assert not (lengths_of(after.answered))
        assert not (lengths_of(after.running))


async def test_a_client_that_re_attaches_neither_arrives_again_nor_ends_twice(cluster: ScriptedCluster) -> None:
    for decode in cluster.decodes.values():
        decode.pause_at = 10
    async with cluster.router() as router:
        request = ask(request_id="one", secret=SECRET)
        first = router.stub.Generate(request, timeout=60)
        tokens = tokens_of(await read_tokens(first, 10))
        again = ask_again(tokens)
        second = router.stub.Generate(again, timeout=60)
        reading = asyncio.create_task(rest_of(second))
        await eventually(lambda: (slot := router.router.table.slot_of("one")) is not None and slot.session == 1)
        cluster.let_all_go()
        tokens += tokens_of(await reading)
        assert len(tokens) == 20
        found = await workload_of(router.address)
    assert lengths_of(found.answered) == [(len(PROMPT), 20)]
    assert len(found.arrived_ago_s) == 1
    assert not lengths_of(found.cut_short)


async def test_a_request_that_failed_at_other_routers_before_it_was_accepted_arrives_at_this_one(
    cluster: ScriptedCluster,
) -> None:
    async with cluster.router() as router:
        request = ask(request_id="one", secret=SECRET, session=2, max_tokens=3)
        request.received.SetInParent()
        await collect(router.stub.Generate(request, timeout=60))
        found = await workload_of(router.address)
    assert lengths_of(found.answered) == [(len(PROMPT), 3)]
    assert len(found.arrived_ago_s) == 1


async def test_a_client_that_re_attaches_before_its_request_was_placed_does_not_arrive_again(
    cluster: ScriptedCluster,
) -> None:
    for prefill in cluster.prefills.values():
        prefill.queue_limit = 0
    async with cluster.router() as router:

        def has_no_room(name: str) -> bool:
            found = router.router.store.view().instances.get(name)
            return found is not None and found.load.queue_room == 0

        def has_accepted(session: int) -> bool:
            slot = router.router.table.slot_of("one")
            return slot is not None and slot.session == session and slot.entry is not None

        await eventually(lambda: all(map(has_no_room, cluster.prefills)))
        readers = []
        for session in (0, 1):
            request = ask(request_id="one", secret=SECRET, session=session)
            readers.append(asyncio.create_task(rest_of(router.stub.Generate(request, timeout=60))))
            await eventually(partial(has_accepted, session))
        for prefill in cluster.prefills.values():
            prefill.queue_limit = None
        with pytest.raises(aio.AioRpcError):
            await readers[0]
        assert len(tokens_of(await readers[1])) == 20
        found = await workload_of(router.address)
    assert lengths_of(found.answered) == [(len(PROMPT), 20)]
    assert len(found.arrived_ago_s) == 1


def test_no_more_arrivals_are_kept_than_the_bound_and_the_time_that_they_cover_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_table, "_MOST_ARRIVALS", 3)
    recent = RecentRequests("router", RequestTable(1), started_s=100.0)
    for arrived_s in (101.0, 102.0, 103.0):
        recent.note_arrival(arrived_s)
    assert recent.workload(110.0).observed_s == 10.0, "nothing was dropped: all since the start"
    recent.note_arrival(104.0)
    assert recent.workload(110.0).arrived_ago_s == [8.0, 7.0, 6.0]
    assert recent.workload(110.0).observed_s == 9.0, "all that came after the one that was dropped"


def test_a_request_that_was_accepted_late_does_not_lengthen_the_time_that_arrivals_cover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_table, "_MOST_ARRIVALS", 1)
    recent = RecentRequests("router", RequestTable(1), started_s=100.0)
    for arrived_s in (105.0, 101.0, 106.0):
        recent.note_arrival(arrived_s)
    assert recent.workload(110.0).observed_s == 5.0, "the one of 105.0 is not kept"


async def test_of_more_ends_than_the_bound_the_last_ones_are_kept(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "_MOST_ENDS", 2)
    async with cluster.router() as router:
        for max_tokens in (3, 4, 5):
            await collect(router.ask(max_tokens=max_tokens))
        assert lengths_of((await workload_of(router.address)).answered) == [(len(PROMPT), 4), (len(PROMPT), 5)]
