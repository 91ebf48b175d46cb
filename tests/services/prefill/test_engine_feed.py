"""Late submission: what the engine is given, and when."""

from collections.abc import Collection

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.prompt_queue import PromptQueue
from services.prefill.engine_feed import EngineFeed, HasRoom
from services.prefill.requests import HandOverFailed, HandOverReport, PrefillRequest
from tests.services.prefill.scripted import eventually


class FedEngine:
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


class Feed:
    """A queue, and what feeds one engine from it. Two chunks are 200 tokens."""

    def __init__(self, engine: FedEngine, policy: OrderingPolicy = OrderingPolicy.FCFS, batch: int = 16) -> None:
        self.queue: PromptQueue[PrefillRequest] = PromptQueue(policy, 100, 100, batch)
        self.has_room: HasRoom | None = None
        self._feed = EngineFeed(engine, self.queue, self._ask)  # type: ignore[arg-type]
        self.refused: list[PrefillRequest] = []

    def _ask(self, request: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        return self.has_room is None or self.has_room(request, computing)

    def add(self, number: int, token_count: int) -> PrefillRequest:
        """A request that waits."""
        key = EngineKey(f"r{number}", number)
        sent = EngineRequest(key, (1,) * token_count, 0, ResolvedParams(max_tokens=2, seed=0))
        request = PrefillRequest(Ownership(Owner(0, 1), "router"), sent, 1.0, self._reported)
        self.queue.hold(request)
        self.queue.release(request)
        return request

    def submit(self) -> None:
        self._feed.submit()

    def _reported(self, request: PrefillRequest, report: HandOverReport) -> None:
        """As the owner of the request does."""
        assert isinstance(report, HandOverFailed)
        self.refused.append(request)
        self.queue.remove(request)


async def test_the_engine_gets_two_chunks_of_work_and_the_rest_waits() -> None:
    engine = FedEngine()
    feed = Feed(engine)
    first, *_ = [feed.add(number, 80) for number in range(1, 6)]
    feed.submit()
    assert engine.submitted == ["r1", "r2", "r3"]
    feed.queue.advance(first, 80)
    feed.submit()
    assert engine.submitted == ["r1", "r2", "r3", "r4"]


async def test_without_blocks_the_head_stays_and_no_prompt_overtakes_it() -> None:
    engine = FedEngine(free_tokens=50)
    feed = Feed(engine)
    feed.add(1, 60)
    feed.add(2, 10)
    feed.submit()
    assert engine.submitted == []
    engine.free_tokens = 100
    await eventually(lambda: engine.submitted == ["r1", "r2"])


async def test_a_prompt_that_can_never_fit_fails_and_holds_no_other_up() -> None:
    engine = FedEngine(most_tokens=50)
    feed = Feed(engine)
    too_long = feed.add(1, 60)
    feed.add(2, 10)
    feed.submit()
    assert feed.refused == [too_long]
    assert engine.submitted == ["r2"]
    assert feed.queue.queued_tokens == 10


async def test_shortest_first_submits_by_length_within_each_scheduling_batch() -> None:
    engine = FedEngine()
    feed = Feed(engine, policy=OrderingPolicy.SJF, batch=3)
    for number, token_count in enumerate((30, 20, 10, 5, 4), start=1):
        feed.add(number, token_count)
    feed.submit()
    assert engine.submitted == ["r3", "r2", "r1", "r5", "r4"]


async def test_a_cancelled_prompt_leaves_its_batch_without_a_trace() -> None:
    engine = FedEngine(free_tokens=0)
    feed = Feed(engine, policy=OrderingPolicy.LJF)
    requests = [feed.add(number, 10 * number) for number in range(1, 4)]
    feed.submit()
    assert engine.submitted == []
    feed.queue.remove(requests[1])
    engine.free_tokens = 100
    feed.submit()
    assert engine.submitted == ["r3", "r1"]
    assert feed.queue.queued_tokens == 40


async def test_a_question_for_room_shows_what_is_being_computed_and_nothing_else() -> None:
    seen: list[list[str]] = []

    def has_room(asking: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        seen.append([entry.request_id for entry in computing])
        return True

    feed = Feed(FedEngine())
    feed.has_room = has_room
    requests = [feed.add(number, 50) for number in range(1, 4)]
    feed.submit()
    assert seen == [[], ["r1"], ["r1", "r2"]]
    feed.queue.advance(requests[0], 50)
    feed.queue.remove(requests[1])
    feed.add(4, 50)
    feed.submit()
    assert seen[3:] == [["r3"]]
