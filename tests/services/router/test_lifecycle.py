"""A request's life on the router: what follows from each event, and what holds in any order of events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.errors import EngineBroke, EngineError, KaveriError, NoCapacity, Unavailable
from kaveri.policy.retry import Setback
from services.router.lifecycle import HAND_OVER_GRACE_S, step
from services.router.lifecycle_values import (
    NO_LIFE,
    Abort,
    Action,
    Append,
    Attempt,
    AwaitReport,
    CompleteAnswer,
    DecodeNamed,
    Decoding,
    Disown,
    Ended,
    Event,
    Finishing,
    FirstTokenReported,
    Follow,
    GivenUp,
    HandOverReported,
    InstanceLife,
    LeaveAttempt,
    Lost,
    NotFound,
    Placed,
    PrefillEnded,
    Prefilling,
    PrefillLeg,
    ReplicaForgone,
    ReplicaNamed,
    ResumeAnswered,
    ResumeAsked,
    Resuming,
    SeekingOwner,
    Sent,
    Sought,
    State,
    Stopped,
    Superseded,
    Tokens,
    TookOver,
    Unfollow,
    Unplaced,
)

PREFILL = InstanceLife("prefill-0", 1)
ONE, OTHER = InstanceLife("decode-0", 11), InstanceLife("decode-1", 12)
ATTEMPT = Attempt(1, PREFILL, 0, 20)
GONE = Unavailable("gone")
ONE_GONE = GivenUp(1, ONE, GONE, has_ended=False)


def run(*events: Event, state: State | None = None) -> tuple[State, list[Action]]:
    """The state after the events, and all actions; an attempt has begun."""
    now = Prefilling(ATTEMPT, 0) if state is None else state
    actions: list[Action] = []
    for event in events:
        now, more = step(now, event, 100.0)
        actions += more
    return now, actions


def appended(actions: list[Action]) -> list[int]:
    return [token_id for action in actions if isinstance(action, Append) for token_id in action.token_ids]


def tokens(source: InstanceLife, first_index: int, *token_ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(1, source, first_index, token_ids, (), finish)


FIRST = FirstTokenReported((7,))


def test_tokens_of_a_second_instance_are_not_put_behind_those_of_the_first() -> None:
    state, actions = run(
        DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8, 9), DecodeNamed(OTHER), tokens(OTHER, 1, 80, 90, 100)
    )
    assert appended(actions) == [7, 8, 9]
    assert isinstance(state, Lost)
    assert (state.next_index, state.decode, state.setback) == (3, ONE, Setback.LOST)
    assert actions[-1] == Abort(1, ONE)


def test_tokens_of_an_instance_that_is_not_named_yet_wait_for_its_placement() -> None:
    state, actions = run(tokens(ONE, 1, 8), tokens(OTHER, 1, 80), FIRST)
    assert appended(actions) == [7]
    state, actions = run(DecodeNamed(OTHER), state=state)
    assert appended(actions) == [80]
    assert state == Decoding(ATTEMPT, 2, OTHER, PrefillLeg.WORKING)
    assert actions[-1] == Follow(1, OTHER)


def test_tokens_that_overtake_a_second_placement_are_taken_and_those_of_the_place_that_was_left_are_dropped() -> None:
    state, actions = run(
        DecodeNamed(ONE), FIRST, tokens(OTHER, 1, 80, 90), DecodeNamed(OTHER), tokens(ONE, 1, 8), tokens(OTHER, 3, 100)
    )
    assert appended(actions) == [7, 80, 90, 100]
    assert state == Decoding(ATTEMPT, 4, OTHER, PrefillLeg.WORKING)


def test_what_a_former_instance_gives_up_is_nothing_to_an_attempt_that_has_moved() -> None:
    state, actions = run(
        DecodeNamed(ONE), DecodeNamed(OTHER), FIRST, tokens(ONE, 1, 80), GivenUp(1, ONE, GONE), tokens(OTHER, 1, 8)
    )
    assert appended(actions) == [7, 8]
    assert isinstance(state, Decoding)


def test_nothing_is_kept_of_what_an_instance_sends_that_the_attempt_has_left() -> None:
    state, actions = run(DecodeNamed(ONE), DecodeNamed(OTHER), tokens(ONE, 1, 8), GivenUp(1, ONE, GONE))
    assert isinstance(state, Placed)
    assert (state.decode, state.held.events) == (OTHER, ())
    assert actions == [Follow(1, ONE), Follow(1, OTHER)]


def test_an_end_that_overtakes_its_placement_is_taken_with_the_placement() -> None:
    state, actions = run(FIRST, tokens(ONE, 1, 8), GivenUp(1, ONE, GONE), DecodeNamed(ONE))
    assert appended(actions) == [7, 8]
    assert isinstance(state, Lost)
    assert state.next_index == 2
    assert not any(isinstance(action, Abort | Follow) for action in actions), "decode has ended it by itself"


def test_tokens_that_another_instance_draws_for_the_same_attempt_are_dropped_while_decode_draws() -> None:
    another_life = ONE._replace(incarnation=10)
    drawn = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(OTHER, 2, 80), tokens(another_life, 2, 90))
    assert appended(drawn[1]) == [7, 8]
    assert run(tokens(ONE, 2, 9), state=drawn[0])[1] == [Append((9,), (), None)]


def test_of_tokens_that_overlap_the_answer_only_the_new_ones_are_appended() -> None:
    _, actions = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(ONE, 1, 8, 9), tokens(ONE, 2, 9, 10, 11))
    assert appended(actions) == [7, 8, 9, 10, 11]


def test_what_gives_a_former_attempt_up_at_the_same_instance_is_nothing_to_the_present_one() -> None:
    second = replace(ATTEMPT, number=2)
    drawing = Decoding(second, 2, ONE, PrefillLeg.COMPLETE)
    for state in (drawing, Resuming(second, 2, ONE)):
        assert run(GivenUp(1, ONE, GONE), state=state) == (state, [])
    assert isinstance(run(GivenUp(2, ONE, GONE), state=drawing)[0], Lost)


def test_no_more_tokens_are_held_than_the_answer_may_have() -> None:
    state, _ = run(tokens(ONE, 1, *range(20)))
    assert isinstance(state, Prefilling)
    state, actions = run(tokens(ONE, 21, 1), state=state)
    assert isinstance(state, Lost)
    assert actions == [LeaveAttempt(), Abort(1, None)]


def test_who_has_announced_a_request_is_told_when_it_ends_before_its_placement_is_known() -> None:
    announced = tokens(ONE, 0)
    _, actions = run(announced, Stopped(FinishReason.CANCELLED))
    assert actions == [CompleteAnswer(), LeaveAttempt(), Disown(1, ONE)]
    state, _ = run(announced, DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8))
    assert isinstance(state, Decoding)
    assert state.next_index == 2


LAST = Attempt(1, PREFILL, 0, 3)
"""An attempt for an answer of three tokens."""


@pytest.mark.parametrize(
    ("loss", "actions"),
    [
        (ONE_GONE, [CompleteAnswer(), LeaveAttempt(), Abort(1, ONE)]),
        (GivenUp(1, ONE, GONE), [CompleteAnswer(), LeaveAttempt()]),
        (GivenUp(1, ONE, EngineError("raised")), [CompleteAnswer(), LeaveAttempt()]),
        (DecodeNamed(OTHER), [CompleteAnswer(), LeaveAttempt(), Abort(1, ONE)]),
    ],
)
@pytest.mark.parametrize("replica", [None, ReplicaLocation(*OTHER, 4)])
def test_an_answer_that_has_all_its_tokens_is_complete_when_its_end_is_lost(
    loss: Event, actions: list[Action], replica: ReplicaLocation | None
) -> None:
    taken = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8, 9), ReplicaNamed(1, ONE, replica), state=Prefilling(LAST, 0))
    assert isinstance(taken[0], Decoding)
    assert run(loss, state=taken[0]) == (Ended(FinishReason.LENGTH, LAST), actions)


def test_an_answer_that_its_client_has_whole_is_complete_where_nobody_has_the_request() -> None:
    state, actions = run(Sought(replace(LAST, first_index=3)), NotFound(), state=Unplaced(3))
    assert (state, actions) == (Ended(FinishReason.LENGTH, None), [CompleteAnswer()])


def test_a_gap_loses_the_attempt() -> None:
    state, actions = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(ONE, 3, 10))
    assert isinstance(state, Lost)
    assert "tokens 2 to 2 are missing" in str(state.error)
    assert appended(actions) == [7, 8]
    state, actions = run(DecodeNamed(ONE), FIRST, tokens(ONE, 2, 9))
    assert isinstance(state, Lost)
    assert appended(actions) == [7]


def test_tokens_of_a_former_attempt_are_disowned_unless_they_are_the_last() -> None:
    second = replace(ATTEMPT, number=2)
    lost = Lost(second, 0, GONE, Setback.LOST, None, PrefillLeg.WORKING)
    for state in (Prefilling(second, 0), lost, Decoding(second, 2, ONE, PrefillLeg.COMPLETE)):
        after, actions = run(tokens(ONE, 1, 8), state=state)
        assert (after, actions) == (state, [Disown(1, ONE)])
        assert run(tokens(ONE, 1, 8, finish=FinishReason.LENGTH), state=state) == (state, [])


def test_an_answer_whose_hand_over_is_not_reported_waits_for_the_report() -> None:
    state, actions = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8, finish=FinishReason.LENGTH))
    assert isinstance(state, Finishing)
    assert actions[-2:] == [Unfollow(), AwaitReport(100.0 + HAND_OVER_GRACE_S)]
    for last in (PrefillEnded(), PrefillEnded(GONE), Stopped(FinishReason.CANCELLED), Stopped(GONE)):
        ended, actions = run(HandOverReported(), last, state=state)
        assert ended == Ended(FinishReason.LENGTH, ATTEMPT)
        assert not any(isinstance(action, Abort) for action in actions)


@pytest.mark.parametrize(
    ("error", "was_reached", "setback", "aborts"),
    [
        (GONE, True, Setback.LOST, [Abort(1, None)]),
        (GONE, False, Setback.UNREACHED, []),
        (NoCapacity("prefill", 0.1), True, Setback.FULL, []),
    ],
)
def test_a_prefill_that_fails_before_it_has_named_a_place(
    error: KaveriError, was_reached: bool, setback: Setback, aborts: list[Action]
) -> None:
    state, actions = run(PrefillEnded(error, was_reached))
    assert isinstance(state, Lost)
    assert (state.setback, state.is_prefills_fault) == (setback, True)
    assert [action for action in actions if isinstance(action, Abort)] == aborts


def test_a_request_that_was_in_a_step_that_raised_is_a_suspect_from_then_on() -> None:
    state, _ = run(PrefillEnded(EngineBroke("raised", 5)))
    assert isinstance(state, Lost)
    assert (state.setback, state.attempt.suspect_until) == (Setback.BROKEN, 5)
    again = replace(ATTEMPT, number=2, suspect_until=5)
    # What another request has done says nothing of it.
    state, _ = run(Sent(again), PrefillEnded(EngineBroke("raised")), state=state)
    assert isinstance(state, Lost)
    assert state.attempt.suspect_until == 5
    state, _ = run(Sought(replace(again, number=3)), NotFound(), state=state)
    assert state == Unplaced(0, 5)


def test_a_decode_instance_whose_engine_raises_makes_its_request_a_suspect() -> None:
    state, _ = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), GivenUp(1, ONE, EngineBroke("raised", 3)))
    assert isinstance(state, Lost)
    assert (state.next_index, state.setback, state.attempt.suspect_until) == (2, Setback.BROKEN, 3)


def test_prefill_may_die_once_the_answer_has_a_token_of_decode_and_not_before() -> None:
    dies = PrefillEnded(GONE)
    assert isinstance(run(DecodeNamed(ONE), FIRST, dies)[0], Lost)
    assert isinstance(run(DecodeNamed(ONE), tokens(ONE, 1, 8), dies)[0], Lost), "its token is missing"
    state, _ = run(DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), dies)
    assert state == Decoding(ATTEMPT, 2, ONE, PrefillLeg.BROKEN)
    lost, _ = run(ONE_GONE, state=state)
    assert isinstance(lost, Lost)
    assert lost.is_prefills_fault
    lost, _ = run(DecodeNamed(ONE), FIRST, HandOverReported(), PrefillEnded(), ONE_GONE)
    assert isinstance(lost, Lost)
    assert not lost.is_prefills_fault


def test_a_prefill_that_ends_without_its_first_token_loses_the_attempt() -> None:
    """The tokens of decode waited for it until the deadline."""
    state, _ = run(DecodeNamed(ONE), HandOverReported(), tokens(ONE, 1, 8, 9), PrefillEnded())
    assert isinstance(state, Lost)
    assert "without its first token" in str(state.error)


def test_an_instance_of_both_phases_is_followed_from_the_start() -> None:
    both = replace(ATTEMPT, prefill=ONE)
    state, actions = run(Sent(both, ONE), state=Unplaced())
    assert (state, actions) == (Placed(both, 0, ONE), [Follow(1, ONE, is_there=False)])
    lost, _ = run(FIRST, HandOverReported(), ONE_GONE, state=state)
    assert isinstance(lost, Lost)
    assert lost.is_prefills_fault


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (Unplaced(), DecodeNamed(ONE)),
        (Unplaced(), PrefillEnded()),
        (Unplaced(), TookOver(ATTEMPT)),
        (Prefilling(ATTEMPT, 0), Sought(ATTEMPT)),
        (Prefilling(ATTEMPT, 0), NotFound()),
        (Prefilling(ATTEMPT, 0), Sent(ATTEMPT)),
        (Ended(FinishReason.LENGTH, ATTEMPT), FIRST),
    ],
)
def test_an_impossible_pair_is_an_assertion_that_names_both(state: State, event: Event) -> None:
    with pytest.raises(AssertionError, match=f"{type(event).__name__} is impossible in {type(state).__name__}"):
        step(state, event, 0.0)


MOST_TOKENS = 8
DECODES = [InstanceLife("decode-0", 1), InstanceLife("decode-0", 2), InstanceLife("decode-1", 1)]
FINISHES = st.sampled_from([None, None, None, FinishReason.LENGTH, FinishReason.STOP])


def token_of(attempt: int, source: InstanceLife, index: int) -> Any:
    """A token that says who drew it."""
    return attempt, source, index


class AnyOrder(RuleBasedStateMachine):
    """Peers send what they like, in any order; the service sends what is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State = Unplaced()
        self.answer: list[Any] = []
        self.number = 0
        self.named: list[InstanceLife] = []
        """The places of this attempt, in order."""
        self.followed: InstanceLife | None = None
        self.ended_at: int | None = None
        self.flushed = 0
        self.unaborted: list[Abort] = []
        """Of former instances, which the holder of the replica keeps waiting."""

    def take(self, event: Event) -> None:
        before = self.state
        self.state, actions = step(before, event, 1.0)
        for action in actions:
            match action:
                case Append(token_ids, logprobs, _):
                    assert not logprobs or len(logprobs) == len(token_ids)
                    self.answer += token_ids
                case CompleteAnswer():
                    self.flushed += 1
                case Follow(number, decode, _):
                    assert number == self.number
                    self.followed = decode
                case Unfollow() | LeaveAttempt():
                    self.followed = None
                case Abort() if action in self.unaborted:
                    self.unaborted.remove(action)
                case Abort(number, decode):
                    assert number == self.number
                    assert decode is None or decode in self.named
                case Disown(number, source):
                    assert number < self.number or (isinstance(before, Prefilling) and source not in self.named)
                case AwaitReport(until_s):
                    assert until_s > 1.0
        if isinstance(self.state, Lost) and not isinstance(before, Lost):
            self.unaborted += self.state.withheld
        if isinstance(before, Ended):
            assert (self.state, actions) == (before, ())
        if isinstance(self.state, Ended) and not isinstance(before, Ended):
            self.ended_at = len(self.answer)

    # Peers.

    @rule(
        back=st.integers(0, 2),
        source=st.sampled_from(DECODES),
        first_index=st.integers(0, MOST_TOKENS),
        count=st.integers(0, 3),
        finish=FINISHES,
        with_logprobs=st.booleans(),
    )
    def tokens(
        self,
        back: int,
        source: InstanceLife,
        first_index: int,
        count: int,
        finish: FinishReason | None,
        with_logprobs: bool,
    ) -> None:
        number = max(1, self.number - back)
        batch = [token_of(number, source, first_index + offset) for offset in range(count)]
        self.take(Tokens(number, source, first_index, batch, batch if with_logprobs else (), finish))

    @rule(source=st.sampled_from(DECODES), count=st.integers(1, 3), finish=FINISHES)
    def tokens_that_follow(self, source: InstanceLife, count: int, finish: FinishReason | None) -> None:
        self.tokens(0, source, max(1, len(self.answer)), count, finish, True)

    @rule(back=st.integers(0, 1), source=st.sampled_from(DECODES))
    def given_up(self, back: int, source: InstanceLife) -> None:
        self.take(GivenUp(max(1, self.number - back), source, GONE))

    @rule(back=st.integers(0, 1), source=st.sampled_from(DECODES), holder=st.sampled_from([None, *DECODES]))
    def replica_named(self, back: int, source: InstanceLife, holder: InstanceLife | None) -> None:
        replica = None if holder is None else ReplicaLocation(*holder, 4)
        self.take(ReplicaNamed(max(1, self.number - back), source, replica))

    @precondition(lambda self: self.reads_prefill)
    @rule(decode=st.sampled_from(DECODES))
    def place_named(self, decode: InstanceLife) -> None:
        self.named.append(decode)
        self.take(DecodeNamed(decode))

    @precondition(lambda self: self.reads_prefill)
    @rule(finish=FINISHES)
    def first_token(self, finish: FinishReason | None) -> None:
        assert not isinstance(self.state, Unplaced)
        first_index = getattr(self.state, "attempt", ATTEMPT).first_index
        self.take(FirstTokenReported((token_of(self.number, PREFILL, first_index),), (), finish))

    @precondition(lambda self: self.reads_prefill)
    @rule()
    def handed_over(self) -> None:
        self.take(HandOverReported())

    @precondition(lambda self: self.reads_prefill)
    @rule(error=st.sampled_from([None, GONE, NoCapacity("prefill", 0.1)]), was_reached=st.booleans())
    def prefill_ended(self, error: KaveriError | None, was_reached: bool) -> None:
        self.take(PrefillEnded(error, was_reached or error is not GONE))

    # The service.

    @precondition(lambda self: isinstance(self.state, Unplaced) and not self.number)
    @rule(received=st.sampled_from([0, 1, 3, MOST_TOKENS]))
    def client_has_tokens_of_an_earlier_session(self, received: int) -> None:
        self.answer = [token_of(0, PREFILL, index) for index in range(received)]
        self.state = Unplaced(received)
        self.sought()

    @precondition(lambda self: isinstance(self.state, Unplaced | Lost))
    @rule()
    def sought(self) -> None:
        self.number += 1
        self.named = []
        self.take(Sought(Attempt(self.number, PREFILL, len(self.answer), MOST_TOKENS)))

    @precondition(lambda self: isinstance(self.state, SeekingOwner))
    @rule()
    def not_found(self) -> None:
        self.take(NotFound())

    @precondition(lambda self: isinstance(self.state, SeekingOwner))
    @rule(decode=st.sampled_from([None, *DECODES]), missing=st.integers(0, 2), earlier=st.integers(0, 2))
    def took_over(self, decode: InstanceLife | None, missing: int, earlier: int) -> None:
        self.named = [] if decode is None else [decode]
        has = len(self.answer)
        first_index = has + missing if missing else max(0, has - earlier)
        tokens = [token_of(self.number, PREFILL, has + offset) for offset in range(missing)]
        attempt = Attempt(self.number, PREFILL, first_index, MOST_TOKENS, taken_over=decode is None)
        self.take(TookOver(attempt, tokens, decode))

    @precondition(lambda self: self.number > 1)
    @rule()
    def superseded(self) -> None:
        """A later session goes on where this one was: nothing is aborted."""
        before = self.state
        self.state, actions = step(before, Superseded(GONE), 1.0)
        assert isinstance(self.state, Ended)
        assert set(map(type, actions)) <= {LeaveAttempt}
        if not isinstance(before, Ended):
            self.ended_at, self.followed = len(self.answer), None
        self.unaborted = []

    @precondition(lambda self: isinstance(self.state, Unplaced | Lost))
    @rule(both=st.booleans())
    def sent(self, both: bool) -> None:
        self.number += 1
        decode = DECODES[0] if both else None
        self.named = [] if decode is None else [decode]
        self.take(Sent(Attempt(self.number, decode or PREFILL, len(self.answer), MOST_TOKENS), decode))

    @precondition(lambda self: isinstance(self.state, Unplaced | Lost))
    @rule(holder=st.sampled_from(DECODES))
    def resume_asked(self, holder: InstanceLife) -> None:
        self.number += 1
        self.named = [holder]
        self.take(ResumeAsked(Attempt(self.number, NO_LIFE, len(self.answer), MOST_TOKENS), holder))

    @precondition(lambda self: self.awaits_holder)
    @rule()
    def resumed(self) -> None:
        self.take(ResumeAnswered())

    @precondition(lambda self: self.awaits_holder)
    @rule(may_have_begun=st.booleans())
    def resume_refused(self, may_have_begun: bool) -> None:
        self.take(ResumeAnswered(GONE, may_have_begun))

    @precondition(lambda self: isinstance(self.state, Lost))
    @rule()
    def replica_forgone(self) -> None:
        self.take(ReplicaForgone())

    @precondition(lambda self: self.followed is not None)
    @rule()
    def place_lost(self) -> None:
        assert self.followed is not None
        self.take(GivenUp(self.number, self.followed, GONE, has_ended=False))

    @precondition(
        lambda self: isinstance(self.state, SeekingOwner | Prefilling | Placed | Decoding | Lost) and self.answer
    )
    @rule()
    def text_stopped(self) -> None:
        self.take(Stopped(FinishReason.STOP))

    @precondition(lambda self: self.number > 2)
    @rule(event=st.sampled_from([Stopped(FinishReason.CANCELLED), Stopped(GONE)]))
    def ends_early(self, event: Event) -> None:
        self.take(event)

    @property
    def awaits_holder(self) -> bool:
        """Whether the answer of a holder may come."""
        match self.state:
            case Resuming() | Decoding(Attempt(_, InstanceLife("", 0))):
                return True
            case _:
                return False

    @property
    def reads_prefill(self) -> bool:
        """Whether the service reads a prefill stream."""
        match self.state:
            case Prefilling() | Finishing():
                return True
            case Placed(_, _, _, leg) | Decoding(_, _, _, leg):
                return leg in (PrefillLeg.WORKING, PrefillLeg.HANDED_OVER)
            case _:
                return False

    @invariant()
    def every_token_has_its_index(self) -> None:
        assert [index for _, _, index in self.answer] == list(range(len(self.answer)))
        if isinstance(self.state, SeekingOwner | Prefilling | Placed | Resuming | Decoding | Lost | Unplaced):
            assert self.state.next_index == len(self.answer)

    @invariant()
    def an_answer_with_all_its_tokens_is_never_placed_again(self) -> None:
        if isinstance(self.state, Unplaced | Lost):
            assert len(self.answer) < MOST_TOKENS

    @invariant()
    def an_attempt_has_tokens_of_one_decode_instance_that_was_named(self) -> None:
        for number in range(self.number + 1):
            sources = {source for attempt, source, _ in self.answer if attempt == number and source != PREFILL}
            assert len(sources) <= 1
            if number == self.number:
                assert sources <= set(self.named)

    @invariant()
    def the_place_is_followed(self) -> None:
        decode = self.state.decode if isinstance(self.state, Placed | Resuming | Decoding) else None
        assert self.followed == decode

    @invariant()
    def the_former_instance_is_told_to_end_it_unless_the_holder_is_still_to_answer(self) -> None:
        waiting = self.state.withheld if isinstance(self.state, Lost | Resuming) else ()
        assert self.unaborted == list(waiting)

    @invariant()
    def what_is_held_is_bounded_and_of_no_place_that_was_left(self) -> None:
        if isinstance(self.state, SeekingOwner | Prefilling | Placed):
            held = self.state.held
            events = [event for event in held.events if not isinstance(event, ReplicaNamed)]
            weights = [len(event.token_ids) if isinstance(event, Tokens) else 1 for event in events]
            assert sum(weights) == held.token_count
            # While its owner is sought each instance may send a whole answer.
            sources = [event.source for event in events]
            for source in set(sources):
                assert sum(w for w, of in zip(weights, sources, strict=True) if of == source) <= MOST_TOKENS
            named = [event.source for event in held.events if isinstance(event, ReplicaNamed)]
            assert len(set(named)) == len(named) <= MOST_TOKENS
            if isinstance(self.state, Placed):
                assert not {event.source for event in held.events} & set(self.state.left)
                assert self.state.decode not in self.state.left

    @invariant()
    def an_ended_request_takes_nothing_more_and_releases_its_text_once(self) -> None:
        if self.ended_at is not None:
            assert isinstance(self.state, Ended)
            assert len(self.answer) == self.ended_at
        assert self.flushed <= 1


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_any_order_of_events = AnyOrder.TestCase
