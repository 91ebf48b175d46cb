import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from kaveri import AsyncClient, Client, Completion, SamplingParams
from kaveri.client.targets import MAX_TARGETS, Targets
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, NoCapacity, RequestAlreadyExists, Unavailable
from kaveri.rpc.server import RpcServer
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from tests.library.client.inference_double import InferenceDouble, serving_in_a_thread, until

TEN = SamplingParams(max_tokens=10, logprobs=0)
ALPHABET = "abcdefghij"
DRAINING = Unavailable("draining", retry_after_s=0.0)


class RouterDouble:
    """InferenceDouble on a port of its own that can be killed."""

    def __init__(self, port: int = 0) -> None:
        self.service = InferenceDouble()
        self.server = RpcServer("127.0.0.1", port, ["kaveri.v1.InferenceService"])
        self.server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self.service))

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        await self.server.start()
        await self.server.ready()

    async def kill(self) -> None:
        await self.server.stop(0)


class Pair(list[RouterDouble]):
    """Two router doubles that name each other, and a client of both."""

    client: AsyncClient

    def set(self, **fields: object) -> None:
        for router in self:
            vars(router.service).update(fields)

    def let_go(self) -> None:
        for router in self:
            router.service.go_on.set()

    @property
    def pauses(self) -> bool:
        return any(router.service.paused for router in self)

    @property
    def requests(self) -> list[inference_pb2.GenerateRequest]:
        return [request for router in self for request in router.service.requests]

    def ask(self, request_id: str | None = None, timeout_s: float | None = None) -> asyncio.Task[Completion]:
        answer = self.client.generate("prompt", params=TEN, request_id=request_id, timeout_s=timeout_s)
        return asyncio.create_task(answer)

    async def serve(
        self, request_id: str | None = None, *, beats: bool = False
    ) -> tuple[asyncio.Task[Completion], RouterDouble, RouterDouble]:
        """Send a request; once its answer pauses (with `beats`: once the client has sent some), return the answer, its
        router and the other one."""
        asking = self.ask(request_id)
        if beats:
            await until(lambda: any(router.service.beats > 2 for router in self), "the client asks for signs of life")
        else:
            await until(lambda: self.pauses, "the answer pauses")
        first, second = self
        return (asking, first, second) if first.service.requests else (asking, second, first)


@pytest.fixture
async def routers() -> AsyncIterator[Pair]:
    routers = Pair([RouterDouble(), RouterDouble()])
    for router in routers:
        await router.start()
    routers.set(routers=[each.target for each in routers], text_lag=2)
    async with AsyncClient([router.target for router in routers]) as routers.client:
        yield routers
    routers.let_go()
    for router in routers:
        await router.kill()


async def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def check_whole(completion: Completion, reattaches: int) -> None:
    assert completion.text == ALPHABET
    assert completion.token_ids == tuple(range(10))
    assert [entry.logprob for entry in completion.logprobs] == [-0.5 - index for index in range(10)]
    assert completion.finish_reason == "length"
    assert completion.timing.server.reattaches == reattaches


@pytest.mark.parametrize("tokens", [0, 1, 7, 9])
async def test_an_answer_goes_on_through_another_router_exactly_where_it_was(routers: Pair, tokens: int) -> None:
    routers.set(pause_at=tokens)
    asking, dying, other = await routers.serve("moved")
    other.service.pause_at = None
    await dying.kill()
    check_whole(await asyncio.wait_for(asking, 30), 1)
    (first,), (again,) = dying.service.requests, other.service.requests
    assert (first.session, again.session) == (0, 1)
    assert len(first.secret) >= 16
    assert (again.secret, again.params, again.text) == (first.secret, first.params, first.text)
    assert list(again.received.token_ids) == list(range(tokens))
    assert again.received.characters == max(0, tokens - 2)
    assert again.received.max_tokens == (10 if tokens else 0)
    assert again.received.owner.decode_instance_id == ("decode-0" if tokens else "")


