"""Growth that is kept up to date through any life of a batch equals growth computed from all members."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.admission import AdmissionPolicy, admitted_count, kept_blocks
from kaveri.policy.growth import BatchGrowth, BatchMember
from tests.library.policy import reference_admission
from tests.library.policy.reference_admission import RunningRequest

_LENGTHS = st.none() | st.builds(
    lambda low, width: TokenRange(low, low + width), st.integers(1, 40), st.integers(1, 40)
)


@dataclass
class _GrowingRequest:
    context_tokens: int
    predicted: TokenRange | None
    drawn: int = 0
    has_blocks: bool = True

    @property
    def remaining(self) -> TokenRange | None:
        return self.predicted.after(self.drawn) if self.predicted is not None else None

    def member(self, end: RangeEnd) -> BatchMember:
        remaining = self.remaining
        return BatchMember(self.context_tokens, remaining.at(end) if remaining is not None else 0, self.has_blocks)

    def running(self, block_tokens: int) -> RunningRequest:
        held = -(-(self.context_tokens + 1) // block_tokens) if self.has_blocks else 0
        return RunningRequest(self.context_tokens, held, self.remaining)


class BatchLives(RuleBasedStateMachine):
    """A batch whose requests join, draw tokens, lose their blocks and leave."""

    @initialize(block_tokens=st.sampled_from([1, 2, 4, 16]), end=st.sampled_from(RangeEnd))
    def begin(self, block_tokens: int, end: RangeEnd) -> None:
        self.block_tokens = block_tokens
        self.end = end
        self.batch = BatchGrowth(block_tokens)
        self.requests: dict[int, _GrowingRequest] = {}
        self.numbers = 0

    @rule(context=st.integers(1, 40), predicted=_LENGTHS, has_blocks=st.booleans())
    def join(self, context: int, predicted: TokenRange | None, has_blocks: bool) -> None:
        self.numbers += 1
        request = _GrowingRequest(context, predicted, has_blocks=has_blocks)
        self.requests[self.numbers] = request
        self.batch.add(self.numbers, request.member(self.end))

    @rule(count=st.integers(1, 20))
    def all_draw(self, count: int) -> None:
        for _ in range(count):
            self._draw({number for number, request in self.requests.items() if request.has_blocks})

    @precondition(lambda self: all(request.has_blocks for request in self.requests.values()))
    @rule(count=st.integers(1, 40), data=st.data())
    def most_draw_in_a_run(self, count: int, data: st.DataObject) -> None:
        resting = data.draw(st.sets(st.integers(1, self.numbers + 1), max_size=3))
        self.batch.run(count, resting)
        for request in (request for number, request in self.requests.items() if number not in resting):
            request.context_tokens += count
            request.drawn += count

    @rule(data=st.data())
    def some_draw(self, data: st.DataObject) -> None:
        # Requests that have left, too: the engine may report them in the same step.
        self._draw(set(data.draw(st.lists(st.integers(1, self.numbers + 1), max_size=8))))

    @rule(data=st.data())
    def loses_its_blocks(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.numbers + 1))
        self.batch.preempt(number)
        if number in self.requests:
            self.requests[number].has_blocks = False

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.numbers + 1))
        self.batch.remove(number)
        self.requests.pop(number, None)

    @rule(landed=st.lists(st.integers(1, 40), max_size=3), free_blocks=st.integers(0, 30))
    def asks_for_admission(self, landed: list[int], free_blocks: int) -> None:
        members = [BatchMember(count, count) for count in landed]
        for policy in AdmissionPolicy:
            admitted_count(policy, self.batch, members, len(members), free_blocks)

    @invariant()
    def growth_is_that_of_all_members(self) -> None:
        running = [request.running(self.block_tokens) for request in self.requests.values()]
        assert len(self.batch) == len(running)
        for policy in AdmissionPolicy:
            wanted = reference_admission.kept_blocks(policy, running, self.block_tokens, self.end)
            assert kept_blocks(policy, self.batch) == wanted, policy

    def _draw(self, numbers: set[int]) -> None:
        self.batch.step(numbers)
        for number in numbers & self.requests.keys():
            request = self.requests[number]
            request.context_tokens += 1
            request.drawn += 1
            request.has_blocks = True


def test_a_request_that_is_preempted_for_one_step_ends_once() -> None:
    batch = BatchGrowth(block_tokens=1)
    batch.add(1, BatchMember(context_tokens=5, remaining_tokens=3))
    batch.add(2, BatchMember(context_tokens=5, remaining_tokens=9))
    batch.preempt(1)
    for _ in range(3):
        batch.step({1, 2})
    # Its end is known to be outlived: of the two, only the other one still wants blocks until its end.
    batch.remove(1)
    alone = BatchGrowth(block_tokens=1)
    alone.add(2, BatchMember(context_tokens=8, remaining_tokens=6))
    assert batch.until_all_end() == alone.until_all_end()
    assert batch.until_first_ends() == alone.until_first_ends()


def test_what_is_asked_again_and_again_takes_no_memory() -> None:
    batch = BatchGrowth(16)
    for number in range(4):
        batch.add(number, BatchMember(10, 50))
    for _ in range(2_000):
        admitted_count(AdmissionPolicy.RESERVE_STATIC, batch, [BatchMember(10, 70)] * 3, 3, 0)
    assert len(batch._ends) < 200


TestBatchLives = BatchLives.TestCase
TestBatchLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
