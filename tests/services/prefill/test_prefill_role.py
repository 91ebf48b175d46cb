"""PrefillRole between its routers and its engine: submissions, what each end frees, and reports."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import (
    EngineStopped,
    FirstToken,
    KvPushed,
    KvPushFailed,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
)
from kaveri.errors import (
    DeadlineExceeded,
    EngineBroke,
    EngineError,
    InvalidArgument,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.feeds.feed import RouterFeeds
from kaveri.lives.prompt import (
    Adopted,
    FirstTokenDrawn,
    HandedOver,
    HandOverFailed,
    Outcome,
    RoomReserved,
    Started,
)
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.prompt_queue import PromptQueue
from services.prefill import role
from services.prefill.requests import PrefillRequest, PromptNews, ReportLog
from services.prefill.role import LONGEST_REQUEST_S, HasRoom, PrefillRole
from tests.services.prefill.scripted import (
    ScriptedEngine,
    ScriptedHandOver,
    eventually,
    new_metrics,
    no_predictions,
    params,
)

CHUNK_TOKENS = 16


ORPHAN_GRACE_S = 0.2


class RoleWorld:
    """PrefillRole with scripted surroundings; the engine takes two chunks ahead: 32 tokens."""

    def __init__(
        self, max_queue: int = 100, at_first_token: bool = False, has_room: HasRoom = lambda *_: True, **engine: int
    ) -> None:
        self.engine = ScriptedEngine(**engine)
        self.hand_over = ScriptedHandOver(at_first_token)
        self.metrics = new_metrics()
        self.role = PrefillRole(
            self.engine,  # type: ignore[arg-type]
            PromptQueue(OrderingPolicy.FCFS, CHUNK_TOKENS, max_queue),
            self.hand_over,
            no_predictions(self.metrics),
            self.metrics,
            ORPHAN_GRACE_S,
            has_room,
            itertools.count(1),
            RouterFeeds(ORPHAN_GRACE_S),
        )

    def accept(self, request_id: str, token_count: int = 20, attempt: int = 1, **fields: Any) -> PrefillRequest:
        owned = Ownership(Term(0, attempt), fields.pop("router_id", "router"), fields.pop("secret", b""))
        fields = {"generated_count": 0, "params": params(), "timeout_s": 60.0, **fields}
        return self.role.accept(request_id, owned, token_ids=(1,) * token_count, **fields)

    def abort(self, request_id: str, attempt: int, router_id: str) -> None:
        self.role.abort(request_id, Ownership(Term(0, attempt), router_id))

    def compute(self, request: PrefillRequest, finish: FinishReason | None = None) -> None:
        self.role.handle([PrefillStarted(request.engine_request.key)])
        self.role.handle([FirstToken(request.engine_request.key, 5, None, finish)])

    def hand_over_to_decode(self, request: PrefillRequest) -> None:
        self.compute(request)
        self.hand_over.report(request, RoomReserved("decode-0", 1))
        self.role.handle([KvPushed(request.engine_request.key, 100, "tcp")])

    def count(self, outcome: str) -> float:
        return self.metrics.requests.labels(outcome)._value.get()  # type: ignore[no-any-return]


async def told(request: PrefillRequest) -> list[Any]:
    await eventually(lambda: request.log.has_unsent or request.log.ended, 10.0)
    news = request.log.take(request.request_id, request.ownership.term)
    if not news.progress and request.log.error is not None:
        raise request.log.error
    return list(news.progress)


class End(NamedTuple):
    happens: Callable[[RoleWorld, PrefillRequest], object]
    outcome: str
    by_engine: bool = False
    handed_over: bool = False


ENDS = {
    "cancelled": End(lambda world, request: world.role.cancel(request), "cancelled"),
    "aborted by its router": End(lambda world, request: world.abort(request.request_id, 1, "router"), "cancelled"),
    "failed": End(
        lambda world, request: world.hand_over.report(request, HandOverFailed(Unavailable("no place"))), "failed"
    ),
    "past its deadline at decode first": End(
        lambda world, request: world.hand_over.report(request, HandOverFailed(DeadlineExceeded())), "deadline"
    ),
    "given up by the engine": End(
        lambda world, request: world.role.handle([RequestFailed(request.engine_request.key, "broken")]), "failed"
    ),
    "replaced by a newer attempt": End(
        lambda world, request: world.accept(request.request_id, 1, attempt=2), "refused"
    ),
    "finished with its first token": End(
        lambda world, request: world.compute(request, FinishReason.STOP), "finished", by_engine=True
    ),
    "handed over": End(
        lambda world, request: world.hand_over_to_decode(request), "handed_over", by_engine=True, handed_over=True
    ),
}
each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


@each_end
async def test_however_a_prompt_ends_the_next_one_is_let_in(end: End) -> None:
    world = RoleWorld()
    first = world.accept("first", 40)
    world.accept("next", 40)
    assert world.engine.submitted_ids == ["first"]
    end.happens(world, first)
    await eventually(lambda: world.engine.submitted_ids[-1] == "next", 5.0)


async def test_a_request_whose_own_computation_raises_ends_with_an_engine_error_that_names_it() -> None:
    world = RoleWorld()
    request = world.accept("first", 40)
    world.role.handle([RequestFailed(request.engine_request.key, "its draw raised", is_final=True)])
    with pytest.raises(EngineError, match="'first': its draw raised"):
        await told(request)


async def test_only_the_requests_of_the_step_that_raised_are_suspects() -> None:
    world = RoleWorld()
    in_step, beside = world.accept("in-step", 4), world.accept("beside", 4)
    world.role.handle([EngineStopped("it raised", {in_step.engine_request.key: 1})])
    for request, suspect_until in ((in_step, 1), (beside, 0)):
        with pytest.raises(EngineBroke, match="it raised") as caught:
            await told(request)
        assert caught.value.suspect_until == suspect_until


async def test_a_cancelled_prompt_that_waited_lets_the_one_behind_it_in() -> None:
    world = RoleWorld(total_blocks=4)
    world.accept("first", 30)
    second = world.accept("second", 60)
    world.accept("third", 30)
    assert world.engine.submitted_ids == ["first"], "there are no blocks for the second"
    world.role.cancel(second)
    await eventually(lambda: world.engine.submitted_ids == ["first", "third"], 5.0)
    assert world.engine.aborted_ids == ["second"]


async def test_blocks_that_come_free_without_an_event_let_the_next_one_in() -> None:
    world = RoleWorld(total_blocks=4)
    world.accept("first", 20)
    world.accept("second", 60)
    assert world.engine.submitted_ids == ["first"]
    # More than one look that finds nothing.
    await eventually(lambda: world.engine.asked_count >= 5, 5.0)
    world.engine.free_blocks = 4
    await eventually(lambda: world.engine.submitted_ids == ["first", "second"], 5.0)


@each_end
async def test_an_end_frees_what_the_engine_holds_unless_the_engine_has_freed_it(end: End) -> None:
    world = RoleWorld()
    request = world.accept("a")
    end.happens(world, request)
    assert world.count(end.outcome) == 1
    assert world.engine.aborted == ([] if end.by_engine else [request.engine_request.key])
    # Repeated ends free and count nothing.
    world.role.cancel(request)
    world.hand_over.report(request, HandOverFailed(Unavailable("again")))
    assert world.engine.aborted == ([] if end.by_engine else [request.engine_request.key])
    assert sum(world.count(outcome) for outcome in Outcome) == 1


@each_end
async def test_a_hand_over_that_has_begun_ends_once_with_the_request(end: End) -> None:
    world = RoleWorld()
    request = world.accept("a", 10)
    if not end.by_engine:
        world.role.handle([PrefillStarted(request.engine_request.key)])
    end.happens(world, request)
    world.role.cancel(request)
    assert world.hand_over.begun == ["a"]
    assert world.hand_over.ended == [("a", end.handed_over)]


@pytest.mark.parametrize("how", ["cancelled", "finished with its first token"])
async def test_a_hand_over_that_has_not_begun_does_not_end(how: str) -> None:
    world = RoleWorld(at_first_token=True)
    request = world.accept("a", 10)
    ENDS[how].happens(world, request)
    assert world.hand_over.begun == world.hand_over.ended == []


async def test_a_request_ends_at_its_deadline_and_its_router_hears_why() -> None:
    world = RoleWorld()
    request = world.accept("a", timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await told(request)
    assert world.engine.aborted == [request.engine_request.key]
    assert world.count("deadline") == 1


async def test_the_time_of_a_request_has_a_limit() -> None:
    now_s = time.monotonic()
    request = RoleWorld().accept("a", timeout_s=1e12)
    assert now_s + LONGEST_REQUEST_S <= request.deadline_s < now_s + LONGEST_REQUEST_S + 60


async def test_the_same_attempt_of_another_router_is_refused() -> None:
    world = RoleWorld()
    first = world.accept("a", secret=bytes(16))
    with pytest.raises(StaleAttempt):
        world.accept("a", secret=bytes(16), router_id="another router")
    world.role.cancel(first)
    assert world.count("cancelled") == 1


async def test_older_and_equal_attempts_are_refused_and_leave_the_newer_one_alone() -> None:
    world = RoleWorld()
    older = world.accept("a", attempt=2)
    newer = world.accept("a", attempt=3)
    with pytest.raises(StaleAttempt) as replaced:
        await told(older)
    assert (replaced.value.attempt, replaced.value.newest_attempt) == (2, 3)
    for attempt in (1, 2):
        with pytest.raises(StaleAttempt) as refused:
            world.accept("a", attempt=attempt)
        assert refused.value.newest_attempt == 3
    assert world.accept("a", attempt=3) is newer
    # What is still heard of the older one changes nothing.
    world.role.handle([PrefillStarted(older.engine_request.key), FirstToken(older.engine_request.key, 5, None, None)])
    world.role.cancel(older)
    assert world.role.load().waiting_requests == 1
    world.abort("a", 2, "router")
    assert world.role.load().waiting_requests == 1, "an older attempt is meant"
    world.abort("a", 3, "stranger")
    assert world.role.load().waiting_requests == 1, "another router's is meant"
    world.abort("unknown", 9, "router")
    world.abort("a", 4, "router")
    assert world.engine.aborted == [older.engine_request.key, newer.engine_request.key]
    assert world.role.load().waiting_requests == 0


async def test_an_older_owner_does_not_have_a_prompt_computed_again_that_was_handed_over_to_a_newer_one() -> None:
    world, secret = RoleWorld(), bytes(16)
    later = world.accept("a", secret=secret)
    world.role.attach(Attachment("a", Ownership(Term(1, 1), "other", secret), (1,) * 20, 0))
    world.hand_over_to_decode(later)
    with pytest.raises(RequestAlreadyExists):
        # Its router stood still meanwhile, and counts its attempt as lost.
        world.accept("a", attempt=2, secret=secret)
    world.role.attach(Attachment("a", Ownership(Term(2, 1), "other", secret), (1,) * 20, 0))
    assert later.ownership.term == Term(2, 1)
    # Another client's request may have the same id.
    world.accept("a", attempt=2, secret=bytes(17))
    assert world.role.load().waiting_requests == 1


async def test_another_routers_request_of_the_same_id_ends_the_former_for_good() -> None:
    world = RoleWorld()
    former = world.accept("a", attempt=5)
    world.accept("a", attempt=1, router_id="other")
    with pytest.raises(RequestAlreadyExists):
        await told(former)
    assert world.engine.aborted == [former.engine_request.key]


async def test_a_refused_request_leaves_no_trace() -> None:
    world = RoleWorld(max_queue=1)
    world.accept("computes", 40)
    world.accept("waits", 40)
    with pytest.raises(NoCapacity) as refused:
        world.accept("refused", 40)
    assert refused.value.role == "prefill"
    assert refused.value.retry_after_s > 0
    assert world.count("refused") == 1
    assert world.role.load().waiting_requests == 2
    # Not known, so not stale either.
    world.abort("refused", 1, "router")
    assert world.engine.aborted == []


async def test_its_load_says_what_waits_what_runs_and_how_much_room_there_is() -> None:
    world = RoleWorld(max_queue=3)
    assert world.role.load().queue_room == 3
    first, second = world.accept("first", 40), world.accept("second", 30)
    load = world.role.load()
    assert (load.waiting_requests, load.running_requests) == (2, 0)
    assert (load.queued_prefill_tokens, load.queue_room) == (70, 2)
    assert (load.free_blocks, load.total_blocks, load.context_tokens) == (61, 64, 7)
    world.role.handle([PrefillStarted(first.engine_request.key), PrefillProgress(first.engine_request.key, 16)])
    load = world.role.load()
    assert (load.waiting_requests, load.running_requests) == (1, 1)
    # 24 tokens are less than two chunks, so the second is the engine's now.
    assert (load.queued_prefill_tokens, load.queue_room) == (54, 3)
    world.role.cancel(first)
    load = world.role.load()
    assert (load.waiting_requests, load.running_requests, load.queued_prefill_tokens) == (1, 0, 30)
    world.compute(second)
    assert world.role.load().running_requests == 1, "until it is handed over"
    world.role.cancel(second)
    load = world.role.load()
    assert (load.waiting_requests, load.running_requests, load.queued_prefill_tokens) == (0, 0, 0)


async def test_a_router_hears_of_each_step_and_of_the_times_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(role, "time", SimpleNamespace(monotonic=lambda: now_s))
    world = RoleWorld()
    request = world.accept("a", 40)
    now_s = 110.0
    world.role.handle([PrefillStarted(request.engine_request.key)])
    assert await told(request) == [Started(10.0)]
    now_s = 115.0
    world.role.handle(
        [PrefillProgress(request.engine_request.key, 16), PrefillProgress(request.engine_request.key, 32)]
    )
    world.hand_over.report(request, RoomReserved("decode-0", 1))
    assert await told(request) == [RoomReserved("decode-0", 1)]
    now_s = 130.0
    world.role.handle([FirstToken(request.engine_request.key, 5, None, None)])
    assert await told(request) == [FirstTokenDrawn(5, None, None, 20.0)]
    assert world.metrics.tokens._value.get() == 40
    now_s = 133.0
    world.role.handle([KvPushed(request.engine_request.key, 100, "tcp")])
    assert await told(request) == [HandedOver(100, 18.0, 3.0, "tcp")]
    assert await told(request) == []
    assert world.metrics.transfers.bytes.labels("tcp")._value.get() == 100


async def test_an_adopted_request_is_handed_over_without_a_push() -> None:
    world = RoleWorld(at_first_token=True)
    request = world.accept("a")
    world.compute(request)
    world.hand_over.report(request, Adopted(RoomReserved("here", 1)))
    *_, placed, handed_over = await told(request)
    assert placed == RoomReserved("here", 1)
    assert (handed_over.kv_bytes, handed_over.kv_transport) == (0, "none")
    assert await told(request) == []
    assert world.engine.aborted == []
    assert world.count("handed_over") == 1
    assert world.metrics.transfers.bytes.collect()[0].samples == []


@pytest.mark.parametrize(
    ("token_count", "at_first_token", "begins_with"),
    [(16, False, "start"), (17, False, "chunk"), (16, True, "token"), (17, True, "token")],
)
async def test_when_a_place_is_looked_for(token_count: int, at_first_token: bool, begins_with: str) -> None:
    world = RoleWorld(at_first_token=at_first_token)
    request = world.accept("a", token_count)
    assert world.hand_over.begun == []
    world.role.handle([PrefillStarted(request.engine_request.key)])
    assert bool(world.hand_over.begun) == (begins_with == "start")
    if token_count > CHUNK_TOKENS:
        world.role.handle([PrefillProgress(request.engine_request.key, 16)])
    assert bool(world.hand_over.begun) == (begins_with != "token")
    world.role.handle([FirstToken(request.engine_request.key, 5, None, None)])
    assert world.hand_over.begun[-1] == "a"


async def test_a_request_that_ends_with_its_first_token_looks_for_no_place() -> None:
    world = RoleWorld(at_first_token=True)
    request = world.accept("a")
    world.compute(request, FinishReason.STOP)
    assert world.hand_over.begun == []
    assert [type(event) for event in await told(request)] == [Started, FirstTokenDrawn]
    assert await told(request) == []


async def test_a_failed_push_is_the_hand_overs_to_know_and_ends_nothing() -> None:
    world = RoleWorld()
    request = world.accept("a")
    world.compute(request)
    world.hand_over.report(request, RoomReserved("decode-0", 1))
    world.role.handle([KvPushFailed(request.engine_request.key, "refused")])
    assert world.hand_over.failed == ["a"]
    assert world.engine.aborted == []
    assert world.role.load().running_requests == 1


async def test_a_draining_instance_takes_nothing_and_is_idle_when_the_last_request_has_ended() -> None:
    world = RoleWorld()
    await asyncio.wait_for(world.role.wait_idle(), 1.0)
    first, second = world.accept("first"), world.accept("second")
    world.role.drain()
    with pytest.raises(Unavailable, match="draining") as refused:
        world.accept("late")
    assert refused.value.retry_after_s
    idle = asyncio.create_task(world.role.wait_idle())
    world.role.cancel(first)
    await asyncio.sleep(0)
    assert not idle.done()
    world.hand_over_to_decode(second)
    await asyncio.wait_for(idle, 1.0)


@pytest.mark.parametrize("retry_after_s", [1.0, 0.0], ids=["drains", "does not serve prefill now"])
async def test_an_instance_that_takes_no_prompts_gives_back_what_it_has_not_begun(retry_after_s: float) -> None:
    world = RoleWorld()
    begun, waits, other = world.accept("begun", 40), world.accept("waits", 40), world.accept("other", 40)
    assert world.engine.submitted_ids == ["begun"]
    owner = Ownership(Term(0, 1), "router")
    world.role.give_back("waits", owner)
    world.role.drain(retry_after_s)
    for request_id in ("begun", "waits", "unknown"):
        world.role.give_back(request_id, owner)
    world.role.give_back("other", Ownership(Term(0, 1), "another router"))
    for refused in (lambda: told(waits), lambda: told(world.accept("later", 40))):
        with pytest.raises(Unavailable) as error:
            await refused()
        assert error.value.retry_after_s == retry_after_s
    assert world.count("given_back") == 1
    world.hand_over_to_decode(begun)
    await eventually(lambda: world.engine.submitted_ids[-1] == "other", 5.0)
    world.hand_over_to_decode(other)
    await asyncio.wait_for(world.role.wait_idle(), 1.0)


async def test_prompts_that_wait_are_returned_once_for_a_shorter_queue_elsewhere() -> None:
    world = RoleWorld()
    begun, first, last = (world.accept(name, 40) for name in ("begun", "first", "last"))
    world.role.level(40)
    assert world.count("given_back") == 0, "it would only change places"
    world.role.level(41)
    with pytest.raises(NoCapacity) as refused:
        await told(last)
    assert refused.value.retry_after_s == 0.0
    world.role.level(1000)
    assert world.count("given_back") == 1, "until loads show it"
    for request in (begun, first):
        world.hand_over_to_decode(request)
        await eventually(lambda: world.engine.submitted_ids == ["begun", "first"], 5.0)
    await asyncio.wait_for(world.role.wait_idle(), 1.0)


async def test_an_instance_that_takes_requests_gives_none_back() -> None:
    world = RoleWorld()
    begun, waits = world.accept("begun", 40), world.accept("waits", 40)
    world.role.drain()
    world.role.undrain()
    world.role.give_back("waits", Ownership(Term(0, 1), "router"))
    world.hand_over_to_decode(begun)
    await eventually(lambda: world.engine.submitted_ids[-1] == "waits", 5.0)
    world.hand_over_to_decode(waits)
    assert world.count("given_back") == 0


async def test_everything_fails_together_and_says_why() -> None:
    world = RoleWorld()
    requests = [world.accept(f"r{number}") for number in range(3)]
    world.role.fail_all("the engine stopped")
    for request in requests:
        with pytest.raises(Unavailable, match="the engine stopped"):
            await told(request)
    assert world.count("failed") == 3


async def test_an_engine_that_says_a_prompt_can_never_fit_fails_that_prompt_alone() -> None:
    world = RoleWorld()
    world.engine.most_tokens = 30
    too_long, other = world.accept("too long", 31), world.accept("other", 30)
    with pytest.raises(InvalidArgument, match="token_ids"):
        await told(too_long)
    await eventually(lambda: world.engine.submitted_ids == ["other"], 5.0)
    assert world.role.load().waiting_requests == 1
    world.role.cancel(other)


async def test_an_engine_that_has_stopped_keeps_its_requests_until_it_says_so() -> None:
    world = RoleWorld()
    world.engine.broken = EngineError("stopped")
    world.accept("a")
    assert world.role.load().waiting_requests == 1
    assert world.role.load().queued_prefill_tokens == 20


async def test_a_question_for_room_shows_what_is_being_computed_and_nothing_else() -> None:
    seen: list[list[str]] = []

    def has_room(_: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        seen.append([request.request_id for request in computing])
        return True

    world = RoleWorld(has_room=has_room)
    first, second, _ = [world.accept(name, 8) for name in ("first", "second", "third")]
    assert seen == [[], ["first"], ["first", "second"]]
    world.compute(first)
    world.role.cancel(second)
    world.accept("fourth", 8)
    assert seen[3:] == [["third"]]


async def test_a_prompt_waits_for_room_that_answers_leave_it() -> None:
    room = False
    world = RoleWorld(has_room=lambda request, computing: room)
    world.accept("a")
    assert world.engine.submitted == []
    room = True
    await eventually(lambda: world.engine.submitted_ids == ["a"], 5.0)


FITS: dict[str, tuple[dict[str, Any], str | None]] = {
    "as long as may be": ({"token_count": 99}, None),
    "as long as the model": ({"token_count": 100}, "fewer than 100"),
    "empty": ({"token_count": 0}, "at least 1"),
    "all but one generated": ({"generated_count": 19}, None),
    "all generated": ({"generated_count": 20}, "less than"),
    "without max_tokens": ({"params": params(None)}, "max_tokens"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("fields", "limit"), FITS.values(), ids=FITS)
async def test_what_fits_is_taken_and_what_does_not_is_refused_with_the_limit(
    fields: dict[str, Any], limit: str | None
) -> None:
    world = RoleWorld(max_model_len=100)
    if limit is None:
        assert world.accept("a", **fields)
        return
    with pytest.raises(InvalidArgument, match=limit):
        world.accept("a", **fields)
    assert world.role.load().waiting_requests == 0


async def test_a_prompt_as_large_as_the_pool_fits_and_a_larger_one_does_not() -> None:
    world = RoleWorld(total_blocks=4)
    assert world.accept("all of it", 64)
    with pytest.raises(InvalidArgument, match="at most 64 tokens"):
        world.accept("more", 65)


async def test_ids_outside_the_vocabulary_are_refused() -> None:
    world = RoleWorld()
    for largest, fits in ((999, True), (1000, False)):
        fields: dict[str, Any] = {"generated_count": 0, "params": params(), "timeout_s": 1.0}
        if fits:
            assert world.role.accept("a", Ownership(Term(0, 1), "router"), (1, largest), **fields)
        else:
            with pytest.raises(InvalidArgument, match="below 1000"):
                world.role.accept("b", Ownership(Term(0, 1), "router"), (1, largest), **fields)


def test_a_log_gives_the_latest_of_each_kind_in_order_with_the_end() -> None:
    log, owner = ReportLog(), Term(0, 1)
    log.put(Started(1.0))
    assert log.take("a", owner) == PromptNews("a", owner, (Started(1.0),))
    log.put(RoomReserved("d0", 1))
    log.put(FirstTokenDrawn(5, None, None, 1.0))
    log.put(RoomReserved("d1", 2))
    log.end(gone := Unavailable("gone"))
    later = (RoomReserved("d1", 2), FirstTokenDrawn(5, None, None, 1.0))
    assert log.take("a", owner) == PromptNews("a", owner, later, ended=True, error=gone)
    assert not log.has_unsent
    log.repeat()
    assert log.take("a", owner) == PromptNews("a", owner, (Started(1.0), *later), ended=True, error=gone)


async def test_an_abort_that_overtakes_its_request_keeps_it_out_but_no_later_attempt() -> None:
    world = RoleWorld()
    world.abort("a", 2, "router")
    for attempt in (1, 2):
        with pytest.raises(StaleAttempt):
            world.accept("a", attempt=attempt)
    assert world.accept("a", attempt=3)
    assert world.accept("b", attempt=1)


async def test_a_request_is_an_orphan_while_its_router_has_no_stream_and_ends_with_the_grace() -> None:
    world = RoleWorld()
    feed = world.role.feeds.open("router")
    world.accept("a")
    assert world.metrics.orphans._value.get() == 0  # type: ignore[attr-defined]
    world.role.feeds.close(feed)
    assert world.role._orphan_count() == 1
    await eventually(lambda: world.count("cancelled") == 1, 5.0)


async def test_a_new_stream_repeats_what_its_router_waits_for_and_says_what_is_not_here() -> None:
    world = RoleWorld()
    request = world.accept("a")
    world.compute(request)
    await told(request)
    for owner, is_known in ((Term(0, 1), True), (Term(0, 2), False)):
        unknown = world.role.repeat("router", {"a": owner})
        assert [(news.term, news.ended) for news in unknown] == ([] if is_known else [(owner, True)])
    assert [type(each) for each in await told(request)] == [Started, FirstTokenDrawn]
    world.role.cancel(request)