async def test_another_service_at_the_address_of_a_router_that_has_gone_is_left_alone(routers: Pair) -> None:
    """Regression: after a port was reused, requests failed with UNIMPLEMENTED."""
    stranger = RpcServer("127.0.0.1", 0, [])
    await stranger.start()
    await stranger.ready()
    address = f"127.0.0.1:{stranger.port}"
    try:
        async with AsyncClient([address, routers[0].target]) as client:
            for _ in range(3):
                assert (await client.generate("prompt", params=TEN, timeout_s=20)).text == ALPHABET
        async with AsyncClient(address) as client:
            with pytest.raises(Unavailable, match=f"{address} is no router"):
                await client.generate("prompt", params=TEN, timeout_s=20)
    finally:
        await stranger.stop(0)


async def test_a_router_that_the_cluster_has_named_takes_over(routers: Pair) -> None:
    first, other = routers
    first.service.pause_at = 4
    async with AsyncClient(first.target) as client:
        asking = asyncio.create_task(client.generate("prompt", params=TEN, request_id="moved"))
        await until(lambda: "moved" in first.service.paused and len(client.targets) == 2, "the answer pauses")
        assert client.targets == (first.target, other.target)
        await first.kill()
        check_whole(await asyncio.wait_for(asking, 30), 1)
        assert client.target == first.target


@pytest.mark.parametrize("tokens", [0, 5])
async def test_a_router_that_hangs_is_left_after_half_a_second(routers: Pair, tokens: int) -> None:
    routers.set(pause_at=tokens)
    asking, hanging, other = await routers.serve("hangs", beats=True)
    other.service.pause_at = None
    hanging.service.hangs = True
    began_s = time.monotonic()
    check_whole(await asyncio.wait_for(asking, 20), 1)
    assert time.monotonic() - began_s > 0.3
    await until(lambda: "hangs" in hanging.service.cancelled, "the former router's call is cancelled")


async def test_a_first_call_to_a_router_that_hangs_is_tried_elsewhere_after_about_a_second(routers: Pair) -> None:
    routers.set(hangs=True)
    asking, hanging, other = await routers.serve("first")
    other.service.hangs = False
    check_whole(await asyncio.wait_for(asking, 20), 1)
    await until(lambda: "first" in hanging.service.cancelled, "the former router's call is cancelled")


async def test_routers_that_are_all_slow_at_first_are_left_once_each(routers: Pair) -> None:
    routers.set(hangs=True)
    asking = routers.ask()
    await until(lambda: len(routers.requests) == 3, "each was left once")
    routers.set(hangs=False)
    routers.let_go()
    check_whole(await asyncio.wait_for(asking, 20), 2)


async def test_a_call_that_only_reads_is_sent_elsewhere_when_the_first_router_hangs(routers: Pair) -> None:
    routers.set(hangs=True)
    asking = asyncio.create_task(routers.client.list_models())
    await until(lambda: any(router.service.short_deadlines_s for router in routers), "a router was asked")
    other = next(router for router in routers if not router.service.short_deadlines_s)
    other.service.hangs = False
    assert await asyncio.wait_for(asking, 20)


async def test_no_call_is_cancelled_before_another_router_serves_the_request(routers: Pair) -> None:
    """A router that wakes up and finds its call cancelled ends the request, unless another has taken it over."""
    routers.set(pause_at=5)
    asking, first, other = await routers.serve("hangs", beats=True)
    first.service.hangs = True
    await until(lambda: other.service.beats > 2, "the client waits for the other router")
    other.service.hangs = True
    await until(lambda: len(first.service.requests) == 2, "the client is back at the first one")
    assert not first.service.cancelled | other.service.cancelled
    first.service.hangs = False
    first.service.go_on.set()
    check_whole(await asyncio.wait_for(asking, 20), 2)
    await until(lambda: "hangs" in other.service.cancelled, "what no one reads any more is cancelled")


