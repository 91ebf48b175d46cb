"""How an attempt of a request is lost or left. Pure, as lifecycle.py."""

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
    GivenUp,
    HeldEvents,
    LeaveAttempt,
    Lost,
    Placed,
    Prefilling,
    PrefillLeg,
    ReplicaNamed,
    Resuming,
    State,
    Tokens,
)

Step = tuple[State, tuple[Action, ...]]


def lost_by_gap(state: Placed | Resuming | Decoding, event: Tokens) -> Step:
    """Tokens are missing before those of the event."""
    missing = f"tokens {state.next_index} to {event.first_index - 1} are missing"
    # One that has ended by itself has nothing to abort.
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

    An answer that has all its tokens lacks nothing but its end: it is complete, whatever the error. No attempt follows.
    """
    decode, leg = (None, PrefillLeg.WORKING) if isinstance(state, Prefilling) else (state.decode, leg_of(state))
    replica = state.replica if isinstance(state, Placed | Decoding) else None
    attempt = _with_suspicion(state.attempt, error)
    now = Lost(attempt, state.next_index, error, _setback(error, was_reached), decode, leg, replica)
    actions: tuple[Action, ...] = leaving(state)
    if decode_has_ended:
        actions = (LeaveAttempt(), *withheld_by(state))
    elif decode is None and isinstance(error, Unavailable) and was_reached:
        # A prefill instance that dies takes the name of the decode instance with it.
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
    """Leaves an attempt that decode has not ended. Prefill itself aborts a reservation that it has not named, unless
    it has handed the request over: then the instance that has it has sent something."""
    if isinstance(state, Prefilling):
        sources = dict.fromkeys(event.source for event in state.held.events)
        return LeaveAttempt(), *(Disown(state.attempt.number, source) for source in sources)
    return LeaveAttempt(), *withheld_by(state), Abort(state.attempt.number, state.decode)


def withheld_by(state: State) -> tuple[Abort, ...]:
    """The aborts that wait until the holder of the replica has been asked."""
    return state.withheld if isinstance(state, Lost | Resuming) else ()


def leg_of(state: Placed | Resuming | Decoding) -> PrefillLeg:
    """How far prefill is. A resumed attempt needs nothing of it."""
    return PrefillLeg.COMPLETE if isinstance(state, Resuming) else state.leg


def held_of(events: tuple[Tokens | GivenUp | ReplicaNamed, ...]) -> HeldEvents:
    """With the number of their tokens."""
    return HeldEvents(events, sum(map(_held_tokens, events)))


def _held_tokens(event: Tokens | GivenUp | ReplicaNamed) -> int:
    """An error counts as a token. What is said of a copy takes no room from the tokens, which may be a whole answer."""
    if isinstance(event, Tokens):
        return len(event.token_ids)
    return 1 if isinstance(event, GivenUp) else 0


def impossible(state: State, event: Event) -> AssertionError:
    """Of a pair that only a fault of the service brings about."""
    return AssertionError(f"{type(event).__name__} is impossible in {type(state).__name__}: {event}, {state}")
