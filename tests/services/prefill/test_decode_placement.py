"""Placement of prefilled requests: reservations made, refused, awaited and given back, over real gRPC."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Ownership, Term
from kaveri.engine.contract import EngineKey, EngineRequest, KvPushFailed
from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.lives.prompt import HandOverFailed, HandOverReport, RoomReserved
from kaveri.policy import retry
from kaveri.policy.placement import DecodePlacementPolicy
from services.prefill import room_finder
from services.prefill.decode_placer import DecodePlacer
from services.prefill.requests import PrefillRequest
from tests.services.prefill.scripted import MODEL, ScriptedDecodePeer, ScriptedEngine, eventually, new_metrics, params


class PlacementWorld:
    """DecodePlacer with an engine and decode instances in one cluster, chosen in turn from decode-0 on."""

    def __init__(self, store: MemoryStore, shared: MemoryCluster) -> None:
        self.shared = shared
        self.engine = ScriptedEngine()
        self.metrics = new_metrics()
        self.failed: dict[str, KaveriError] = {}
        self.decodes: list[ScriptedDecodePeer] = []
        self.stores: list[MemoryStore] = []
        self.decode_placer = DecodePlacer(
            self.engine,  # type: ignore[arg-type]
            store,
            MODEL,
            self.metrics,
            random.Random(0),
            policy=DecodePlacementPolicy.ROUND_ROBIN,
        )
        self.decode_placer.report = self.reported
        self.running = asyncio.create_task(self.decode_placer.run())
        self._number = 0

    def reported(self, request: PrefillRequest, report: HandOverReport) -> None:
        match report:
            case RoomReserved():
                request.log.put(report)
            case HandOverFailed():
                self.failed[request.request_id] = report.error
                self.decode_placer.end(request, handed_over=False)

    async def decode(self, *, registered: bool = True, **load: Any) -> ScriptedDecodePeer:
        store = MemoryStore(self.shared)
        await store.__aenter__()
        self.stores.append(store)
        decode = ScriptedDecodePeer(f"decode-{len(self.decodes)}", store)
        self.decodes.append(decode)
        if registered:
            await decode.start(**load)
        return decode

    def begin(self, request_id: str, token_count: int = 20, timeout_s: float = 600.0, **fields: Any) -> PrefillRequest:
        self._number += 1
        key = EngineKey(request_id, self._number)
        engine_request = EngineRequest(key, (1,) * token_count, 0, params())
        deadline_s = time.monotonic() + timeout_s
        ownership = Ownership(Term(0, 3), "router")
        request = PrefillRequest(request_id, ownership, engine_request, token_count, deadline_s, **fields)
        self.decode_placer.begin(request)
        return request

    def pushed(self) -> list[str]:
        return [key.request_id for key, _ in self.engine.pushes]

    def outcome(self, name: str) -> float:
        return self.metrics.placements.labels(name)._value.get()  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for decode in self.decodes:
            decode.may_answer.set()
            await decode.die()
        for store in self.stores:
            await store.__aexit__(None, None, None)


@pytest.fixture
async def world() -> AsyncIterator[PlacementWorld]:
    shared = MemoryCluster()
    async with MemoryStore(shared) as store:
        world = PlacementWorld(store, shared)
        yield world
        await world.close()


async def test_room_is_reserved_then_the_kv_is_pushed_to_the_ticket_and_the_router_hears_where(
    world: PlacementWorld,
) -> None:
    decode = await world.decode()
    request = world.begin("a", 20, predicted_length=TokenRange(7, 9))
    await eventually(lambda: request.log.has_unsent)
    assert request.log.take("a", request.ownership.term).progress == (RoomReserved("decode-0", decode.incarnation),)
    ((key, ticket),) = world.engine.pushes
    assert key == request.engine_request.key
    assert ticket.token_count == 20
    (asked,) = decode.reserved
    assert (asked.request_id, asked.term.attempt, asked.router_id) == ("a", 3, "router")
    assert (len(asked.token_ids), asked.generated_count) == (20, 0)
    assert (asked.predicted_length.low, asked.predicted_length.high) == (7, 9)
    assert 0 < asked.timeout_s <= 600
    assert world.outcome("reserved") == 1
    world.decode_placer.begin(request)
    world.decode_placer.end(request, handed_over=True)
    later = world.begin("later")
    await eventually(lambda: "later" in world.pushed())
    world.decode_placer.end(later, handed_over=False)
    await eventually(lambda: bool(decode.aborted))
    assert decode.calls == ["reserve a", "reserve later", "abort later"], "what decode has taken over is not aborted"


@pytest.mark.parametrize("phase", ["pushed", "asking", "waiting"])
async def test_a_request_that_ends_gives_back_its_room_and_what_it_may_have_got(
    world: PlacementWorld, phase: str
) -> None:
    waits, asks = phase == "waiting", phase == "asking"
    decode = await world.decode(**({"free_blocks": 0} if waits else {}))
    decode.full = waits
    if asks:
        decode.may_answer.clear()
    request = world.begin("a")
    await eventually(lambda: (decode.waiting if waits else decode.asked if asks else world.pushed()) == ["a"])
    world.decode_placer.end(request, handed_over=False)
    await eventually(lambda: decode.waiting == [] and decode.aborted == [("a", 3)])
    assert not asks or world.pushed() == []


async def test_a_failed_push_gives_the_room_back_and_goes_elsewhere(world: PlacementWorld) -> None:
    first, second = await world.decode(), await world.decode()
    request = world.begin("a")
    await eventually(lambda: len(world.pushed()) == 1)
    (here, elsewhere) = (first, second) if first.asked else (second, first)
    for _ in range(2):
        # The second time the request has a new ticket already.
        world.decode_placer.push_failed(request, KvPushFailed(request.engine_request.key, "broken"))
    await eventually(lambda: len(world.pushed()) == 2)
    assert elsewhere.asked == ["a"]
    await eventually(lambda: here.aborted == [("a", 3)])
    assert world.outcome("push_failed") == 1
    assert request.log._unsent[RoomReserved] == RoomReserved(elsewhere.instance_id, elsewhere.incarnation)
    world.decode_placer.end(request, handed_over=True)


async def test_an_instance_that_does_not_answer_is_left_for_another_and_gets_an_abort(world: PlacementWorld) -> None:
    first, second = await world.decode(), await world.decode()
    # Both are silent until it is known who was asked first.
    for decode in (first, second):
        decode.may_answer.clear()
    request = world.begin("a")
    await eventually(lambda: bool(first.asked or second.asked))
    (silent, other) = (first, second) if first.asked else (second, first)
    other.may_answer.set()
    await eventually(lambda: world.pushed() == ["a"])
    assert other.asked == ["a"]
    await eventually(lambda: silent.aborted == [("a", 3)])
    world.decode_placer.end(request, handed_over=True)


async def test_an_instance_that_is_asked_beside_the_line_must_answer_within_a_time(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_finder, "CALL_TIMEOUT_S", 0.2)
    first = await world.decode(free_blocks=1)
    first.full = True
    world.begin("a")
    await eventually(lambda: first.waiting == ["a"])
    silent = await world.decode(registered=False)
    silent.may_answer.clear()
    await silent.start()
    await eventually(lambda: silent.aborted == [("a", 3)])
    assert world.outcome("unavailable") == 1
    assert first.waiting == ["a"]


@pytest.mark.timeout(30)
async def test_a_request_whose_deadline_passes_while_two_instances_are_silent_fails_and_nothing_stands_still(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it called again without a pause, which blocked the event loop and filled memory."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(room_finder.RoomFinder, "_reserve", never)
    for _ in range(2):
        await world.decode()
    world.begin("a", timeout_s=0.3)
    await eventually(lambda: "a" in world.failed)
    assert isinstance(world.failed["a"], DeadlineExceeded)


async def test_an_instance_that_cannot_be_reached_is_left_alone_for_a_while(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_finder, "ROOM_REST_WHEN_FAILED_S", 1000.0)
    first, second = await world.decode(), await world.decode()
    await first.die()
    for number in range(6):
        world.begin(f"r{number}")
    await eventually(lambda: len(world.pushed()) == 6)
    assert len(second.asked) == 6
    failed = world.outcome("unavailable")
    assert failed >= 1
    for number in range(6, 12):
        world.begin(f"r{number}")
    await eventually(lambda: len(world.pushed()) == 12)
    assert world.outcome("unavailable") == failed, "it was not asked again"


async def test_an_instance_that_failed_is_asked_again_after_its_rest(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_finder, "ROOM_REST_WHEN_FAILED_S", 0.05)
    decode = await world.decode()
    decode.refusals = [Unavailable("not now"), Unavailable("not now")]
    request = world.begin("a")
    await eventually(lambda: world.pushed() == ["a"])
    assert decode.asked == ["a"] * 3
    world.decode_placer.end(request, handed_over=True)


async def test_a_request_without_room_asks_once_and_waits(world: PlacementWorld) -> None:
    decode = await world.decode(free_blocks=0)
    decode.full = True
    requests = [world.begin(name) for name in ("first", "second")]
    await eventually(lambda: sorted(decode.waiting) == ["first", "second"])
    for _ in range(3):
        await decode.say(free_blocks=1)
    # Room comes for one of them, then for all.
    decode.room_for.add("second")
    await eventually(lambda: world.pushed() == ["second"])
    decode.full = False
    await eventually(lambda: world.pushed() == ["second", "first"])
    assert sorted(decode.calls) == ["reserve first", "reserve second"]
    assert [asked.wait for asked in decode.reserved] == [True, True]
    for request in requests:
        world.decode_placer.end(request, handed_over=True)


async def test_an_instance_that_serves_another_phase_now_is_asked_again_soon_and_has_not_failed(
    world: PlacementWorld,
) -> None:
    decode = await world.decode()
    decode.refusals = [Unavailable("it prefills now", 0.0)] * 2
    request = world.begin("a")
    await eventually(lambda: world.pushed() == ["a"])
    assert (world.outcome("unavailable"), world.outcome("no_room")) == (0, 2)
    world.decode_placer.end(request, handed_over=True)


async def test_a_waiting_request_takes_room_at_another_instance_and_gives_its_place_up(world: PlacementWorld) -> None:
    first = await world.decode(free_blocks=1)
    first.full = True
    world.begin("a")
    await eventually(lambda: first.waiting == ["a"])
    second = await world.decode()
    await eventually(lambda: world.pushed() == ["a"])
    assert [asked.wait for asked in second.reserved] == [False]
    await eventually(lambda: first.aborted == [("a", 3)] and first.waiting == [])
    assert second.aborted == []


async def test_a_waiting_request_that_is_refused_elsewhere_keeps_its_place(world: PlacementWorld) -> None:
    first, second = await world.decode(free_blocks=1), await world.decode(free_blocks=0)
    first.full = second.full = True
    world.begin("a")
    await eventually(lambda: len(first.waiting) + len(second.waiting) == 1)
    here, elsewhere = (first, second) if first.waiting else (second, first)
    # Its room is gone when it is asked for.
    await elsewhere.say(free_blocks=9)
    await eventually(lambda: elsewhere.asked == ["a"])
    await eventually(lambda: world.outcome("no_room") == 1)
    assert here.waiting == ["a"]
    assert here.aborted == elsewhere.aborted == []
    here.full = False
    await eventually(lambda: world.pushed() == ["a"])
    assert here.asked == ["a"]


async def test_of_two_instances_that_both_grant_room_one_gets_it_back(world: PlacementWorld) -> None:
    first = await world.decode(free_blocks=1)
    first.full = True
    world.begin("a")
    await eventually(lambda: first.waiting == ["a"])
    second = await world.decode(registered=False)
    second.may_answer.clear()
    await second.start()
    await eventually(lambda: second.asked == ["a"])
    first.full = False
    second.may_answer.set()
    await eventually(lambda: world.pushed() == ["a"])
    await eventually(lambda: len(first.aborted) + len(second.aborted) == 1)


async def test_a_request_whose_instance_drains_waits_elsewhere(world: PlacementWorld) -> None:
    first = await world.decode(free_blocks=1)
    first.full = True
    world.begin("a")
    await eventually(lambda: first.waiting == ["a"])
    second = await world.decode(free_blocks=0)
    second.full = True
    await first.say(free_blocks=1, state="draining")
    await eventually(lambda: first.aborted == [("a", 3)] and first.waiting == [])
    await eventually(lambda: second.waiting == ["a"])


async def test_an_instance_whose_line_is_full_is_asked_again_after_a_rest(world: PlacementWorld) -> None:
    decode = await world.decode(free_blocks=0)
    decode.refusals = [NoCapacity("decode", 0.02)] * 3
    world.begin("a")
    await eventually(lambda: world.pushed() == ["a"])
    assert decode.asked == ["a"] * 4
    assert world.outcome("no_room") == 3


async def test_room_that_was_given_back_counts_as_room_again(world: PlacementWorld) -> None:
    decode = await world.decode(free_blocks=2)
    for number in range(4):
        request = world.begin(f"r{number}")
        await eventually(lambda number=number: len(world.pushed()) == number + 1)  # type: ignore[misc]
        world.decode_placer.end(request, handed_over=False)
        await eventually(lambda number=number: len(decode.aborted) == number + 1)  # type: ignore[misc]


@pytest.mark.parametrize("error", [StaleAttempt("a", 3, 4), EngineError("broken")], ids=["stale", "engine"])
async def test_what_no_other_instance_could_mend_fails_the_request(world: PlacementWorld, error: KaveriError) -> None:
    await world.decode()
    if isinstance(error, StaleAttempt):
        world.decodes[0].refusals = [error]
    else:
        world.engine.refuses_push = [error]
    world.begin("a")
    await eventually(lambda: "a" in world.failed)
    expected = StaleAttempt if isinstance(error, StaleAttempt) else Unavailable
    assert isinstance(world.failed["a"], expected)
    assert world.pushed() == []
    if isinstance(error, EngineError):
        await eventually(lambda: world.decodes[0].aborted == [("a", 3)])


async def test_a_refusal_that_was_meant_for_a_former_session_is_no_end_the_present_one_asks(
    world: PlacementWorld,
) -> None:
    decode = await world.decode()
    decode.may_answer.clear()
    request = world.begin("a")
    await eventually(lambda: decode.asked == ["a"])
    # The client has attached the request through another router, and that one was at the decode instance before.
    request.ownership = Ownership(Term(1, 3), "other router")
    decode.refusals = [RequestAlreadyExists("a")]
    decode.may_answer.set()
    await eventually(lambda: world.pushed() == ["a"])
    assert [(asked.term.session, asked.router_id) for asked in decode.reserved] == [(0, "router"), (1, "other router")]
    assert not world.failed


@pytest.mark.parametrize("refuses", ["decode", "engine"])
async def test_an_instance_that_the_request_does_not_fit_is_not_asked_again_and_the_last_one_says_why(
    world: PlacementWorld, refuses: str
) -> None:
    first, second = await world.decode(), await world.decode()
    unfit = [InvalidArgument("token_ids", 20, "shorter"), LayoutMismatch("dtype", "float32", "float16")]
    if refuses == "decode":
        first.always, second.always = unfit
    else:
        world.engine.refuses_push = list(unfit)
    world.begin("a")
    await eventually(lambda: "a" in world.failed)
    assert isinstance(world.failed["a"], InvalidArgument | LayoutMismatch)
    assert first.asked == second.asked == ["a"]
    assert not len(world.decode_placer.finder._search._unconfirmed), "it counts as work nowhere"
    if refuses == "engine":
        # Both had granted room.
        await eventually(lambda: first.aborted == second.aborted == [("a", 3)])


async def test_a_bug_in_one_placement_fails_that_request_alone(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.decode()
    world.engine.refuses_push = [ZeroDivisionError("a bug")]  # type: ignore[list-item]
    world.begin("unlucky")
    await eventually(lambda: "unlucky" in world.failed)
    assert isinstance(world.failed["unlucky"], Unavailable)
    world.begin("other")
    await eventually(lambda: world.pushed() == ["other"])


async def test_without_any_decode_instance_a_request_fails_after_a_while(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_finder, "NO_DECODE_INSTANCE_S", 0.3)
    started_s = time.monotonic()
    world.begin("a")
    await eventually(lambda: "a" in world.failed)
    assert time.monotonic() - started_s >= 0.3
    assert isinstance(world.failed["a"], Unavailable)
    assert "no decode instance" in str(world.failed["a"])


async def test_a_decode_instance_that_comes_is_used_at_once(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_finder, "ROOM_LOOK_S", 1000.0)
    world.begin("a")
    await world.decode()
    await eventually(lambda: world.pushed() == ["a"], 5.0)


async def test_every_reserve_call_of_an_attempt_has_a_number_and_room_is_given_back_up_to_it(
    world: PlacementWorld,
) -> None:
    first = await world.decode()
    first.refusals = [Unavailable("not now")]
    await world.decode(free_blocks=0)
    request = world.begin("a")
    await eventually(lambda: len(first.reserved) + len(world.decodes[1].reserved) == 2)
    calls = [*first.reserved, *world.decodes[1].reserved]
    assert [call.term.placement for call in calls] == [1, 2]
    await eventually(lambda: first.aborted_reservations == [1])
    world.decode_placer.end(request, handed_over=False)
    await eventually(lambda: world.decodes[1].aborted_reservations == [2])


async def test_an_instance_that_refuses_for_a_day_rests_for_seconds(
    world: PlacementWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "LONGEST_RETRY_AFTER_S", 0.1)
    decode = await world.decode()
    decode.refusals = [NoCapacity("decode", 86_400.0)]
    world.begin("a")
    await eventually(lambda: decode.asked == ["a", "a"])


async def test_room_asked_of_an_instance_that_has_left_is_forgotten(world: PlacementWorld) -> None:
    await world.decode()
    for number in range(5):
        world.begin(f"r{number}", token_count=1)
    search = world.decode_placer.finder._search
    await eventually(lambda: len(search._unconfirmed) == 5)
    await world.stores[0].deregister(world.stores[0].view().instances["decode-0"].record)
    await eventually(lambda: len(search._unconfirmed) == 0)