async def test_calls_to_a_router_that_hangs_are_cancelled_as_soon_as_another_serves_the_request(routers: Pair) -> None:
    routers.set(pause_at=5)
    asking, hanging, other = await routers.serve("hangs", beats=True)
    other.service.pause_at = 8
    hanging.service.hangs = True
    await until(lambda: "hangs" in hanging.service.cancelled, "the former router's call is cancelled")
    assert not asking.done()
    other.service.go_on.set()
    check_whole(await asyncio.wait_for(asking, 20), 1)
    await until(
        lambda: not routers.client._routers._liveness._tasks, "nothing runs in the background of an idle client"
    )


async def test_a_router_of_a_former_version_that_hangs_is_left_too(routers: Pair) -> None:
    routers.set(pause_at=5, knows_beat=False)
    asking, hanging, other = await routers.serve(beats=True)
    other.service.pause_at = None
    hanging.service.hangs = True
    check_whole(await asyncio.wait_for(asking, 20), 1)


async def test_a_router_that_answers_slowly_is_not_left(routers: Pair) -> None:
    routers.set(pause_at=5, beat_takes_s=0.8)
    asking = routers.ask()
    await until(lambda: any(router.service.answered_beats > 2 for router in routers), "it has answered often")
    routers.let_go()
    check_whole(await asyncio.wait_for(asking, 20), 0)


async def test_calls_that_a_router_cancels_because_it_stops_go_on_elsewhere(routers: Pair) -> None:
    routers.set(pause_at=5, cancels_calls=True)
    async with AsyncClient(routers[0].target) as client:
        client._routers.targets.learn([routers[1].target])
        routers[1].service.pause_at = None
        check_whole(await client.generate("prompt", params=TEN), 1)


async def test_a_router_that_breaks_behind_the_finish_reason_is_not_left(routers: Pair) -> None:
    routers.set(break_after=Unavailable("broken", retry_after_s=0.0))
    check_whole(await routers.client.generate("prompt", params=TEN), 0)
    assert len(routers.requests) == 1


async def test_a_router_that_is_too_full_for_a_later_session_is_asked_again(routers: Pair) -> None:
    first, full = (router.service for router in routers)
    first.pause_at, first.break_with = 5, DRAINING
    full.pause_at, full.break_with = 5, NoCapacity("router", 0.1, "full")
    async with AsyncClient(routers[0].target) as client:
        asking = asyncio.create_task(client.generate("prompt", params=TEN))
        await until(lambda: len(full.requests) >= 2, "it is asked again")
        full.pause_at = None
        assert (await asyncio.wait_for(asking, 20)).text == ALPHABET


async def test_the_deadline_ends_a_request_whose_routers_rest(routers: Pair) -> None:
    routers.set(pause_at=5, break_with=DRAINING)
    targets = routers.client._routers.targets
    targets.failed = lambda target, now_s: targets._rests.update({target: (now_s + 3600, 3600.0)})  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(routers.client.generate("prompt", params=TEN, timeout_s=1.0), 20)


async def test_a_quiet_router_and_a_stalled_client_are_no_reason_to_leave(routers: Pair) -> None:
    with contextlib.ExitStack() as stack:
        services = [InferenceDouble(), InferenceDouble()]
        targets = [stack.enter_context(serving_in_a_thread(service)) for service in services]
        for service in services:
            service.routers, service.pause_at = targets, 5
        async with AsyncClient(targets) as client:
            asking = asyncio.create_task(client.generate("prompt", params=TEN, request_id="quiet"))
            await until(lambda: any(service.beats > 2 for service in services), "the client asks for signs of life")
            # The loop stands still for longer than it takes to leave a router.
            time.sleep(1.0)  # noqa: ASYNC251
            beats = sum(service.beats for service in services)
            await until(lambda: sum(service.beats for service in services) > beats + 5, "it goes on to ask")
            for service in services:
                service.pause_at = None
                service.loop.call_soon_threadsafe(service.go_on.set)
            check_whole(await asyncio.wait_for(asking, 30), 0)


