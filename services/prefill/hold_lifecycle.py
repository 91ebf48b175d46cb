"""The life of one hold: a computed prompt whose KV stays here until a decode instance asks for it. Pure: no clock.

::

    HeldHere ⇄ PushingHeld ── HoldEnded

A hold begins with the prompt's first token. It may end in every state. Its request ends with it, and it with its
request. Its time does not run out during a push, which the ticket bounds.
"""

import enum
import math
from dataclasses import dataclass

from kaveri.errors import KaveriError, RequestAlreadyExists, RequestCancelled, RequestNotFound, Unavailable


class HoldOutcome(enum.StrEnum):
    """How a hold ended."""

    PUSHED = "pushed"
    EXPIRED = "expired"
    RELEASED = "released"
    """By a decode leg, which did not need it or has ended. Another leg computes the prompt."""
    ABORTED = "aborted"
    """By its caller. Decode legs end as aborted, too."""
    FAILED = "failed"
    """Its request ended otherwise: its engine broke, the instance ends, or another request has the same id."""


@dataclass(frozen=True, slots=True)
class HeldHere:
    """Waits for a decode instance."""

    expires_s: float


@dataclass(frozen=True, slots=True)
class PushingHeld:
    """Its KV is on the way."""

    expires_s: float


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """No event follows."""

    outcome: HoldOutcome


HoldState = HeldHere | PushingHeld | HoldEnded


@dataclass(frozen=True, slots=True)
class PushAsked:
    """A decode instance has shown a ticket, and the engine has taken it."""


@dataclass(frozen=True, slots=True)
class PushBroke:
    """The push ended without acceptance. The KV is kept."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """Its time has run out."""


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """A decode leg does not need it. Another leg's push goes on."""


@dataclass(frozen=True, slots=True)
class PushLeft:
    """The decode leg that waited for the push has gone."""


@dataclass(frozen=True, slots=True)
class CallerAborted:
    """Its caller wants no answer any more."""


@dataclass(frozen=True, slots=True)
class RequestOver:
    """Its request has ended. handed_over: the receiver has accepted the KV."""

    handed_over: bool


HoldEvent = PushAsked | PushBroke | LeaseOver | ReleaseAsked | PushLeft | CallerAborted | RequestOver


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """Answer the decode instance that has asked for the push. None: the KV has arrived."""

    error: KaveriError | None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End the request, which frees its KV."""


@dataclass(frozen=True, slots=True)
class ForgetHold:
    """The last action: count the end."""

    outcome: HoldOutcome


HoldAction = AnswerPush | EndRequest | ForgetHold
HoldStep = tuple[HoldState, tuple[HoldAction, ...]]


def step_hold(state: HoldState, event: HoldEvent, now_s: float, request_id: str) -> HoldStep:
    """What the event makes of the hold, and what is to be done, in this order. Illegal pairs raise AssertionError."""
    match state, event:
        case HeldHere(), PushAsked():
            return PushingHeld(state.expires_s), ()
        case PushingHeld(), PushBroke():
            answer = AnswerPush(Unavailable(f"the push of the hold failed: {event.reason}"))
            if now_s >= state.expires_s:
                return _ended(HoldOutcome.EXPIRED, answer, EndRequest())
            return HeldHere(state.expires_s), (answer,)
        case PushingHeld(), ReleaseAsked():
            return state, ()
        case PushingHeld(), LeaseOver():
            # Whatever the clock says when the push breaks: no other timer is set.
            return PushingHeld(-math.inf), ()
        case HeldHere(), LeaseOver():
            return _ended(HoldOutcome.EXPIRED, EndRequest())
        case HeldHere(), ReleaseAsked():
            return _ended(HoldOutcome.RELEASED, EndRequest())
        case PushingHeld(), PushLeft():
            return _ended(HoldOutcome.RELEASED, EndRequest())
        case HeldHere(), CallerAborted():
            return _ended(HoldOutcome.ABORTED, EndRequest())
        case PushingHeld(), CallerAborted():
            return _ended(HoldOutcome.ABORTED, AnswerPush(RequestCancelled(request_id)), EndRequest())
        case PushingHeld(), RequestOver(handed_over=True):
            return _ended(HoldOutcome.PUSHED, AnswerPush(None))
        case PushingHeld(), RequestOver():
            return _ended(HoldOutcome.FAILED, AnswerPush(gone(request_id, HoldOutcome.FAILED)))
        case HeldHere(), RequestOver(handed_over=False):
            return _ended(HoldOutcome.FAILED)
    raise AssertionError(f"{event} in {state}")


_REASONS = {
    HoldOutcome.PUSHED: "the KV of its prompt was pushed already",
    HoldOutcome.EXPIRED: "the KV of its prompt was held for --hold-ttl-s seconds and freed",
    HoldOutcome.RELEASED: "a decode leg has given up the KV of its prompt",
    HoldOutcome.FAILED: "its request has ended at the prefill instance",
}


def gone(request_id: str, outcome: HoldOutcome) -> KaveriError:
    """The answer to those who ask for a hold that has ended so."""
    if outcome is HoldOutcome.ABORTED:
        return RequestCancelled(request_id)
    return RequestNotFound(request_id, _REASONS[outcome])


def busy(request_id: str) -> KaveriError:
    """The answer to a second push of a hold."""
    return RequestAlreadyExists(request_id)


def _ended(outcome: HoldOutcome, *actions: HoldAction) -> HoldStep:
    return HoldEnded(outcome), (*actions, ForgetHold(outcome))
