"""The life of one hold: a computed prompt whose KV stays here until a decode instance asks for it. Pure: no clock.

::

    HeldHere ⇄ PushingHeld ── HoldEnded

A hold begins with the prompt's first token. It may end in every state. Its request ends with it, and it with its
request. Its time does not run out during a push, which the ticket bounds.
"""

import enum
from dataclasses import dataclass

from kaveri.errors import KaveriError, RequestAlreadyExists, RequestCancelled, RequestNotFound, Unavailable


class HoldOutcome(enum.StrEnum):
    """How a hold ended."""

    PUSHED = "pushed"
    EXPIRED = "expired"
    RELEASED = "released"
    """By the decode instance, or by the caller of either leg."""
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
    """It is not wanted any more."""


@dataclass(frozen=True, slots=True)
class RequestOver:
    """Its request has ended. handed_over: the receiver has accepted the KV."""

    handed_over: bool


HoldEvent = PushAsked | PushBroke | LeaseOver | ReleaseAsked | RequestOver


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
        case PushingHeld(), LeaseOver():
            return state, ()
        case HeldHere(), LeaseOver():
            return _ended(HoldOutcome.EXPIRED, EndRequest())
        case HeldHere(), ReleaseAsked():
            return _ended(HoldOutcome.RELEASED, EndRequest())
        case PushingHeld(), ReleaseAsked():
            return _ended(HoldOutcome.RELEASED, AnswerPush(RequestCancelled(request_id)), EndRequest())
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
    HoldOutcome.FAILED: "its request has ended at the prefill instance",
}


def gone(request_id: str, outcome: HoldOutcome) -> KaveriError:
    """The answer to those who ask for a hold that has ended so."""
    if outcome is HoldOutcome.RELEASED:
        return RequestCancelled(request_id)
    return RequestNotFound(request_id, _REASONS[outcome])


def busy(request_id: str) -> KaveriError:
    """The answer to a second push of a hold."""
    return RequestAlreadyExists(request_id)


def _ended(outcome: HoldOutcome, *actions: HoldAction) -> HoldStep:
    return HoldEnded(outcome), (*actions, ForgetHold(outcome))
