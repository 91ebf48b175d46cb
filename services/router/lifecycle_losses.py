"""Transitions that lose, leave or resume an attempt. Pure, as lifecycle.py."""

from dataclasses import replace

from kaveri.domain.sampling import FinishReason
from kaveri.errors import EngineBroke, KaveriError, NoCapacity, Unavailable
from kaveri.policy.retry import Setback
from services.router.lifecycle_values import (
    Abort,
    Action,
    Attempt,
    CompleteAnswer,
    Decoding,
    Disown,
    Ended,
    Event,
    Follow,
    GivenUp,
    HeldEvents,
    LeaveAttempt,
    Lost,
    Placed,
    Prefilling,
    PrefillLeg,
    ReplicaForgone,
    ReplicaNamed,
    ResumeAnswered,
    ResumeAsked,
    Resuming,
    SeekingOwner,
    State,
    Tokens,
    Unplaced,
)

Step = tuple[State, tuple[Action, ...]]


def lost_by_gap(state: Placed | Resuming | Decoding, event: Tokens) -> Step:
    """Lose an attempt because tokens are missing before those of the event."""
    missing = f"tokens {state.next_index} to {event.first_index - 1} are missing"
    error = Unavailable(f"decode instance {state.decode.instance_id}: {missing}")
    return lost(state, error, decode_has_ended=event.finish is not None)


def lost(
    state: Prefilling | Placed | Resuming | Decoding,
    error: KaveriError,
    *,
    was_reached: bool = True,
    decode_has_ended: bool = False,
) -> Step:
    """End an attempt that cannot go on. was_reached: True if the instance may know of it.

    An answer that has all its tokens is complete, whatever the error.
    """
    decode = None if isinstance(state, Prefilling) else state.decode
    replica = state.replica if isinstance(state, Placed | Decoding) else None
    match state:
        case Prefilling():
            leg = PrefillLeg.WORKING
        case Resuming():
            leg = PrefillLeg.COMPLETE
        case _:
            leg = state.leg
    attempt = _with_suspicion(state.attempt, error)
    now = Lost(attempt, state.next_index, error, _setback(error, was_reached), decode, leg, replica)
    actions: tuple[Action, ...] = leaving(state)
    if decode_has_ended:
        actions = (LeaveAttempt(), *withheld_by(state))
    elif decode is None and isinstance(error, Unavailable) and was_reached:
        # Only the prefill instance knows which decode instance has reserved room.
        actions = (LeaveAttempt(), Abort(state.attempt.number, None))
    if state.next_index >= attempt.most_tokens:
        return Ended(FinishReason.LENGTH, attempt), (CompleteAnswer(), *actions)
    if replica is not None and not decode_has_ended:
        return replace(now, withheld=(Abort(state.attempt.number, decode),)), (LeaveAttempt(),)
    return now, actions


def _with_suspicion(attempt: Attempt, error: KaveriError) -> Attempt:
    """The attempt with its suspicion updated by an engine's error."""
    if isinstance(error, EngineBroke) and error.suspect_until > attempt.suspect_until:
        return replace(attempt, suspect_until=error.suspect_until)
    return attempt


def _setback(error: KaveriError, was_reached: bool) -> Setback:
    if isinstance(error, NoCapacity):
        return Setback.FULL
    if isinstance(error, EngineBroke):
        return Setback.BROKEN
    return Setback.LOST if was_reached else Setback.UNREACHED


def leaving(state: Prefilling | Placed | Resuming | Decoding) -> tuple[Action, ...]:
    """Actions that end an attempt which decode has not ended. Prefill aborts a reservation that it has not named unless
    it has handed the request over; then the decode instance has sent something."""
    if isinstance(state, Prefilling):
        sources = dict.fromkeys(event.source for event in state.held.events)
        return LeaveAttempt(), *(Disown(state.attempt.number, source) for source in sources)
    return LeaveAttempt(), *withheld_by(state), Abort(state.attempt.number, state.decode)


def withheld_by(state: State) -> tuple[Abort, ...]:
    """Aborts that wait until the holder of the replica has answered."""
    return state.withheld if isinstance(state, Lost | Resuming) else ()


def held_of(events: tuple[Tokens | GivenUp | ReplicaNamed, ...]) -> HeldEvents:
    """Held events with the number of their tokens. An error counts as one token, a replica's name as none."""
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
    return HeldEvents(events, tokens + sum(isinstance(event, GivenUp) for event in events))


def impossible(state: State, event: Event) -> AssertionError:
    """Error for an event that the service must not report in this state."""
    return AssertionError(f"{type(event).__name__} is impossible in {type(state).__name__}: {event}, {state}")


def replica_named(state: State, event: ReplicaNamed) -> Step:
    """Record where the replica is, or hold that until the placement is known."""
    match state:
        case Placed(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return replace(state, replica=event.replica), ()
        case Decoding(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return state._replace(replica=event.replica), ()
        case SeekingOwner(attempt) | Prefilling(attempt) | Placed(attempt) if event.attempt == attempt.number:
            if isinstance(state, Placed) and event.source in state.left:
                return state, ()
            # Only the last event of each instance counts.
            events = tuple(
                former
                for former in state.held.events
                if not (isinstance(former, ReplicaNamed) and former.source == event.source)
            )
            if sum(isinstance(former, ReplicaNamed) for former in events) >= attempt.most_tokens:
                return state, ()
            return replace(state, held=held_of((*events, event))), ()
        case _:
            return state, ()


def replica_forgone(state: State, event: ReplicaForgone) -> Step:
    """Release the former instance's Abort; the request is computed again."""
    match state:
        case Lost():
            return replace(state, replica=None, withheld=()), state.withheld
        case _:
            raise impossible(state, event)


def resume_asked(state: State, event: ResumeAsked) -> Step:
    """Wait for the holder's answer."""
    match state:
        case Unplaced(next_index) | Lost(_, next_index):
            attempt, holder = event.attempt, event.holder
            assert attempt.first_index == next_index, (state, event)
            now = Resuming(attempt, next_index, holder, withheld_by(state))
            return now, (Follow(attempt.number, holder, is_there=False),)
        case _:
            raise impossible(state, event)


def resume_answered(state: State, event: ResumeAnswered) -> Step:
    """Apply the holder's answer. It does not matter once its tokens have come."""
    match state:
        case Resuming(attempt, next_index, decode):
            if event.error is None:
                now = Decoding(attempt, next_index, decode, PrefillLeg.COMPLETE)
                return now, (*state.withheld, Follow(attempt.number, decode))
            refused = Lost(attempt, next_index, event.error, Setback.REFUSED, decode, PrefillLeg.COMPLETE)
            return refused, leaving(state) if event.may_have_begun else (LeaveAttempt(), *state.withheld)
        case Decoding(attempt, _, decode):
            return state, (Follow(attempt.number, decode),)
        case _:
            return state, ()