async def test_a_draining_or_unreachable_router_is_passed_over(routers: Pair) -> None:
    draining, other = routers
    draining.service.pause_at, draining.service.break_with = 0, DRAINING
    async with AsyncClient([await closed_port(), draining.target, other.target]) as client:
        for _ in range(6):
            check = await client.generate("prompt", params=TEN)
            assert check.text == ALPHABET
            assert len(await client.list_models()) == 1
            assert (await client.get_model("alphabet")).name == "alphabet"


async def test_a_router_that_is_back_is_reached_at_once(routers: Pair) -> None:
    """Regression: gRPC reconnects after a pause of up to a second. Until then calls failed."""
    other = routers[0]
    other.service.routers = [other.target]
    target = await closed_port()
    async with AsyncClient([target, other.target]) as client:
        for _ in range(60):
            await client.generate("prompt", params=TEN)
            await asyncio.sleep(0.03)
        returning = RouterDouble(int(target.rpartition(":")[2]))
        await returning.start()
        await other.kill()
        assert (await client.generate("prompt", params=TEN)).text == ALPHABET
        assert len(returning.service.requests) == 1
    await returning.kill()


async def test_cancel_works_while_the_request_changes_routers(routers: Pair) -> None:
    routers.set(pause_at=4)
    asking, dying, other = await routers.serve("cancelled")
    other.service.pause_at = 6
    await dying.kill()
    assert await routers.client.cancel("cancelled")
    completion = await asyncio.wait_for(asking, 30)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == tuple(range(len(completion.token_ids)))
    assert not await routers.client.cancel("cancelled")


async def test_a_cancel_that_died_with_its_router_is_sent_to_the_next_one(routers: Pair) -> None:
    routers.set(pause_at=4, ignores_cancels=True)
    asking, dying, other = await routers.serve("cancelled")
    assert await routers.client.cancel("cancelled")
    await until(lambda: dying.service.found_cancels, "the router has heard of it")
    other.service.ignores_cancels = False
    await dying.kill()
    assert (await asyncio.wait_for(asking, 30)).finish_reason == "cancelled"


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("prompt", "x", "shorter"),
        NoCapacity("router", 0.5, "full"),
        RequestAlreadyExists("mine"),
        Unavailable("no decode instance", retry_after_s=1.0),
    ],
)
async def test_what_a_router_refuses_is_not_asked_of_another(routers: Pair, error: KaveriError) -> None:
    routers.set(error=error)
    with pytest.raises(type(error)):
        await routers.client.generate("error")
    assert len(routers.requests) == 1


async def test_a_client_without_a_deadline_tries_ever_more_slowly_and_gets_through_in_the_end(routers: Pair) -> None:
    services = [router.service for router in routers]
    for service in services:
        service.pause_at, service.break_with = 5, DRAINING
    began_s = time.monotonic()
    async with AsyncClient([router.target for router in routers], timeout_s=None) as client:
        answer = asyncio.create_task(client.generate("hello", params=TEN))
        await until(lambda: sum(len(service.requests) for service in services) >= 12, "it has tried often")
        elapsed_s = time.monotonic() - began_s
        count = sum(len(service.requests) for service in services)
        for service in services:
            service.pause_at = None
        check_whole(await answer, sum(len(service.requests) for service in services) - 1)
    # Each router's backoff is at least 0.025 s and doubles up to at least 0.5 s.
    assert count <= 2 * (6 + elapsed_s / 0.5)
    assert {left_s for service in services for left_s in service.deadlines_s} == {None}


async def test_closing_a_stream_that_looks_for_a_router_ends_its_reader(routers: Pair) -> None:
    routers.set(pause_at=4)
    stream = routers.client.stream("prompt", params=TEN)

    async def read() -> int:
        return len([chunk async for chunk in stream])

    reading = asyncio.create_task(read())
    await until(lambda: routers.pauses, "the answer pauses")
    for router in routers:
        await router.kill()
    await until(lambda: len(routers.client._routers.targets._rests) == 2, "both routers have failed")
    stream.close()
    assert await asyncio.wait_for(reading, 5) == 4


