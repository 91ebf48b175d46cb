"""Late submission: what the engine is given, and when."""

from collections.abc import Collection

import pytest

from kaveri.domain.sampling import SamplingParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.ordering import OrderingPolicy
from services.prefill.queue import PrefillQueue
from services.prefill.requests import PrefillRequest


class ScriptedEngine:
    """Takes submissions while it has blocks of one token each."""

    def __init__(self, free_tokens: int = 10_000, most_tokens: int = 10_000) -> None:
        self.submitted: list[str] = []
        self.free_tokens = free_tokens
        self.most_tokens = most_tokens

    def prefill(self, request: EngineRequest) -> None:
        if len(request.token_ids) > self.most_tokens:
            raise InvalidArgument("token_ids", len(request.token_ids), "shorter")
        if len(request.token_ids) > self.free_tokens:
            raise NoCapacity("kv pool", 0.1)
        self.free_tokens -= len(request.token_ids)
        self.submitted.append(request.key.request_id)


def queue_of(
    engine: ScriptedEngine, max_waiting: int = 100, policy: OrderingPolicy = OrderingPolicy.FCFS, batch: int = 16
) -> PrefillQueue:
    return PrefillQueue(engine, policy, 100, max_waiting, batch)  # type: ignore[arg-type]


def request(number: int, token_count: int) -> PrefillRequest:
    key = EngineKey(f"r{number}", number)
    params = SamplingParams(max_tokens=2, seed=0)
    return PrefillRequest(
        key, 1, "router", EngineRequest(key, (1,) * token_count, 0, params), 0.0, 1.0, lambda *_: None
    )


async def test_the_engine_gets_two_chunks_of_work_and_the_rest_waits() -> None:
    engine = ScriptedEngine()
    queue = queue_of(engine)
    for number in range(1, 6):
        queue.add(request(number, 80))
    queue.submit()
    assert engine.submitted == ["r1", "r2", "r3"]
    assert queue.queued_tokens == 400


async def test_progress_lets_the_next_one_in() -> None:
    engine = ScriptedEngine()
    queue = queue_of(engine)
    requests = [request(number, 100) for number in range(1, 5)]
    for entry in requests:
        queue.add(entry)
    queue.submit()
    assert engine.submitted == ["r1", "r2"]
    queue.advance(requests[0], 50)
    queue.submit()
    assert engine.submitted == ["r1", "r2", "r3"]
    queue.advance(requests[0], 100)
    queue.submit()
    assert engine.submitted == ["r1", "r2", "r3"]
    queue.remove(requests[1])
    queue.submit()
    assert engine.submitted == ["r1", "r2", "r3", "r4"]
    assert queue.queued_tokens == 200


async def test_a_prompt_longer_than_two_chunks_goes_in_when_the_engine_has_nothing() -> None:
    engine = ScriptedEngine()
    queue = queue_of(engine)
    queue.add(request(1, 1000))
    queue.add(request(2, 1))
    queue.submit()
    assert engine.submitted == ["r1"]


async def test_without_blocks_the_head_stays_and_nobody_overtakes_it() -> None:
    engine = ScriptedEngine(free_tokens=50)
    queue = queue_of(engine)
    queue.add(request(1, 60))
    queue.add(request(2, 10))
    assert queue.submit() == []
    assert queue.out_of_blocks
    assert engine.submitted == []
    engine.free_tokens = 100
    queue.submit()
    assert engine.submitted == ["r1", "r2"]
    assert not queue.out_of_blocks


async def test_a_prompt_that_can_never_fit_is_handed_back_and_holds_nobody_up() -> None:
    engine = ScriptedEngine(most_tokens=50)
    queue = queue_of(engine)
    too_long = request(1, 60)
    queue.add(too_long)
    queue.add(request(2, 10))
    assert [refused for refused, _ in queue.submit()] == [too_long]
    assert engine.submitted == ["r2"]
    assert queue.queued_tokens == 10


async def test_a_full_queue_refuses_and_takes_again_when_one_leaves() -> None:
    engine = ScriptedEngine(free_tokens=0)
    queue = queue_of(engine, max_waiting=2)
    first, second, third = (request(number, 10) for number in (1, 2, 3))
    queue.add(first)
    queue.add(second)
    with pytest.raises(NoCapacity) as refused:
        queue.add(third)
    assert refused.value.retry_after_s > 0
    queue.remove(first)
    queue.add(third)
    assert queue.queued_tokens == 20


async def test_shortest_first_submits_by_length_within_each_scheduling_batch() -> None:
    engine = ScriptedEngine()
    queue = queue_of(engine, policy=OrderingPolicy.SJF, batch=3)
    for number, token_count in enumerate((30, 20, 10, 5, 4), start=1):
        queue.add(request(number, token_count))
    queue.submit()
    assert engine.submitted == ["r3", "r2", "r1", "r5", "r4"]


async def test_a_cancelled_prompt_leaves_its_batch_without_a_trace() -> None:
    engine = ScriptedEngine(free_tokens=0)
    queue = queue_of(engine, policy=OrderingPolicy.LJF)
    requests = [request(number, 10 * number) for number in range(1, 4)]
    for entry in requests:
        queue.add(entry)
    assert queue.submit() == []
    queue.remove(requests[1])
    engine.free_tokens = 100
    queue.submit()
    assert engine.submitted == ["r3", "r1"]
    assert queue.queued_tokens == 40


async def test_who_asks_for_room_sees_what_is_being_computed_and_nothing_else() -> None:
    seen: list[list[str]] = []

    def has_room(asking: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        seen.append([entry.request_id for entry in computing])
        return True

    engine = ScriptedEngine()
    queue = PrefillQueue(engine, OrderingPolicy.FCFS, 100, 100, 16, has_room)  # type: ignore[arg-type]
    requests = [request(number, 50) for number in range(1, 5)]
    for entry in requests[:3]:
        queue.add(entry)
    queue.submit()
    assert seen == [[], ["r1"], ["r1", "r2"]]
    queue.advance(requests[0], 50)
    queue.remove(requests[1])
    queue.add(requests[3])
    queue.submit()
    assert seen[3:] == [["r3"]]


async def test_a_prompt_that_is_cancelled_half_way_gives_back_what_it_had_left() -> None:
    engine = ScriptedEngine()
    queue = queue_of(engine)
    cancelled, other, waiting = request(1, 150), request(2, 150), request(3, 10)
    for entry in (cancelled, other, waiting):
        queue.add(entry)
    queue.submit()
    assert engine.submitted == ["r1", "r2"]
    queue.advance(cancelled, 100)
    assert queue.queued_tokens == 50 + 150 + 10
    queue.remove(cancelled)
    assert queue.queued_tokens == 150 + 10
    # Unknown ones change nothing, nor does progress of one that has gone.
    queue.remove(cancelled)
    queue.advance(cancelled, 150)
    assert queue.queued_tokens == 160
