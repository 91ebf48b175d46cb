"""Line for room on a decode instance: waiting, overtaking, and responses."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.errors import NoCapacity
from kaveri.policy.decode_room import MAX_OVERTAKES
from tests.services.conftest import BLOCK_BYTES, TIGHT, eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses

pytestmark = pytest.mark.usefixtures("fake_blocks")


async def is_refused(decode: Any, request_id: str, token_count: int) -> bool:
    try:
        await decode.reserve(request_id, token_count)
    except aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return True
    return False


def in_line(decode: Any) -> int:
    return int(decode.metric("kaveri_decode_line_requests"))


class Waiters:
    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Task[Any]] = {}
        self.granted: list[str] = []

    async def begin(self, decode: Any, request_id: str, token_count: int, **fields: Any) -> None:
        """Put the request in line."""
        before = in_line(decode)
        call = asyncio.create_task(decode.reserve(request_id, token_count, wait=True, **fields))
        call.add_done_callback(lambda done: self._done(request_id, done))
        self.calls[request_id] = call
        await eventually(lambda: in_line(decode) == before + 1, f"{request_id} waits")

    async def code(self, request_id: str) -> grpc.StatusCode:
        try:
            await asyncio.wait_for(self.calls[request_id], 60)
        except aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def _done(self, request_id: str, call: asyncio.Task[Any]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.granted.append(request_id)


@pytest.fixture
async def waiters() -> AsyncIterator[Waiters]:
    made = Waiters()
    yield made
    for call in made.calls.values():
        call.cancel()
    await asyncio.gather(*made.calls.values(), return_exceptions=True)


async def overtake(decode: Any, count: int) -> None:
    held_blocks = decode.held_blocks
    for number in range(count):
        await decode.reserve(f"overtakes {number}", 1)
        await decode.abort(f"overtakes {number}")
        await eventually(lambda: decode.held_blocks == held_blocks, "its block is free")


def small_decode(cluster: Any, instance_id: str = "decode-0", **settings: Any) -> Any:
    return cluster.decode(instance_id, **{**TIGHT, **settings})


async def test_what_is_free_is_kept_for_the_first_in_line_once_it_was_overtaken_to_the_limit(
    cluster: Any, waiters: Waiters
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("taken", 79)
    await waiters.begin(decode, "large", 127)
    await overtake(decode, MAX_OVERTAKES)
    assert await is_refused(decode, "small", 1)
    # Prefill instances see that there is nothing for others.
    assert decode.engine.stats().free_blocks == 7
    assert decode.load().free_blocks == 0
    await waiters.begin(decode, "behind", 1)
    await decode.abort("taken")
    assert await waiters.code("large") is grpc.StatusCode.OK
    assert await waiters.code("behind") is grpc.StatusCode.OK
    assert waiters.granted == ["large", "behind"]
    for request_id in ("large", "behind"):
        await decode.abort(request_id)
    await cluster.all_free()


@pytest.mark.parametrize(
    "how", ["its call is cancelled", "it is aborted", "its time is over", "its call's time is over"]
)
async def test_nothing_is_kept_for_a_request_that_wants_no_room_any_more(
    cluster: Any, waiters: Waiters, how: str
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("taken", 79)
    await waiters.begin(decode, "large", 127, **({"timeout_s": 2.0} if how == "its time is over" else {}))
    await overtake(decode, MAX_OVERTAKES)
    if how == "its call is cancelled":
        waiters.calls["large"].cancel()
    elif how == "it is aborted":
        await decode.abort("large")
        assert await waiters.code("large") is grpc.StatusCode.CANCELLED
    elif how == "its time is over":
        assert await waiters.code("large") is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        waiters.calls["large"].cancel()
        with refuses(grpc.StatusCode.DEADLINE_EXCEEDED):
            await decode.reserve("large", 127, wait=True, rpc_timeout_s=1.0)
    await eventually(lambda: in_line(decode) == 0, "it waits no more")
    assert decode.load().free_blocks == 7
    assert not await is_refused(decode, "small", 1)
    for request_id in ("taken", "small"):
        await decode.abort(request_id)
    await cluster.all_free()


async def test_an_abort_by_another_router_or_of_an_older_attempt_leaves_the_place_in_line(
    cluster: Any, waiters: Waiters
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("taken", 159)
    await waiters.begin(decode, "waits", 100, attempt=2)
    await decode.abort("waits", attempt=9, router_id="router-1")
    await decode.abort("waits", attempt=1)
    assert in_line(decode) == 1
    await decode.abort("taken")
    assert await waiters.code("waits") is grpc.StatusCode.OK
    await decode.abort("waits", attempt=2)
    await cluster.all_free()


async def test_a_newer_attempt_takes_the_place_in_line_over_and_the_older_ones_call_ends(
    cluster: Any, waiters: Waiters
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("taken", 159)
    for name in ("a", "b"):
        await waiters.begin(decode, name, 100)
    older = waiters.calls.pop("a")
    newer = asyncio.create_task(decode.reserve("a", 100, attempt=2, wait=True))
    waiters.calls["a"] = newer
    with refuses(grpc.StatusCode.ABORTED):
        await older
    assert in_line(decode) == 2
    await decode.abort("taken")
    assert await waiters.code("a") is grpc.StatusCode.OK
    assert not waiters.calls["b"].done()
    await decode.abort("a", attempt=2)
    assert await waiters.code("b") is grpc.StatusCode.OK
    await decode.abort("b")
    await cluster.all_free()


async def test_a_waiting_request_that_another_router_begins_hears_that_it_must_not_be_placed_again(
    cluster: Any, waiters: Waiters
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("taken", 159)
    await waiters.begin(decode, "a", 100)
    assert await is_refused_for(decode, "a", "router-1")
    assert await waiters.code("a") is grpc.StatusCode.ALREADY_EXISTS
    assert in_line(decode) == 0
    await decode.abort("taken")
    await cluster.all_free()


async def is_refused_for(decode: Any, request_id: str, router_id: str) -> bool:
    try:
        await decode.reserve(request_id, 100, router_id=router_id)
    except aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return False


async def test_a_full_line_refuses_the_next_request(
    cluster: Any, waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await small_decode(cluster)
    monkeypatch.setattr(decode.service._room, "_max_waiting", 2)
    await cluster.router()
    await decode.reserve("taken", 79)
    for name in ("a", "b"):
        await waiters.begin(decode, name, 127)
    with refuses(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await decode.reserve("c", 127, wait=True)
    assert not await is_refused(decode, "small", 1), "it does not have to wait"
    assert in_line(decode) == 2
    for request_id in ("taken", "small", "a", "b"):
        await decode.abort(request_id)
    await cluster.all_free()


@pytest.mark.parametrize("how", ["drains", "breaks"])
async def test_an_instance_that_ends_answers_all_that_wait_at_once(cluster: Any, waiters: Waiters, how: str) -> None:
    decode = await small_decode(cluster, drain_timeout_s=30.0)
    await cluster.router()
    await decode.reserve("taken", 159)
    for name in ("a", "b", "c"):
        await waiters.begin(decode, name, 100)
    if how == "drains":
        decode.stopping.set()
    else:
        decode.service.fail_all("broken")
    for name in ("a", "b", "c"):
        assert await waiters.code(name) is grpc.StatusCode.UNAVAILABLE
    assert in_line(decode) == 0
    await decode.abort("taken")


async def test_requests_wait_spread_over_the_instances_and_go_where_room_appears(cluster: Any) -> None:
    prefill = await cluster.prefill(max_model_len=160, kv_cache_memory=48 * BLOCK_BYTES)
    decodes = [await small_decode(cluster, f"decode-{number}") for number in range(2)]
    router = await cluster.router()
    for decode in decodes:
        await decode.reserve("taken", 79)
    calls = [router.prefill(prefill, f"r{number}", prompt(number, 127), 10, ignore_eos=True) for number in range(2)]
    await eventually(lambda: [in_line(decode) for decode in decodes] == [1, 1], "one waits at each")
    # Both are served by one of them: the other never has room.
    await decodes[0].abort("taken")
    for number, call in enumerate(calls):
        assert await router.answer(call, f"r{number}") == cluster.expected(prompt(number, 127), 10)
        assert call.get("placed").decode_instance_id == "decode-0"
    await eventually(lambda: in_line(decodes[1]) == 0, "it gives its place up")
    await decodes[1].abort("taken")
    await cluster.all_free()


async def test_a_request_that_the_engine_refuses_while_the_instance_drains_is_sent_away(
    cluster: Any, waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    asked: list[Future[Any]] = []

    def answer_later(*_: Any) -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    monkeypatch.setattr(decode.engine, "reserve", answer_later)
    await waiters.begin(decode, "a", 100)
    await eventually(lambda: bool(asked), "the engine is asked")
    decode.service.drain()
    asked[0].set_exception(NoCapacity("kv pool", 0.1, "preempted requests wait for blocks"))
    assert await waiters.code("a") is grpc.StatusCode.UNAVAILABLE
    assert in_line(decode) == 0
    await cluster.all_free()


async def test_an_engine_that_keeps_its_free_blocks_for_others_is_asked_again_after_a_pause(
    cluster: Any, waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    reserve, refusals = decode.engine.reserve, 20
    asked = itertools.count()

    def refuse_some(*arguments: Any) -> Any:
        if next(asked) >= refusals:
            return reserve(*arguments)
        refused: Future[Any] = Future()
        refused.set_exception(NoCapacity("kv pool", 0.1, "preempted requests wait for blocks"))
        return refused

    monkeypatch.setattr(decode.engine, "reserve", refuse_some)
    await waiters.begin(decode, "a", 100)
    assert next(asked) < refusals, "other work goes on in between"
    assert await waiters.code("a") is grpc.StatusCode.OK
    await decode.abort("a")
    await cluster.all_free()


async def test_a_late_abort_of_room_that_was_given_back_leaves_a_newer_reservation(cluster: Any) -> None:
    """Messages of a prefill instance that gives room up and asks again may be reordered."""
    decode = await small_decode(cluster)
    await cluster.router()
    await decode.reserve("a", 100, placement=1)
    await decode.reserve("a", 100, placement=3, wait=True)
    held_blocks = decode.held_blocks
    await decode.abort("a", by_router=False, placement=2)
    with refuses(grpc.StatusCode.ABORTED):
        await decode.reserve("a", 100, placement=2)
    assert decode.load().running_requests + decode.load().waiting_requests == 1
    assert decode.held_blocks == held_blocks
    await decode.abort("a", by_router=False, placement=3)
    await eventually(decode.free, "it is given back")
    for number in (0, 7):
        await decode.reserve("b", 100, attempt=1 + number, placement=2, wait=True)
        await decode.abort("b", attempt=1 + number, placement=0)
        await eventually(decode.free, "a router ends every reservation")
    await decode.reserve("c", 100, attempt=1, placement=5)
    await decode.abort("c", attempt=2, by_router=False, placement=1)
    await eventually(decode.free, "an older attempt ends, whatever its number")
    await cluster.all_free()
