"""How a request that has a replica is resumed by its holder. Pure, as lifecycle.py."""

from dataclasses import replace

from kaveri.policy.retry import Setback
from services.router.lifecycle_losses import Step, held_of, impossible, leaving, withheld_by
from services.router.lifecycle_values import (
    Decoding,
    Follow,
    GivenUp,
    LeaveAttempt,
    Lost,
    Placed,
    Prefilling,
    PrefillLeg,
    ReplicaForgone,
    ReplicaNamed,
    ResumeAsked,
    ResumeRefused,
    Resuming,
    SeekingOwner,
    State,
    Tokens,
    Unplaced,
)


def replica_named(state: State, event: ReplicaNamed) -> Step:
    """The decode instance says where a replica is."""
    match state:
        case Placed(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return replace(state, replica=event.replica), ()
        case Decoding(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return state._replace(replica=event.replica), ()
        case SeekingOwner(attempt) | Prefilling(attempt) | Placed(attempt) if event.attempt == attempt.number:
            if isinstance(state, Placed) and event.source in state.left:
                return state, ()
            # The last word of each instance.
            events = tuple(former for former in state.held.events if not _is_replaced(former, event))
            if sum(isinstance(former, ReplicaNamed) for former in events) >= attempt.most_tokens:
                return state, ()
            return replace(state, held=held_of((*events, event))), ()
        case _:
            return state, ()


def _is_replaced(former: Tokens | GivenUp | ReplicaNamed, event: ReplicaNamed) -> bool:
    return isinstance(former, ReplicaNamed) and former.source == event.source


def replica_forgone(state: State, event: ReplicaForgone) -> Step:
    """It is computed again."""
    match state:
        case Lost():
            return replace(state, replica=None, withheld=()), state.withheld
        case _:
            raise impossible(state, event)


def resume_asked(state: State, event: ResumeAsked) -> Step:
    """The holder is asked."""
    match state:
        case Unplaced(next_index) | Lost(_, next_index):
            attempt, holder = event.attempt, event.holder
            assert attempt.first_index == next_index, (state, event)
            now = Resuming(attempt, next_index, holder, withheld_by(state))
            return now, (Follow(attempt.number, holder, is_there=False),)
        case _:
            raise impossible(state, event)


def resume_accepted(state: State) -> Step:
    """The holder goes on."""
    match state:
        case Resuming(attempt, next_index, decode):
            now = Decoding(attempt, next_index, decode, PrefillLeg.COMPLETE)
            return now, (*state.withheld, Follow(attempt.number, decode))
        case Decoding(attempt, _, decode):
            # Its tokens have come before its answer.
            return state, (Follow(attempt.number, decode),)
        case _:
            return state, ()


def resume_refused(state: State, event: ResumeRefused) -> Step:
    """The holder does not go on, or has not answered."""
    match state:
        case Resuming(attempt, next_index, decode):
            now = Lost(attempt, next_index, event.error, Setback.REFUSED, decode, PrefillLeg.COMPLETE)
            if event.may_have_begun:
                return now, leaving(state)
            return now, (LeaveAttempt(), *state.withheld)
        case _:
            # Its tokens have come: only its answer was lost.
            return resume_accepted(state)
