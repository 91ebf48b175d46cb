from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy import admission
from kaveri.policy.admission import AdmissionPolicy, DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.policy.growth import BatchMember

SIZE = 16
STATIC = AdmissionPolicy.RESERVE_STATIC


def landed(batch: DecodeBatch, number: int, member: BatchMember) -> None:
    batch.expect(number, member, 0.0)
    batch.land(number)


def test_ready_requests_take_free_seats_in_the_order_of_their_landing() -> None:
    batch = DecodeBatch(AdmissionPolicy.GREEDY, SIZE, max_batch=2)
    for number in (3, 1, 2):
        landed(batch, number, BatchMember(10))
    assert batch.admissible(0) == (3, 1)
    batch.admit(3)
    assert batch.admissible(0) == (1,)
    batch.leave(1)
    assert batch.admissible(0) == (2,)
    batch.admit(2)
    assert (batch.running_count, batch.ready_count, batch.admissible(0)) == (2, 0, ())
    batch.leave(3)
    assert batch.running_count == 1


def test_a_resumed_request_takes_a_seat_before_those_that_landed_earlier() -> None:
    batch = DecodeBatch(AdmissionPolicy.GREEDY, SIZE, max_batch=1)
    for number in (1, 2, 3):
        batch.expect(number, BatchMember(10), 0.0)
    batch.land(1)
    batch.land(2)
    batch.land(3, first=True)
    assert batch.admissible(0) == (3,)


def test_blocks_are_kept_for_what_runs_else_for_the_first_that_will() -> None:
    batch = DecodeBatch(STATIC, SIZE, max_batch=4)
    assert batch.kept_blocks(0.0) == 0
    coming = BatchMember(SIZE, 5 * SIZE)
    assert batch.kept_blocks(0.0, coming) == 4
    batch.expect(1, BatchMember(SIZE, 2 * SIZE), 0.0)
    batch.expect(2, BatchMember(SIZE, 3 * SIZE), 1.0)
    assert batch.kept_blocks(1.0, coming) == 1
    assert batch.kept_blocks(admission.UNLANDED_KEEPS_S, coming) == 2, "a push that stands still keeps nothing"
    assert batch.kept_blocks(10.0, coming) == 4
    batch.land(2)
    assert batch.kept_blocks(10.0, coming) == 2
    batch.admit(2)
    assert batch.kept_blocks(10.0) == 2


def test_a_preempted_ready_request_wants_its_blocks_again() -> None:
    batch = DecodeBatch(STATIC, SIZE, max_batch=4)
    landed(batch, 1, BatchMember(SIZE, SIZE))
    assert batch.kept_blocks(0.0) == 0
    batch.preempt(1)
    assert batch.kept_blocks(0.0) == 2


def test_a_prediction_is_cut_to_what_may_be_generated() -> None:
    predicted = TokenRange(100, 201)
    assert expected_answer(None, 10, 50, 1000) is None
    assert expected_answer(predicted, 10, None, 1000) == predicted
    assert expected_answer(predicted, 10, 150, 1000) == TokenRange(100, 151)
    assert expected_answer(predicted, 950, 150, 1000) == TokenRange(50, 51)
    assert member_of(20, 4, predicted, RangeEnd.LOW) == BatchMember(20, 95)
    assert member_of(20, 4, predicted, RangeEnd.HIGH) == BatchMember(20, 195)
    assert member_of(20, 4, None, RangeEnd.HIGH) == BatchMember(20, 0)


events = st.lists(st.tuples(st.sampled_from(["expect", "land", "admit", "preempt", "leave"]), st.integers(1, 6)))


@given(st.sampled_from(AdmissionPolicy), events, st.integers(0, 20))
def test_counts_and_seats_hold_under_any_order_of_events(
    policy: AdmissionPolicy, events: list[tuple[str, int]], free_blocks: int
) -> None:
    batch = DecodeBatch(policy, SIZE, max_batch=3)
    phases: dict[int, str] = {}
    for event, number in events:
        phase = phases.get(number)
        if event == "expect" and phase is None:
            batch.expect(number, BatchMember(number * 7, number * 5), 0.0)
            phases[number] = "expected"
        elif event == "land" and phase == "expected":
            batch.land(number)
            phases[number] = "ready"
        elif event == "admit":
            for admitted in batch.admissible(free_blocks):
                assert phases[admitted] == "ready"
                batch.admit(admitted)
                phases[admitted] = "running"
        elif event == "preempt" and phase in ("ready", "running"):
            batch.preempt(number)
        elif event == "leave":
            batch.leave(number)
            phases.pop(number, None)
        counts = [list(phases.values()).count(name) for name in ("ready", "running")]
        assert [batch.ready_count, batch.running_count] == counts
        assert batch.running_count <= 3
        assert batch.kept_blocks(0.0) >= 0
        if batch.ready_count and not batch.running_count:
            assert batch.admissible(free_blocks)


@given(st.sampled_from(AdmissionPolicy), st.integers(0, 10), st.lists(st.integers(1, 60), max_size=5))
def test_shown_room_is_room_that_a_request_gets(policy: AdmissionPolicy, free: int, answers: list[int]) -> None:
    room = DecodeRoom(10, SIZE, DecodeBatch(policy, SIZE, max_batch=8))
    for number, answer in enumerate(answers, 1):
        landed(room.batch, number, BatchMember(SIZE, answer))
        room.batch.admit(number)
    now = FreeRoom(free, 0, room.batch.running_count)
    load = room.load(now, len(answers), 0.0)
    assert load.waiting_requests == 0
    if load.free_blocks:
        room.join("a", load.free_blocks, 1)
        assert room.next_to_ask(now, 0.0) == "a"
        room.leave_line("a")
    room.join("b", load.free_blocks + 1, 1)
    assert room.next_to_ask(now, 0.0) is None
    assert room.refusal(now, 0.0).role == "decode"


def test_blocks_of_requests_whose_end_is_not_known_yet_go_to_no_new_request() -> None:
    """Regression: new requests took them, and the request that ran next was preempted."""
    room = DecodeRoom(12, SIZE, DecodeBatch(AdmissionPolicy.RESERVE_STATIC, SIZE, max_batch=8))
    landed(room.batch, 1, BatchMember(SIZE, 1))
    room.batch.admit(1)
    landed(room.batch, 2, BatchMember(SIZE, 8 * SIZE))
    room.join("new", 4, 1)
    ended_in_the_engine = FreeRoom(free_blocks=10, quarantined_blocks=0, running_requests=0)
    assert room.next_to_ask(ended_in_the_engine, 0.0) is None
    assert room.load(ended_in_the_engine, 3, 0.0).free_blocks == 0
    room.batch.leave(1)
    # Seven blocks are reserved for the request that runs next.
    assert room.next_to_ask(ended_in_the_engine, 0.0) is None
    room.leave_line("new")
    room.join("small", 3, 1)
    assert room.next_to_ask(ended_in_the_engine, 0.0) == "small"
