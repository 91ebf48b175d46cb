from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kaveri.policy.admission import AdmissionPolicy, admitted_count, kept_blocks
from kaveri.policy.growth import BatchGrowth, BatchMember
from tests.library.policy import reference_admission


class BatchLives(RuleBasedStateMachine):
    """State machine: requests join, sample tokens, lose their blocks and leave; compares with a recomputation."""

    @initialize(block_tokens=st.sampled_from([1, 2, 4, 16]))
    def begin(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.batch = BatchGrowth(block_tokens)
        self.members: dict[int, BatchMember] = {}
        self.numbers = 0

    @rule(member=st.builds(BatchMember, st.integers(1, 40), st.integers(0, 80), st.booleans()))
    def join(self, member: BatchMember) -> None:
        self.numbers += 1
        self.members[self.numbers] = member
        self.batch.add(self.numbers, member)

    @rule(count=st.integers(1, 20))
    def all_draw(self, count: int) -> None:
        for _ in range(count):
            self._draw({number for number, member in self.members.items() if member.holds_blocks})

    @precondition(lambda self: all(member.holds_blocks for member in self.members.values()))
    @rule(count=st.integers(1, 40), data=st.data())
    def most_draw_in_a_run(self, count: int, data: st.DataObject) -> None:
        resting = data.draw(st.sets(st.integers(1, self.numbers + 1), max_size=3))
        self.batch.run(count, resting)
        for number in self.members.keys() - resting:
            self._grow(number, count)

    @rule(data=st.data())
    def some_draw(self, data: st.DataObject) -> None:
        # Include requests that have left: the engine may report them in the same step.
        self._draw(set(data.draw(st.lists(st.integers(1, self.numbers + 1), max_size=8))))

    @rule(data=st.data())
    def loses_its_blocks(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.numbers + 1))
        self.batch.preempt(number)
        if number in self.members:
            self.members[number] = self.members[number]._replace(holds_blocks=False)

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.numbers + 1))
        self.batch.remove(number)
        self.members.pop(number, None)

    @rule(landed=st.lists(st.integers(1, 40), max_size=3), free_blocks=st.integers(0, 30))
    def asks_for_admission(self, landed: list[int], free_blocks: int) -> None:
        members = [BatchMember(count, count) for count in landed]
        for policy in AdmissionPolicy:
            admitted_count(policy, self.batch, members, len(members), free_blocks)

    @invariant()
    def growth_is_that_of_all_members(self) -> None:
        assert len(self.batch) == len(self.members)
        for policy in AdmissionPolicy:
            wanted = reference_admission.kept_blocks(policy, [*self.members.values()], self.block_tokens)
            assert kept_blocks(policy, self.batch) == wanted, policy

    def _draw(self, numbers: set[int]) -> None:
        self.batch.step(numbers)
        for number in numbers & self.members.keys():
            self._grow(number, 1)

    def _grow(self, number: int, count: int) -> None:
        context_tokens, remaining_tokens, _ = self.members[number]
        self.members[number] = BatchMember(context_tokens + count, max(0, remaining_tokens - count))


def test_a_request_that_is_preempted_for_one_step_ends_once() -> None:
    batch = BatchGrowth(block_tokens=1)
    batch.add(1, BatchMember(context_tokens=5, remaining_tokens=3))
    batch.add(2, BatchMember(context_tokens=5, remaining_tokens=9))
    batch.preempt(1)
    for _ in range(3):
        batch.step({1, 2})
    # This one has outlived its prediction: only the other still needs blocks until its end.
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