def test_targets_take_turns_and_rest_longer_each_time_they_fail() -> None:
    targets = Targets(("a:1", "b:1"), random.Random(3))
    assert {targets.choose(0.0)[0] for _ in range(2)} == {"a:1", "b:1"}
    targets.failed("a:1", 0.0)
    assert [targets.choose(0.0) for _ in range(3)] == [("b:1", 0.0)] * 3
    rests = []
    for _ in range(10):
        targets.failed("b:1", 0.0)
        targets.failed("a:1", 0.0)
        rests.append(targets.choose(0.0)[1])
    assert rests[0] > 0
    assert max(rests) <= 1.0 < 3 * rests[-1]
    targets.worked("a:1", 0.0)
    assert targets.choose(0.0) == ("a:1", 0.0)


def test_a_target_that_answers_and_fails_again_and_again_rests_longer_until_it_works_for_a_while() -> None:
    targets, now_s, rests = Targets(("a:1",), random.Random(3)), 0.0, []
    for _ in range(100):
        targets.failed("a:1", now_s)
        rests.append(targets.choose(now_s)[1])
        now_s += rests[-1]
        targets.worked("a:1", now_s)
    assert rests[0] <= 0.05
    assert min(rests[10:]) >= 0.5
    now_s += 1.1
    targets.worked("a:1", now_s)
    targets.failed("a:1", now_s)
    assert targets.choose(now_s)[1] <= 0.05


def test_learned_targets_are_checked_bounded_and_asked_last() -> None:
    targets = Targets(("a:1",), random.Random(0))
    targets.learn(["", "b", "b:0", "b:99999", "b:x", "http://b:1", "b:1\n", "b:1", "b:1", "[::1]:7", "c" * 400 + ":1"])
    assert targets.known == ("a:1", "b:1", "[::1]:7")
    assert [targets.choose(0.0)[0] for _ in range(3)] == ["a:1"] * 3
    targets.failed("a:1", 0.0)
    assert targets.choose(0.0) == ("b:1", 0.0)
    targets.learn(f"c:{port}" for port in range(1, 1000))
    assert len(targets.known) == MAX_TARGETS


@pytest.mark.parametrize(
    "target",
    [
        [],
        (),
        ["a:1", "a:1"],
        ["a:1", ""],
        ["a:1", None],
        ["a:1", 7],
        [["a:1"]],
        {"a:1"},
        {"a:1": 1},
        b"a:1",
        7,
        "a",
        "a:",
        "a:0",
        "a:65536",
        ":1",
        "a b:1",
        "http://a:1",
        "a:1,b:1",
        [f"a:{port}" for port in range(1, MAX_TARGETS + 2)],
        "",
        " ",
        "\ud800",
        None,
    ],
)
def test_wrong_targets_are_refused_by_name(target: object) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidArgument) as caught:
            make(target)  # type: ignore[operator]
        assert caught.value.field == "target"
        assert caught.value.limit


@pytest.mark.parametrize("target", ["a:1", "[::1]:50051", "dns:///a:1", "unix:/tmp/a", ["a:1", "b:1"], iter(["a:1"])])
def test_right_targets_are_taken(target: object) -> None:
    client = AsyncClient(target)  # type: ignore[arg-type]
    assert client.target in client.targets


async def test_a_router_that_new_calls_do_not_reach_any_more_cancels_no_answer_of_others(routers: Pair) -> None:
    """The old connection of an ending router stays open while new ones are refused and their channel closed."""
    router, _ = routers
    router.service.pause_at = 5
    async with AsyncClient(router.target) as client:
        asking = asyncio.create_task(client.generate("prompt", params=TEN, request_id="mine"))
        await until(lambda: "mine" in router.service.paused and len(client.targets) == 2, "the answer pauses")
        stopping = asyncio.create_task(router.server.stop(10))
        for _ in range(4):
            assert (await client.generate("prompt", params=TEN)).text == ALPHABET
            await asyncio.sleep(0.1)
        router.service.go_on.set()
        assert (await asyncio.wait_for(asking, 30)).text == ALPHABET
        await stopping
