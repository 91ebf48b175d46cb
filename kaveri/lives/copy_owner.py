"""State machine of a request's KV copy, which another instance holds, on the instance that decodes the request.

    Alone <-> Opening -> Copied -> Alone        until the request ends
              Copied <-> Moving -> end
              Copied -> Leaving -> Alone

step() returns the next state and the actions for the service, in order. Pure: no clock, no waiting, no I/O.
"""

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.kv.transfer.ticket import Ticket

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_CLOSE_AGAIN_S = 1.0
_DOUBLINGS = 6
"""Number of doublings after which the retry pause exceeds its maximum."""


class Holder(NamedTuple):
    """Instance, in one incarnation, that holds or is asked to hold a copy of a request's KV."""

    instance_id: str
    incarnation: int
    address: str
    number: int = 0
    """Serial number of the copy, assigned by the instance that decodes the request."""


@dataclass(frozen=True, slots=True)
class Alone:
    """State of a request's KV copy: no other instance holds one."""

    until_s: float = 0.0
    """Earliest time of the next search for a holder."""
    failures: int = 0
    """Consecutive failures; each doubles the pause before the next search."""
    former: Holder | None = None
    """Previous holder, which may still have a copy."""


@dataclass(frozen=True, slots=True)
class Opening:
    """State of a request's KV copy: another instance, the holder, was asked to reserve memory for it."""

    holder: Holder
    failures: int
    former: Holder | None


@dataclass(frozen=True, slots=True)
class Copied:
    """State of a request's KV copy: the engine pushes KV to the holder in the background."""

    holder: Holder
    failures: int
    token_count: int = 0
    """Watermark: number of tokens whose KV the holder has verified."""


@dataclass(frozen=True, slots=True)
class Moving:
    """State of a request's KV copy: the engine stops the request and pushes the rest, for the holder to resume it."""

    holder: Holder
    failures: int
    token_count: int
    """Watermark: number of tokens whose KV the holder has verified."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """State of a request's KV copy: its holder was asked to drop it, so that another instance can hold the copy."""

    holder: Holder
    until_s: float
    """Earliest time to ask again: the message may be lost while the push goes on."""


State = Alone | Opening | Copied | Moving | Leaving


class BareEvent(enum.Enum):
    MOVE_REQUESTED = enum.auto()
    """The service wants to move the request to the holder."""
    MOVE_FAILED = enum.auto()
    HOLDER_UNWANTED = enum.auto()
    """The service wants a copy at another instance instead: an engine copies a request to one at a time."""


@dataclass(frozen=True, slots=True)
class HolderChosen:
    holder: Holder


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """Event for a request's KV copy: the holder has reserved memory."""

    ticket: Ticket
    incarnation: int
    """Incarnation of the holder that reserved the memory."""


@dataclass(frozen=True, slots=True)
class CopyLost:
    """Event for a request's KV copy: the holder refused memory, or the engine's push to it has ended."""

    jitter: float
    """Random number in [0, 1), for the pause before the next search."""


@dataclass(frozen=True, slots=True)
class CopyGrew:
    """Event for a request's KV copy: the holder has verified the KV of more tokens."""

    token_count: int


@dataclass(frozen=True, slots=True)
class MoveDone:
    """Event for a request's KV copy: it lacks only the last token, and the engine has stopped the request."""

    token_count: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Event for a request's KV copy: the request has ended on this instance, and with it the push of its KV."""

    is_given_up: bool = False
    """True if no router will resume the request, so that the holder need not keep the copy for a while."""


Event = HolderChosen | RoomGranted | CopyLost | CopyGrew | BareEvent | MoveDone | RequestEnded


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Action for a request's KV copy: ask an instance to reserve memory for it."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """Action for a request's KV copy: let the engine push KV into the memory that the ticket names."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CloseCopy:
    """Action for a request's KV copy: ask its holder to drop it. If the message is lost, the copy expires."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class SendLocation:
    """Action for a request's KV copy: send its location to the request's router."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class ReleaseInEngine:
    """Action for a request's KV copy: let the engine stop the request and push the rest of its KV to the holder."""


@dataclass(frozen=True, slots=True)
class EndAsMoved:
    """Action for a request's KV copy: end the request on this instance; its router resumes it at the holder."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class AwaitResumed:
    holder: Holder


Action = AskHolder | BeginCopy | CloseCopy | SendLocation | ReleaseInEngine | EndAsMoved | AwaitResumed
Step = tuple[State, tuple[Action, ...]]


def step(copy: State, event: Event, now_s: float) -> Step:
    """Return the next state of a request's KV copy and the actions. Events that no longer apply change nothing."""
    match event, copy:
        case HolderChosen(holder), Alone():
            return Opening(holder, copy.failures, copy.former), (AskHolder(holder),)
        case RoomGranted(ticket, incarnation), Opening():
            return _granted(copy, ticket, copy.holder._replace(incarnation=incarnation))
        case CopyLost(jitter), Opening():
            return Alone(now_s + pause_s(copy.failures, jitter), copy.failures + 1, copy.former), ()
        case CopyLost(jitter), Copied() | Moving():
            return Alone(now_s + pause_s(copy.failures, jitter), copy.failures + 1, copy.holder), ()
        case BareEvent.HOLDER_UNWANTED, Copied() | Leaving():
            return Leaving(copy.holder, now_s + _CLOSE_AGAIN_S), (CloseCopy(copy.holder),)
        case CopyLost(), Leaving():
            return Alone(), ()
        case CopyGrew(token_count), Copied() | Moving() if token_count > copy.token_count:
            grown = replace(copy, failures=0, token_count=token_count)
            return grown, (SendLocation(_replica(copy.holder, token_count)),)
        case BareEvent.MOVE_REQUESTED, Copied():
            return Moving(copy.holder, copy.failures, copy.token_count), (ReleaseInEngine(),)
        case BareEvent.MOVE_FAILED, Moving():
            return Copied(copy.holder, copy.failures, copy.token_count), ()
        case MoveDone(token_count), Moving():
            return Alone(), (EndAsMoved(_replica(copy.holder, token_count)), AwaitResumed(copy.holder))
        case RequestEnded(is_given_up=True), Copied() | Moving():
            # The holder may have received everything just before.
            return Alone(), (CloseCopy(copy.holder),)
        case RequestEnded(), Moving() | Leaving():
            # A holder that was not asked to drop the copy keeps it for a while, complete or not.
            return Alone(), ()
        case RequestEnded(is_given_up=True), Alone() | Opening() if copy.former is not None:
            return Alone(), (CloseCopy(copy.former),)
        case _:
            return copy, ()


def pause_s(failures: int, jitter: float) -> float:
    """Return the pause before the next search for a holder. failures: consecutive earlier ones. jitter: random, in
    [0, 1)."""
    first_s = FIRST_PAUSE_S * (0.5 + jitter / 2)
    return min(LONGEST_PAUSE_S, first_s * 2.0 ** min(failures, _DOUBLINGS))


def _replica(holder: Holder, token_count: int) -> ReplicaLocation:
    return ReplicaLocation(holder.instance_id, holder.incarnation, token_count)


def _granted(copy: Opening, ticket: Ticket, holder: Holder) -> Step:
    actions: tuple[Action, ...] = (BeginCopy(ticket),)
    # An unchanged incarnation drops its former copy by itself.
    if copy.former is not None and copy.former[:2] != holder[:2]:
        actions = (CloseCopy(copy.former), *actions)
    return Copied(holder, copy.failures), actions
