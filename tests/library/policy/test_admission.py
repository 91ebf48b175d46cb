"""Admission of landed requests."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy import admission
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.growth import BatchGrowth, BatchMember
from tests.library.policy import reference_admission
from tests.library.policy.reference_admission import DecodeSnapshot, LandedRequest, RunningRequest


def member(request: LandedRequest | RunningRequest, end: RangeEnd = RangeEnd.LOW) -> BatchMember:
    remaining = request.remaining.at(end) if request.remaining is not None else 0
    return BatchMember(request.context_tokens, remaining, request.held_blocks > 0)


def batch_of(running: Sequence[RunningRequest], block_tokens: int, end: RangeEnd = RangeEnd.LOW) -> BatchGrowth:
    batch = BatchGrowth(block_tokens)
    for number, request in enumerate(running):
        batch.add(number, member(request, end))
    return batch


def choose_admitted(
    policy: AdmissionPolicy, snapshot: DecodeSnapshot, end: RangeEnd = RangeEnd.LOW
) -> tuple[LandedRequest, ...]:
    """The requests that are admitted."""
    batch = batch_of(snapshot.running, snapshot.block_tokens, end)
    landed = (member(request, end) for request in snapshot.landed)
    seats = snapshot.max_batch - snapshot.running_requests
    count = admission.admitted_count(policy, batch, landed, seats, snapshot.free_blocks)
    assert len(batch) == len(snapshot.running), "the batch is as it was"
    return snapshot.landed[:count]


def kept_blocks(
    policy: AdmissionPolicy, running: Sequence[RunningRequest], block_tokens: int, end: RangeEnd = RangeEnd.LOW
) -> int:
    return admission.kept_blocks(policy, batch_of(running, block_tokens, end))


def snapshot(landed_count: int, running: int, max_batch: int) -> DecodeSnapshot:
    landed = tuple(LandedRequest(number, 10) for number in range(landed_count))
    return DecodeSnapshot(landed, running, max_batch, free_blocks=0, total_blocks=100)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_greedy_fills_every_seat_in_the_order_of_landing(landed: int, running: int, max_batch: int) -> None:
    admitted = choose_admitted(AdmissionPolicy.GREEDY, snapshot(landed, running, max_batch))
    assert [request.landing_number for request in admitted] == list(range(min(landed, max(0, max_batch - running))))


BLOCK_TOKENS = 4


def blocks(token_count: int) -> int:
    return -(-token_count // BLOCK_TOKENS)


def landed_request(number: int, context: int, remaining: TokenRange | None) -> LandedRequest:
    return LandedRequest(number, context, blocks(context + 1), remaining)


def snapshot_of(
    landed: Sequence[LandedRequest], running: Sequence[RunningRequest], free_blocks: int, max_batch: int = 100
) -> DecodeSnapshot:
    return DecodeSnapshot(tuple(landed), len(running), max_batch, free_blocks, 1000, BLOCK_TOKENS, tuple(running))


def running_request(context: int, remaining: TokenRange | None) -> RunningRequest:
    return RunningRequest(context, blocks(context + 1), remaining)


lengths = st.builds(lambda low, width: TokenRange(low, low + width), st.integers(1, 40), st.integers(1, 40))


@st.composite
def snapshots(draw: st.DrawFn, remaining: st.SearchStrategy[TokenRange | None]) -> DecodeSnapshot:
    landed = draw(st.lists(st.tuples(st.integers(1, 40), remaining), max_size=8))
    running = draw(st.lists(st.builds(running_request, st.integers(1, 40), remaining), max_size=8))
    requests = [landed_request(number, context, left) for number, (context, left) in enumerate(landed)]
    return snapshot_of(requests, running, draw(st.integers(0, 60)), draw(st.integers(1, 12)))


@given(snapshots(st.none() | lengths), st.sampled_from(AdmissionPolicy), st.sampled_from(RangeEnd))
def test_admission_follows_the_landings_fills_no_more_than_the_seats_and_never_leaves_a_batch_empty(
    snapshot: DecodeSnapshot, policy: AdmissionPolicy, end: RangeEnd
) -> None:
    admitted = choose_admitted(policy, snapshot, end)
    assert admitted == snapshot.landed[: len(admitted)]
    assert len(admitted) <= max(0, snapshot.max_batch - snapshot.running_requests)
    assert admitted or snapshot.running or not snapshot.landed


@given(snapshots(lengths), st.sampled_from(RangeEnd))
def test_static_admits_no_more_than_dynamic_and_dynamic_no_more_than_greedy(
    snapshot: DecodeSnapshot, end: RangeEnd
) -> None:
    static, dynamic, greedy = (
        len(choose_admitted(policy, snapshot, end))
        for policy in (AdmissionPolicy.RESERVE_STATIC, AdmissionPolicy.RESERVE_DYNAMIC, AdmissionPolicy.GREEDY)
    )
    assert static <= dynamic <= greedy


@given(snapshots(lengths))
def test_counting_on_the_high_end_admits_no_more_under_static(snapshot: DecodeSnapshot) -> None:
    low, high = (len(choose_admitted(AdmissionPolicy.RESERVE_STATIC, snapshot, end)) for end in RangeEnd)
    assert high <= low


@given(snapshots(st.none()), st.sampled_from(AdmissionPolicy), st.sampled_from(RangeEnd))
def test_with_nothing_predicted_every_policy_is_greedy(
    snapshot: DecodeSnapshot, policy: AdmissionPolicy, end: RangeEnd
) -> None:
    assert choose_admitted(policy, snapshot, end) == choose_admitted(AdmissionPolicy.GREEDY, snapshot)


def test_static_keeps_what_earlier_ones_have_not_grown_by_and_dynamic_only_until_the_first_ends() -> None:
    # Each holds 2 blocks of 4 tokens for 5; the first ends with 21 tokens (6 blocks), the next two with 9 (3 blocks).
    running = [running_request(5, TokenRange(16, 17))]
    landed = [landed_request(number, 5, TokenRange(4, 5)) for number in (1, 2)]

    def admitted(policy: AdmissionPolicy, free_blocks: int) -> int:
        return len(choose_admitted(policy, snapshot_of(landed, running, free_blocks)))

    assert [admitted(AdmissionPolicy.RESERVE_STATIC, free) for free in (4, 5, 6)] == [0, 1, 2]
    # After four steps each has 9 tokens and wants one block more.
    assert [admitted(AdmissionPolicy.RESERVE_DYNAMIC, free) for free in (1, 2, 3)] == [0, 1, 2]


def test_one_that_has_outlived_its_prediction_or_has_none_is_not_the_first_to_end() -> None:
    outlived = running_request(5, TokenRange(0, 9))
    landed = [landed_request(1, 5, TokenRange(8, 9))]
    for unknown in (outlived, running_request(5, None)):
        # Both grow from 5 to 13 tokens, by 2 blocks each, until the landed one ends.
        assert choose_admitted(AdmissionPolicy.RESERVE_DYNAMIC, snapshot_of(landed, [unknown], 3)) == ()
        assert len(choose_admitted(AdmissionPolicy.RESERVE_DYNAMIC, snapshot_of(landed, [unknown], 4))) == 1
        # Nothing is kept for it.
        assert len(choose_admitted(AdmissionPolicy.RESERVE_STATIC, snapshot_of(landed, [unknown], 2))) == 1


def test_a_preempted_one_counts_with_all_the_blocks_that_it_wants_back() -> None:
    preempted = RunningRequest(7, 0, TokenRange(1, 2))
    landed = [landed_request(1, 3, TokenRange(1, 2))]
    for policy in (AdmissionPolicy.RESERVE_STATIC, AdmissionPolicy.RESERVE_DYNAMIC):
        assert choose_admitted(policy, snapshot_of(landed, [preempted], 1)) == ()
        assert len(choose_admitted(policy, snapshot_of(landed, [preempted], 2))) == 1


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 30))
def test_with_exact_predictions_static_never_runs_short_of_blocks(
    requests: list[tuple[int, int]], spare_blocks: int
) -> None:
    left = {number: remaining for number, (_, remaining) in enumerate(requests)}
    context = {number: tokens for number, (tokens, _) in enumerate(requests)}
    held = {number: blocks(tokens + 1) for number, tokens in context.items()}
    # Room for any single one to end beside all others' prompts: the empty batch takes the first whatever it wants.
    free_blocks = max(blocks(context[number] + left[number]) - held[number] for number in left) + spare_blocks
    waiting, running = list(left), list[int]()

    def exact(number: int) -> TokenRange:
        return TokenRange(left[number], left[number] + 1)

    while waiting or running:
        snapshot = snapshot_of(
            [landed_request(number, context[number], exact(number)) for number in waiting],
            [RunningRequest(context[number], held[number], exact(number)) for number in running],
            free_blocks,
        )
        admitted = [request.landing_number for request in choose_admitted(AdmissionPolicy.RESERVE_STATIC, snapshot)]
        running += admitted
        waiting = waiting[len(admitted) :]
        for number in running:
            context[number] += 1
            left[number] -= 1
            # One that goes on holds the block of its next token.
            wanted = blocks(context[number] + min(1, left[number])) - held[number]
            if wanted > 0:
                held[number] += wanted
                free_blocks -= wanted
        assert free_blocks >= 0
        free_blocks += sum(held[number] for number in running if left[number] == 0)
        running = [number for number in running if left[number] > 0]


def test_blocks_are_kept_for_what_running_requests_are_predicted_to_grow_by() -> None:
    # 5 tokens in 2 blocks of 4, which become 21 tokens in 6 and 9 in 3.
    running = [running_request(5, TokenRange(16, 17)), running_request(5, TokenRange(4, 5))]
    assert {policy: kept_blocks(policy, running, BLOCK_TOKENS) for policy in AdmissionPolicy} == {
        AdmissionPolicy.GREEDY: 0,
        AdmissionPolicy.RESERVE_STATIC: 5,
        AdmissionPolicy.RESERVE_DYNAMIC: 2,
    }


@given(st.lists(st.integers(1, 40), max_size=8), st.sampled_from(AdmissionPolicy))
def test_nothing_is_kept_for_unknown_lengths(contexts: list[int], policy: AdmissionPolicy) -> None:
    assert kept_blocks(policy, [running_request(context, None) for context in contexts], BLOCK_TOKENS) == 0


def test_an_empty_batch_takes_the_first_although_it_is_predicted_to_outgrow_the_pool() -> None:
    landed = [landed_request(number, 5, TokenRange(400, 401)) for number in range(3)]
    for policy in (AdmissionPolicy.RESERVE_STATIC, AdmissionPolicy.RESERVE_DYNAMIC):
        assert choose_admitted(policy, snapshot_of(landed, [], 0)) == tuple(landed[:1])


def test_what_is_kept_depends_on_the_end_of_the_range_that_counts() -> None:
    # 5 tokens in 2 blocks of 4, which become 9 tokens in 3 or 21 in 6.
    running = [running_request(5, TokenRange(4, 17))]
    kept = [kept_blocks(AdmissionPolicy.RESERVE_STATIC, running, BLOCK_TOKENS, end) for end in RangeEnd]
    assert dict(zip(RangeEnd, kept, strict=True)) == {RangeEnd.LOW: 1, RangeEnd.HIGH: 4}


@st.composite
def mixed_snapshots(draw: st.DrawFn) -> DecodeSnapshot:
    """Predictions known and unknown, requests with their blocks and preempted ones, blocks of any size."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))

    def held(context: int) -> int:
        return -(-(context + 1) // block_tokens) if draw(st.integers(0, 3)) else 0

    contexts = st.lists(st.integers(1, 40), max_size=8)
    running = [RunningRequest(count, held(count), draw(st.none() | lengths)) for count in draw(contexts)]
    landed = [
        LandedRequest(number, count, held(count), draw(st.none() | lengths))
        for number, count in enumerate(draw(contexts))
    ]
    max_batch, free_blocks = draw(st.integers(1, 16)), draw(st.integers(0, 60))
    return DecodeSnapshot(tuple(landed), len(running), max_batch, free_blocks, 1000, block_tokens, tuple(running))


@settings(max_examples=500)
@given(mixed_snapshots(), st.sampled_from(AdmissionPolicy), st.sampled_from(RangeEnd))
def test_admission_and_what_is_kept_equal_the_plain_functions(
    snapshot: DecodeSnapshot, policy: AdmissionPolicy, end: RangeEnd
) -> None:
    assert choose_admitted(policy, snapshot, end) == reference_admission.choose_admitted(policy, snapshot, end)
    arguments = policy, snapshot.running, snapshot.block_tokens, end
    assert kept_blocks(*arguments) == reference_admission.kept_blocks(*arguments)
