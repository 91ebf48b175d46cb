import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc
import pytest
import structlog

from kaveri.domain.sampling import FinishReason
from kaveri.errors import NoCapacity
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from services.router.config import RouterConfig
from services.router.request_placer import PlacementLine
from services.router.requests import RequestEntry
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import answer, ask, collect, eventually, refused, tokens_of

CODES = grpc.StatusCode


@pytest.fixture
async def single(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    async with scripted_cluster(tokenizer, lease_ttl_s=30.0) as cluster:
        yield cluster


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def sent(cluster: ScriptedCluster) -> int:
    return len(cluster.prefills["prefill-0"].requests)


async def set_limit(single: ScriptedCluster, router: Any, limit: int) -> None:
    prefill = single.prefills["prefill-0"]
    prefill.queue_limit = limit
    view = router.router.store.view
    await eventually(lambda: view().instances["prefill-0"].load.queue_room == prefill.queue_room)


def in_line(router: Any) -> list[str]:
    return [entry.request_id for entry in router.router.placer._line.in_line]


def ask_many(router: Any, count: int, timeout: float = 30) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(
            collect(router.stub.Generate(ask((300 + number,), request_id=f"r{number}"), timeout=timeout))
        )
        for number in range(count)
    ]


async def check_answers(tasks: list[asyncio.Task[Any]]) -> None:
    for number, responses in enumerate(await asyncio.gather(*tasks)):
        assert tokens_of(responses) == answer((300 + number,), 20)
        assert responses[-1].timing.attempts == 1


async def test_a_full_queue_costs_no_attempt_and_at_most_one_line_a_request(
    single: ScriptedCluster, lines: list[Any]
) -> None:
    single.prefills["prefill-0"].refusals = [NoCapacity("prefill", 0.02) for _ in range(60)]
    async with single.router(max_attempts=1) as router:
        await check_answers(ask_many(router, 10))
    assert sent(single) == 70
    assert not [line for line in lines if line["event"] == "attempt_lost"]
    delayed = Counter(line["request_id"] for line in lines if line["event"] == "placement_delayed")
    assert delayed
    assert max(delayed.values()) == 1


async def test_a_full_instance_is_not_asked_again_before_the_time_that_it_named(single: ScriptedCluster) -> None:
    single.prefills["prefill-0"].refusals = [NoCapacity("prefill", 0.5)]
    async with single.router() as router:
        started_s = time.monotonic()
        await check_answers(ask_many(router, 1))
        assert time.monotonic() - started_s >= 0.5
    assert sent(single) == 2


async def test_no_more_requests_are_sent_than_a_queue_says_that_it_takes(single: ScriptedCluster) -> None:
    prefill = single.prefills["prefill-0"]
    prefill.hold.add("started")
    async with single.router() as router:
        await set_limit(single, router, 3)
        tasks = ask_many(router, 10)
        await eventually(lambda: len(in_line(router)) == 7)
        waiting = in_line(router)
        await set_limit(single, router, 5)
        await eventually(lambda: sent(single) == 5)
        await set_limit(single, router, 5)
        assert sent(single) == 5
        assert [request.request_id for request in prefill.requests[3:5]] == waiting[:2], "in the order of arrival"
        assert in_line(router) == waiting[2:]
        prefill.hold.clear()
        prefill.queue_limit = None
        single.let_all_go()
        await check_answers(tasks)


async def test_a_place_that_comes_free_goes_to_the_next_in_line_before_the_heartbeat(single: ScriptedCluster) -> None:
    prefill = single.prefills["prefill-0"]
    prefill.hold.add("started")
    async with single.router() as router:
        await set_limit(single, router, 1)
        # Without further heartbeats, each request that starts makes room for one.
        single.instances["prefill-0"].task.cancel()
        tasks = ask_many(router, 5)
        await eventually(lambda: sent(single) == 1 and len(in_line(router)) == 4)
        prefill.hold.clear()
        prefill.release.set()
        await check_answers(tasks)


async def test_a_request_in_line_that_is_cancelled_leaves_its_place_to_the_next(single: ScriptedCluster) -> None:
    async with single.router() as router:
        await set_limit(single, router, 0)
        tasks = ask_many(router, 3)
        await eventually(lambda: len(in_line(router)) == 3)
        assert (await router.stub.Cancel(inference_pb2.CancelRequest(request_id="r0"), timeout=60)).found
        await eventually(lambda: len(in_line(router)) == 2)
        single.prefills["prefill-0"].queue_limit = None
        await asyncio.gather(*tasks)
    assert {request.request_id for request in single.prefills["prefill-0"].requests} == {"r1", "r2"}


async def test_an_attempt_that_was_never_connected_costs_nothing_when_its_instance_begins_a_new_life(
    single: ScriptedCluster,
) -> None:
    """The call was still connecting when its channel was closed, and counted as lost."""
    former = single.instances["prefill-0"]
    await former.die()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", former.server.port))
        deaf.listen()
        async with single.router(max_attempts=1) as router:
            tasks = ask_many(router, 1)
            await eventually(lambda: len(router.router.placer._prefills._waiting) == 1)
            await single.add_prefill("prefill-0")
            former.task.cancel()
            await check_answers(tasks)


async def test_an_instance_that_is_never_reached_fails_its_requests_after_the_set_time(single: ScriptedCluster) -> None:
    await single.instances["prefill-0"].die()
    async with single.router(max_attempts=1, unavailable_after_s=0.5) as router:
        started_s = time.monotonic()
        await refused(collect(router.stub.Generate(ask(), timeout=30)), CODES.UNAVAILABLE)
        assert time.monotonic() - started_s >= 0.5


async def test_a_request_that_ends_in_the_moment_in_which_it_gets_an_instance_is_not_sent(
    single: ScriptedCluster, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with single.router() as router:
        placer = router.router.placer
        choose = placer._choose

        async def choose_and_end(entry: Any, retry: Any) -> Any:
            target = await choose(entry, retry)
            entry.stop(FinishReason.CANCELLED)
            return target

        monkeypatch.setattr(placer, "_choose", choose_and_end)
        responses = await collect(router.stub.Generate(ask((300,), request_id="r0"), timeout=30))
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
    assert sent(single) == 0
    assert not [line for line in lines if line["log_level"] == "error"]


def test_requests_wait_longer_for_instances_than_engines_take_to_start() -> None:
    """Otherwise they fail while all instances of a phase restart."""
    config = RouterConfig()
    assert 60 < config.unavailable_after_s < config.default_timeout_s


async def test_a_request_in_line_that_must_rest_gives_its_place_to_the_next() -> None:
    line, first, second = PlacementLine(), cast(RequestEntry, "first"), cast(RequestEntry, "second")
    for request, rests in ((first, False), (second, False), (first, True)):
        await line.wait(request, 0.0, rests=rests)
    assert len(line) == 2
    await line.wait(first, 0.0, rests=False)
    assert list(line.in_line) == [second, first]
    line.leave(first)
    line.leave(second)
    assert not len(line)
