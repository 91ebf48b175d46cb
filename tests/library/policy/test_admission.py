from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.policy import admission
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.growth import BatchGrowth, BatchMember
from tests.library.policy import reference_admission

BLOCK_TOKENS = 4
STATIC, DYNAMIC, GREEDY = AdmissionPolicy.RESERVE_STATIC, AdmissionPolicy.RESERVE_DYNAMIC, AdmissionPolicy.GREEDY


def batch_of(running: Iterable[BatchMember], block_tokens: int = BLOCK_TOKENS) -> BatchGrowth:
    batch = BatchGrowth(block_tokens)
    for number, member in enumerate(running):
        batch.add(number, member)
    return batch


@dataclass(frozen=True)
class DecodeSnapshot:
    landed: Sequence[BatchMember]
    running: Sequence[BatchMember]
    free_blocks: int
    seats: int = 100
    block_tokens: int = BLOCK_TOKENS

    def admitted(self, policy: AdmissionPolicy) -> int:
        batch = batch_of(self.running, self.block_tokens)
        count = admission.admitted_count(policy, batch, iter(self.landed), self.seats, self.free_blocks)
        assert len(batch) == len(self.running), "the batch is as it was"
        return count


@st.composite
def snapshots(draw: st.DrawFn, remaining: st.SearchStrategy[int], holds_blocks: bool | None = None) -> DecodeSnapshot:
    """Strategy for batches. remaining: predicted tokens, 0: unknown. holds_blocks: None: mixed."""
    held = st.booleans() if holds_blocks is None else st.just(holds_blocks)
    members = st.lists(st.builds(BatchMember, st.integers(1, 40), remaining, held), max_size=8)
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    return DecodeSnapshot(
        draw(members), draw(members), draw(st.integers(0, 60)), draw(st.integers(-2, 12)), block_tokens
    )


lengths = st.integers(1, 80)


@given(snapshots(lengths))
def test_static_admits_no_more_than_dynamic_and_dynamic_no_more_than_greedy(snapshot: DecodeSnapshot) -> None:
    assert snapshot.admitted(STATIC) <= snapshot.admitted(DYNAMIC) <= snapshot.admitted(GREEDY)


@given(snapshots(st.just(0), holds_blocks=True), st.sampled_from(AdmissionPolicy))
def test_with_nothing_predicted_every_policy_is_greedy_and_keeps_nothing(
    snapshot: DecodeSnapshot, policy: AdmissionPolicy
) -> None:
    assert snapshot.admitted(policy) == min(len(snapshot.landed), max(0, snapshot.seats))
    assert admission.kept_blocks(policy, batch_of(snapshot.running)) == 0


def test_static_keeps_what_earlier_ones_have_not_grown_by_and_dynamic_only_until_the_first_ends() -> None:
    # Each holds 2 blocks of 4 tokens for 5; the first ends with 21 tokens (6 blocks), the next two with 9 (3 blocks).
    running, landed = [BatchMember(5, 16)], [BatchMember(5, 4)] * 2
    assert [DecodeSnapshot(landed, running, free).admitted(STATIC) for free in (4, 5, 6)] == [0, 1, 2]
    # After four steps each has 9 tokens and wants one block more.
    assert [DecodeSnapshot(landed, running, free).admitted(DYNAMIC) for free in (1, 2, 3)] == [0, 1, 2]


def test_a_request_without_a_prediction_is_not_the_first_to_end() -> None:
    landed, unknown = [BatchMember(5, 8)], [BatchMember(5)]
    # Both grow from 5 to 13 tokens, by 2 blocks each, until the landed one ends.
    assert [DecodeSnapshot(landed, unknown, free).admitted(DYNAMIC) for free in (3, 4)] == [0, 1]
    assert DecodeSnapshot(landed, unknown, 2).admitted(STATIC) == 1


def test_a_preempted_one_counts_with_all_the_blocks_that_it_wants_back() -> None:
    preempted, landed = [BatchMember(7, 1, holds_blocks=False)], [BatchMember(3, 1)]
    for policy in (STATIC, DYNAMIC):
        assert [DecodeSnapshot(landed, preempted, free).admitted(policy) for free in (1, 2)] == [0, 1]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 30))
def test_with_exact_predictions_static_never_runs_short_of_blocks(
    requests: list[tuple[int, int]], spare_blocks: int
) -> None:
    def blocks(token_count: int) -> int:
        return -(-token_count // BLOCK_TOKENS)

    waiting, running = [BatchMember(*request) for request in requests], list[BatchMember]()
    # Room for any one to end next to the prompts of all others: an empty batch always takes the first.
    free_blocks = spare_blocks + max(blocks(context + left) - blocks(context + 1) for context, left in requests)
    while waiting or running:
        admitted = DecodeSnapshot(waiting, running, free_blocks).admitted(STATIC)
        running += waiting[:admitted]
        waiting = waiting[admitted:]
        drawn = [BatchMember(context + 1, left - 1) for context, left, _ in running]
        # A request that goes on holds the block of its next token.
        held = [blocks(context + min(1, left)) for context, left, _ in drawn]
        free_blocks -= sum(
            max(0, now - blocks(before.context_tokens + 1)) for now, before in zip(held, running, strict=True)
        )
        assert free_blocks >= 0
        free_blocks += sum(
            blocks(before.context_tokens + 1)
            for member, before in zip(drawn, running, strict=True)
            if not member.remaining_tokens
        )
        running = [member for member in drawn if member.remaining_tokens]


def test_blocks_are_kept_for_what_running_requests_are_predicted_to_grow_by() -> None:
    # 5 tokens in 2 blocks of 4, which become 21 tokens in 6 and 9 in 3.
    batch = batch_of([BatchMember(5, 16), BatchMember(5, 4)])
    assert [admission.kept_blocks(policy, batch) for policy in (GREEDY, STATIC, DYNAMIC)] == [0, 5, 2]


def test_an_empty_batch_takes_the_first_although_it_is_predicted_to_outgrow_the_pool() -> None:
    for policy in (STATIC, DYNAMIC):
        assert DecodeSnapshot([BatchMember(5, 400)] * 3, [], 0).admitted(policy) == 1


@settings(max_examples=500)
@given(snapshots(st.just(0) | lengths), st.sampled_from(AdmissionPolicy))
def test_admission_and_what_is_kept_equal_the_plain_functions(
    snapshot: DecodeSnapshot, policy: AdmissionPolicy
) -> None:
    running, landed, block_tokens = snapshot.running, snapshot.landed, snapshot.block_tokens
    assert snapshot.admitted(policy) == reference_admission.admitted_count(
        policy, running, landed, snapshot.seats, snapshot.free_blocks, block_tokens
    )
    kept = admission.kept_blocks(policy, batch_of(running, block_tokens))
    assert kept == reference_admission.kept_blocks(policy, running, block_tokens)
