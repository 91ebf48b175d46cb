"""The state machine of a request on the router: each transition, and invariants in any order of events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.errors import EngineBroke, EngineError, KaveriError, NoCapacity, Unavailable
from kaveri.lives import request_values as lives
from kaveri.lives.request import HAND_OVER_GRACE_S, step
from kaveri.policy.retry import Setback

PREFILL = lives.InstanceLife("prefill-0", 1)
ONE, OTHER = lives.InstanceLife("decode-0", 11), lives.InstanceLife("decode-1", 12)
ATTEMPT = lives.Attempt(1, PREFILL, 0, 20)
GONE = Unavailable("gone")
ONE_GONE = lives.GivenUp(1, ONE, GONE, has_ended=False)


def run(*events: lives.Event, state: lives.State | None = None) -> tuple[lives.State, list[lives.Action]]:
    """Apply the events; return the state and all actions. Default state: an attempt has begun."""
    now = lives.Prefilling(ATTEMPT, 0) if state is None else state
    actions: list[lives.Action] = []
    for event in events:
        now, more = step(now, event, 100.0)
        actions += more
    return now, actions


def appended(actions: list[lives.Action]) -> list[int]:
    return [token_id for action in actions if isinstance(action, lives.Append) for token_id in action.token_ids]


def tokens(
    source: lives.InstanceLife, first_index: int, *token_ids: int, finish: FinishReason | None = None
) -> lives.TokensReceived:
    return lives.TokensReceived(1, source, first_index, token_ids, (), finish)


FIRST = lives.FirstTokenReported((7,))


def test_tokens_of_a_second_instance_are_not_put_behind_those_of_the_first() -> None:
    state, actions = run(
        lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8, 9), lives.DecodeNamed(OTHER), tokens(OTHER, 1, 80, 90, 100)
    )
    assert appended(actions) == [7, 8, 9]
    assert isinstance(state, lives.Lost)
    assert (state.next_index, state.decode, state.setback) == (3, ONE, Setback.LOST)
    assert actions[-1] == lives.Abort(1, ONE)


def test_tokens_of_an_instance_that_is_not_named_yet_wait_for_its_placement() -> None:
    state, actions = run(tokens(ONE, 1, 8), tokens(OTHER, 1, 80), FIRST)
    assert appended(actions) == [7]
    state, actions = run(lives.DecodeNamed(OTHER), state=state)
    assert appended(actions) == [80]
    assert state == lives.Decoding(ATTEMPT, 2, OTHER, lives.PrefillLeg.WORKING)
    assert actions[-1] == lives.Follow(1, OTHER)


def test_tokens_that_overtake_a_second_placement_are_taken_and_those_of_the_place_that_was_left_are_dropped() -> None:
    state, actions = run(
        lives.DecodeNamed(ONE),
        FIRST,
        tokens(OTHER, 1, 80, 90),
        lives.DecodeNamed(OTHER),
        tokens(ONE, 1, 8),
        tokens(OTHER, 3, 100),
    )
    assert appended(actions) == [7, 80, 90, 100]
    assert state == lives.Decoding(ATTEMPT, 4, OTHER, lives.PrefillLeg.WORKING)


def test_what_a_former_instance_gives_up_is_nothing_to_an_attempt_that_has_moved() -> None:
    state, actions = run(
        lives.DecodeNamed(ONE),
        lives.DecodeNamed(OTHER),
        FIRST,
        tokens(ONE, 1, 80),
        lives.GivenUp(1, ONE, GONE),
        tokens(OTHER, 1, 8),
    )
    assert appended(actions) == [7, 8]
    assert isinstance(state, lives.Decoding)


def test_nothing_is_kept_of_what_an_instance_sends_that_the_attempt_has_left() -> None:
    state, actions = run(
        lives.DecodeNamed(ONE), lives.DecodeNamed(OTHER), tokens(ONE, 1, 8), lives.GivenUp(1, ONE, GONE)
    )
    assert isinstance(state, lives.Placed)
    assert (state.decode, state.held.events) == (OTHER, ())
    assert actions == [lives.Follow(1, ONE), lives.Follow(1, OTHER)]


def test_an_end_that_overtakes_its_placement_is_taken_with_the_placement() -> None:
    state, actions = run(FIRST, tokens(ONE, 1, 8), lives.GivenUp(1, ONE, GONE), lives.DecodeNamed(ONE))
    assert appended(actions) == [7, 8]
    assert isinstance(state, lives.Lost)
    assert state.next_index == 2
    assert not any(isinstance(action, lives.Abort | lives.Follow) for action in actions), (
        "decode has ended it by itself"
    )


def test_tokens_that_another_instance_draws_for_the_same_attempt_are_dropped_while_decode_draws() -> None:
    another_life = ONE._replace(incarnation=10)
    drawn = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(OTHER, 2, 80), tokens(another_life, 2, 90))
    assert appended(drawn[1]) == [7, 8]
    assert run(tokens(ONE, 2, 9), state=drawn[0])[1] == [lives.Append((9,), (), None)]


def test_of_tokens_that_overlap_the_answer_only_the_new_ones_are_appended() -> None:
    _, actions = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(ONE, 1, 8, 9), tokens(ONE, 2, 9, 10, 11))
    assert appended(actions) == [7, 8, 9, 10, 11]


def test_what_gives_a_former_attempt_up_at_the_same_instance_is_nothing_to_the_present_one() -> None:
    second = replace(ATTEMPT, number=2)
    drawing = lives.Decoding(second, 2, ONE, lives.PrefillLeg.COMPLETE)
    for state in (drawing, lives.Resuming(second, 2, ONE)):
        assert run(lives.GivenUp(1, ONE, GONE), state=state) == (state, [])
    assert isinstance(run(lives.GivenUp(2, ONE, GONE), state=drawing)[0], lives.Lost)


def test_no_more_tokens_are_held_than_the_answer_may_have() -> None:
    state, _ = run(tokens(ONE, 1, *range(20)))
    assert isinstance(state, lives.Prefilling)
    state, actions = run(tokens(ONE, 21, 1), state=state)
    assert isinstance(state, lives.Lost)
    assert actions == [lives.LeaveAttempt(), lives.Abort(1, None)]


def test_who_has_announced_a_request_is_told_when_it_ends_before_its_placement_is_known() -> None:
    announced = tokens(ONE, 0)
    _, actions = run(announced, lives.EndRequested(FinishReason.CANCELLED))
    assert actions == [lives.CompleteAnswer(), lives.LeaveAttempt(), lives.Disown(1, ONE)]
    state, _ = run(announced, lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8))
    assert isinstance(state, lives.Decoding)
    assert state.next_index == 2


LAST = lives.Attempt(1, PREFILL, 0, 3)


@pytest.mark.parametrize(
    ("loss", "actions"),
    [
        (ONE_GONE, [lives.CompleteAnswer(), lives.LeaveAttempt(), lives.Abort(1, ONE)]),
        (lives.GivenUp(1, ONE, GONE), [lives.CompleteAnswer(), lives.LeaveAttempt()]),
        (lives.GivenUp(1, ONE, EngineError("raised")), [lives.CompleteAnswer(), lives.LeaveAttempt()]),
        (lives.DecodeNamed(OTHER), [lives.CompleteAnswer(), lives.LeaveAttempt(), lives.Abort(1, ONE)]),
    ],
)
@pytest.mark.parametrize("replica", [None, ReplicaLocation(*OTHER, 4)])
def test_an_answer_that_has_all_its_tokens_is_complete_when_its_end_is_lost(
    loss: lives.Event, actions: list[lives.Action], replica: ReplicaLocation | None
) -> None:
    taken = run(
        lives.DecodeNamed(ONE),
        FIRST,
        tokens(ONE, 1, 8, 9),
        lives.ReplicaNamed(1, ONE, replica),
        state=lives.Prefilling(LAST, 0),
    )
    assert isinstance(taken[0], lives.Decoding)
    assert run(loss, state=taken[0]) == (lives.Ended(FinishReason.LENGTH, LAST), actions)


def test_an_answer_that_its_client_has_whole_is_complete_where_nobody_has_the_request() -> None:
    state, actions = run(lives.Sought(replace(LAST, first_index=3)), lives.NotFound(), state=lives.Unplaced(3))
    assert (state, actions) == (lives.Ended(FinishReason.LENGTH, None), [lives.CompleteAnswer()])


def test_a_gap_loses_the_attempt() -> None:
    state, actions = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), tokens(ONE, 3, 10))
    assert isinstance(state, lives.Lost)
    assert "tokens 2 to 2 are missing" in str(state.error)
    assert appended(actions) == [7, 8]
    state, actions = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 2, 9))
    assert isinstance(state, lives.Lost)
    assert appended(actions) == [7]


def test_tokens_of_a_former_attempt_are_disowned_unless_they_are_the_last() -> None:
    second = replace(ATTEMPT, number=2)
    lost = lives.Lost(second, 0, GONE, Setback.LOST, None, lives.PrefillLeg.WORKING)
    for state in (lives.Prefilling(second, 0), lost, lives.Decoding(second, 2, ONE, lives.PrefillLeg.COMPLETE)):
        after, actions = run(tokens(ONE, 1, 8), state=state)
        assert (after, actions) == (state, [lives.Disown(1, ONE)])
        assert run(tokens(ONE, 1, 8, finish=FinishReason.LENGTH), state=state) == (state, [])


def test_an_answer_whose_hand_over_is_not_reported_waits_for_the_report() -> None:
    state, actions = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8, finish=FinishReason.LENGTH))
    assert isinstance(state, lives.Finishing)
    assert actions[-2:] == [lives.Unfollow(), lives.AwaitReport(100.0 + HAND_OVER_GRACE_S)]
    for last in (
        lives.PrefillEnded(),
        lives.PrefillEnded(GONE),
        lives.EndRequested(FinishReason.CANCELLED),
        lives.EndRequested(GONE),
    ):
        ended, actions = run(lives.HandOverReported(), last, state=state)
        assert ended == lives.Ended(FinishReason.LENGTH, ATTEMPT)
        assert not any(isinstance(action, lives.Abort) for action in actions)


@pytest.mark.parametrize(
    ("error", "was_reached", "setback", "aborts"),
    [
        (GONE, True, Setback.LOST, [lives.Abort(1, None)]),
        (GONE, False, Setback.UNREACHED, []),
        (NoCapacity("prefill", 0.1), True, Setback.FULL, []),
    ],
)
def test_a_prefill_that_fails_before_it_has_named_a_place(
    error: KaveriError, was_reached: bool, setback: Setback, aborts: list[lives.Action]
) -> None:
    state, actions = run(lives.PrefillEnded(error, was_reached))
    assert isinstance(state, lives.Lost)
    assert (state.setback, state.is_prefills_fault) == (setback, True)
    assert [action for action in actions if isinstance(action, lives.Abort)] == aborts


def test_a_request_that_was_in_a_step_that_raised_is_a_suspect_from_then_on() -> None:
    state, _ = run(lives.PrefillEnded(EngineBroke("raised", 5)))
    assert isinstance(state, lives.Lost)
    assert (state.setback, state.attempt.suspect_until) == (Setback.BROKEN, 5)
    again = replace(ATTEMPT, number=2, suspect_until=5)
    # A fault after another request's progress must not raise this one's suspicion.
    state, _ = run(lives.Sent(again), lives.PrefillEnded(EngineBroke("raised")), state=state)
    assert isinstance(state, lives.Lost)
    assert state.attempt.suspect_until == 5
    state, _ = run(lives.Sought(replace(again, number=3)), lives.NotFound(), state=state)
    assert state == lives.Unplaced(0, 5)


def test_a_decode_instance_whose_engine_raises_makes_its_request_a_suspect() -> None:
    state, _ = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), lives.GivenUp(1, ONE, EngineBroke("raised", 3)))
    assert isinstance(state, lives.Lost)
    assert (state.next_index, state.setback, state.attempt.suspect_until) == (2, Setback.BROKEN, 3)


def test_prefill_may_die_once_the_answer_has_a_token_of_decode_and_not_before() -> None:
    dies = lives.PrefillEnded(GONE)
    assert isinstance(run(lives.DecodeNamed(ONE), FIRST, dies)[0], lives.Lost)
    assert isinstance(run(lives.DecodeNamed(ONE), tokens(ONE, 1, 8), dies)[0], lives.Lost), "its token is missing"
    state, _ = run(lives.DecodeNamed(ONE), FIRST, tokens(ONE, 1, 8), dies)
    assert state == lives.Decoding(ATTEMPT, 2, ONE, lives.PrefillLeg.BROKEN)
    lost, _ = run(ONE_GONE, state=state)
    assert isinstance(lost, lives.Lost)
    assert lost.is_prefills_fault
    lost, _ = run(lives.DecodeNamed(ONE), FIRST, lives.HandOverReported(), lives.PrefillEnded(), ONE_GONE)
    assert isinstance(lost, lives.Lost)
    assert not lost.is_prefills_fault


def test_a_prefill_that_ends_without_its_first_token_loses_the_attempt() -> None:
    state, _ = run(lives.DecodeNamed(ONE), lives.HandOverReported(), tokens(ONE, 1, 8, 9), lives.PrefillEnded())
    assert isinstance(state, lives.Lost)
    assert "without its first token" in str(state.error)


def test_an_instance_of_both_phases_is_followed_from_the_start() -> None:
    both = replace(ATTEMPT, prefill=ONE)
    state, actions = run(lives.Sent(both, ONE), state=lives.Unplaced())
    assert (state, actions) == (lives.Placed(both, 0, ONE), [lives.Follow(1, ONE, is_there=False)])
    lost, _ = run(FIRST, lives.HandOverReported(), ONE_GONE, state=state)
    assert isinstance(lost, lives.Lost)
    assert lost.is_prefills_fault


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (lives.Unplaced(), lives.DecodeNamed(ONE)),
        (lives.Unplaced(), lives.PrefillEnded()),
        (lives.Unplaced(), lives.TookOver(ATTEMPT)),
        (lives.Prefilling(ATTEMPT, 0), lives.Sought(ATTEMPT)),
        (lives.Prefilling(ATTEMPT, 0), lives.NotFound()),
        (lives.Prefilling(ATTEMPT, 0), lives.Sent(ATTEMPT)),
        (lives.Ended(FinishReason.LENGTH, ATTEMPT), FIRST),
    ],
)
def test_an_impossible_pair_is_an_assertion_that_names_both(state: lives.State, event: lives.Event) -> None:
    with pytest.raises(AssertionError, match=f"{type(event).__name__} is impossible in {type(state).__name__}"):
        step(state, event, 0.0)


MOST_TOKENS = 8
DECODES = [lives.InstanceLife("decode-0", 1), lives.InstanceLife("decode-0", 2), lives.InstanceLife("decode-1", 1)]
FINISHES = st.sampled_from([None, None, None, FinishReason.LENGTH, FinishReason.STOP])


def token_of(attempt: int, source: lives.InstanceLife, index: int) -> Any:
    return attempt, source, index


class AnyOrder(RuleBasedStateMachine):
    """Instances send anything in any order; the router's own events are those possible."""

    def __init__(self) -> None:
        super().__init__()
        self.state: lives.State = lives.Unplaced()
        self.answer: list[Any] = []
        self.number = 0
        self.named: list[lives.InstanceLife] = []
        """Decode instances named for this attempt, in order."""
        self.followed: lives.InstanceLife | None = None
        self.ended_at: int | None = None
        self.flushed = 0
        self.unaborted: list[lives.Abort] = []
        """Aborts of former instances, withheld until the replica's holder answers."""

    def take(self, event: lives.Event) -> None:
        before = self.state
        self.state, actions = step(before, event, 1.0)
        for action in actions:
            match action:
                case lives.Append(token_ids, logprobs, _):
                    assert not logprobs or len(logprobs) == len(token_ids)
                    self.answer += token_ids
                case lives.CompleteAnswer():
                    self.flushed += 1
                case lives.Follow(number, decode, _):
                    assert number == self.number
                    self.followed = decode
                case lives.Unfollow() | lives.LeaveAttempt():
                    self.followed = None
                case lives.Abort() if action in self.unaborted:
                    self.unaborted.remove(action)
                case lives.Abort(number, decode):
                    assert number == self.number
                    assert decode is None or decode in self.named
                case lives.Disown(number, source):
                    assert number < self.number or (isinstance(before, lives.Prefilling) and source not in self.named)
                case lives.AwaitReport(until_s):
                    assert until_s > 1.0
        if isinstance(self.state, lives.Lost) and not isinstance(before, lives.Lost):
            self.unaborted += self.state.withheld
        if isinstance(before, lives.Ended):
            assert (self.state, actions) == (before, ())
        if isinstance(self.state, lives.Ended) and not isinstance(before, lives.Ended):
            self.ended_at = len(self.answer)

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
        source: lives.InstanceLife,
        first_index: int,
        count: int,
        finish: FinishReason | None,
        with_logprobs: bool,
    ) -> None:
        number = max(1, self.number - back)
        batch = [token_of(number, source, first_index + offset) for offset in range(count)]
        self.take(lives.TokensReceived(number, source, first_index, batch, batch if with_logprobs else (), finish))

    @rule(source=st.sampled_from(DECODES), count=st.integers(1, 3), finish=FINISHES)
    def tokens_that_follow(self, source: lives.InstanceLife, count: int, finish: FinishReason | None) -> None:
        self.tokens(0, source, max(1, len(self.answer)), count, finish, True)

    @rule(back=st.integers(0, 1), source=st.sampled_from(DECODES))
    def given_up(self, back: int, source: lives.InstanceLife) -> None:
        self.take(lives.GivenUp(max(1, self.number - back), source, GONE))

    @rule(back=st.integers(0, 1), source=st.sampled_from(DECODES), holder=st.sampled_from([None, *DECODES]))
    def replica_named(self, back: int, source: lives.InstanceLife, holder: lives.InstanceLife | None) -> None:
        replica = None if holder is None else ReplicaLocation(*holder, 4)
        self.take(lives.ReplicaNamed(max(1, self.number - back), source, replica))

    @precondition(lambda self: self.reads_prefill)
    @rule(decode=st.sampled_from(DECODES))
    def place_named(self, decode: lives.InstanceLife) -> None:
        self.named.append(decode)
        self.take(lives.DecodeNamed(decode))

    @precondition(lambda self: self.reads_prefill)
    @rule(finish=FINISHES)
    def first_token(self, finish: FinishReason | None) -> None:
        assert not isinstance(self.state, lives.Unplaced)
        first_index = getattr(self.state, "attempt", ATTEMPT).first_index
        self.take(lives.FirstTokenReported((token_of(self.number, PREFILL, first_index),), (), finish))

    @precondition(lambda self: self.reads_prefill)
    @rule()
    def handed_over(self) -> None:
        self.take(lives.HandOverReported())

    @precondition(lambda self: self.reads_prefill)
    @rule(error=st.sampled_from([None, GONE, NoCapacity("prefill", 0.1)]), was_reached=st.booleans())
    def prefill_ended(self, error: KaveriError | None, was_reached: bool) -> None:
        self.take(lives.PrefillEnded(error, was_reached or error is not GONE))

    @precondition(lambda self: isinstance(self.state, lives.Unplaced) and not self.number)
    @rule(received=st.sampled_from([0, 1, 3, MOST_TOKENS]))
    def client_has_tokens_of_an_earlier_session(self, received: int) -> None:
        self.answer = [token_of(0, PREFILL, index) for index in range(received)]
        self.state = lives.Unplaced(received)
        self.sought()

    @precondition(lambda self: isinstance(self.state, lives.Unplaced | lives.Lost))
    @rule()
    def sought(self) -> None:
        self.number += 1
        self.named = []
        self.take(lives.Sought(lives.Attempt(self.number, PREFILL, len(self.answer), MOST_TOKENS)))

    @precondition(lambda self: isinstance(self.state, lives.SeekingOwner))
    @rule()
    def not_found(self) -> None:
        self.take(lives.NotFound())

    @precondition(lambda self: isinstance(self.state, lives.SeekingOwner))
    @rule(decode=st.sampled_from([None, *DECODES]), missing=st.integers(0, 2), earlier=st.integers(0, 2))
    def took_over(self, decode: lives.InstanceLife | None, missing: int, earlier: int) -> None:
        self.named = [] if decode is None else [decode]
        has = len(self.answer)
        first_index = has + missing if missing else max(0, has - earlier)
        tokens = [token_of(self.number, PREFILL, has + offset) for offset in range(missing)]
        attempt = lives.Attempt(self.number, PREFILL, first_index, MOST_TOKENS, taken_over=decode is None)
        self.take(lives.TookOver(attempt, tokens, decode))

    @precondition(lambda self: self.number > 1)
    @rule()
    def superseded(self) -> None:
        before = self.state
        self.state, actions = step(before, lives.Superseded(GONE), 1.0)
        assert isinstance(self.state, lives.Ended)
        assert set(map(type, actions)) <= {lives.LeaveAttempt}
        if not isinstance(before, lives.Ended):
            self.ended_at, self.followed = len(self.answer), None
        self.unaborted = []

    @precondition(lambda self: isinstance(self.state, lives.Unplaced | lives.Lost))
    @rule(both=st.booleans())
    def sent(self, both: bool) -> None:
        self.number += 1
        decode = DECODES[0] if both else None
        self.named = [] if decode is None else [decode]
        self.take(lives.Sent(lives.Attempt(self.number, decode or PREFILL, len(self.answer), MOST_TOKENS), decode))

    @precondition(lambda self: isinstance(self.state, lives.Unplaced | lives.Lost))
    @rule(holder=st.sampled_from(DECODES))
    def resume_asked(self, holder: lives.InstanceLife) -> None:
        self.number += 1
        self.named = [holder]
        attempt = lives.Attempt(self.number, lives.NO_LIFE, len(self.answer), MOST_TOKENS)
        self.take(lives.ResumeRequested(attempt, holder))

    @precondition(lambda self: self.awaits_holder)
    @rule()
    def resumed(self) -> None:
        self.take(lives.ResumeAnswered())

    @precondition(lambda self: self.awaits_holder)
    @rule(may_have_begun=st.booleans())
    def resume_refused(self, may_have_begun: bool) -> None:
        self.take(lives.ResumeAnswered(GONE, may_have_begun))

    @precondition(lambda self: isinstance(self.state, lives.Lost))
    @rule()
    def replica_forgone(self) -> None:
        self.take(lives.ReplicaForgone())

    @precondition(lambda self: self.followed is not None)
    @rule()
    def place_lost(self) -> None:
        assert self.followed is not None
        self.take(lives.GivenUp(self.number, self.followed, GONE, has_ended=False))

    @precondition(
        lambda self: (
            isinstance(self.state, lives.SeekingOwner | lives.Prefilling | lives.Placed | lives.Decoding | lives.Lost)
            and self.answer
        )
    )
    @rule()
    def text_stopped(self) -> None:
        self.take(lives.EndRequested(FinishReason.STOP))

    @precondition(lambda self: self.number > 2)
    @rule(event=st.sampled_from([lives.EndRequested(FinishReason.CANCELLED), lives.EndRequested(GONE)]))
    def ends_early(self, event: lives.Event) -> None:
        self.take(event)

    @property
    def awaits_holder(self) -> bool:
        match self.state:
            case lives.Resuming() | lives.Decoding(lives.Attempt(_, lives.InstanceLife("", 0))):
                return True
            case _:
                return False

    @property
    def reads_prefill(self) -> bool:
        match self.state:
            case lives.Prefilling() | lives.Finishing():
                return True
            case lives.Placed(_, _, _, leg) | lives.Decoding(_, _, _, leg):
                return leg in (lives.PrefillLeg.WORKING, lives.PrefillLeg.HANDED_OVER)
            case _:
                return False

    @invariant()
    def every_token_has_its_index(self) -> None:
        assert [index for _, _, index in self.answer] == list(range(len(self.answer)))
        if isinstance(
            self.state,
            lives.SeekingOwner
            | lives.Prefilling
            | lives.Placed
            | lives.Resuming
            | lives.Decoding
            | lives.Lost
            | lives.Unplaced,
        ):
            assert self.state.next_index == len(self.answer)

    @invariant()
    def an_answer_with_all_its_tokens_is_never_placed_again(self) -> None:
        if isinstance(self.state, lives.Unplaced | lives.Lost):
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
        decode = self.state.decode if isinstance(self.state, lives.Placed | lives.Resuming | lives.Decoding) else None
        assert self.followed == decode

    @invariant()
    def the_former_instance_is_told_to_end_it_unless_the_holder_is_still_to_answer(self) -> None:
        waiting = self.state.withheld if isinstance(self.state, lives.Lost | lives.Resuming) else ()
        assert self.unaborted == list(waiting)

    @invariant()
    def what_is_held_is_bounded_and_of_no_place_that_was_left(self) -> None:
        if isinstance(self.state, lives.SeekingOwner | lives.Prefilling | lives.Placed):
            held = self.state.held
            events = [event for event in held.events if not isinstance(event, lives.ReplicaNamed)]
            weights = [len(event.token_ids) if isinstance(event, lives.TokensReceived) else 1 for event in events]
            assert sum(weights) == held.token_count
            # While its owner is sought, each instance may send a whole answer.
            sources = [event.source for event in events]
            for source in set(sources):
                assert sum(w for w, of in zip(weights, sources, strict=True) if of == source) <= MOST_TOKENS
            named = [event.source for event in held.events if isinstance(event, lives.ReplicaNamed)]
            assert len(set(named)) == len(named) <= MOST_TOKENS
            if isinstance(self.state, lives.Placed):
                assert not {event.source for event in held.events} & set(self.state.left)
                assert self.state.decode not in self.state.left

    @invariant()
    def an_ended_request_takes_nothing_more_and_releases_its_text_once(self) -> None:
        if self.ended_at is not None:
            assert isinstance(self.state, lives.Ended)
            assert len(self.answer) == self.ended_at
        assert self.flushed <= 1


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_any_order_of_events = AnyOrder.TestCase
