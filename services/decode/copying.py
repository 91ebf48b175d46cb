"""The life of a request's copy at its owner. Pure: no clock, no waiting, no I/O.

    Alone <-> Opening -> Copied -> Alone        until the request ends
                         Copied <-> Moving -> gone

step() returns the next state and the actions for the service, in order.
"""

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.kv.transfer.ticket import Ticket

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_DOUBLINGS = 6
"""Doublings of the first pause until it exceeds the longest."""


class Holder(NamedTuple):
    """A life of an instance that holds a copy, or is asked to."""

    instance_id: str
    incarnation: int
    address: str
    number: int = 0
    """Number of the copy, counted by the owner."""


# ---- states ----


@dataclass(frozen=True, slots=True)
class Alone:
    """The request has no holder."""

    until_s: float = 0.0
    """Earliest time of the next request for room."""
    failures: int = 0
    """Consecutive failures; each doubles the pause."""
    former: Holder | None = None
    """May still have an earlier copy."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A holder is asked for room."""

    holder: Holder
    failures: int
    former: Holder | None


@dataclass(frozen=True, slots=True)
class Copied:
    """The engine copies to a holder, in the background."""

    holder: Holder
    failures: int
    token_count: int = 0
    """The watermark: tokens whose KV the holder has verified."""


@dataclass(frozen=True, slots=True)
class Moving:
    """The engine releases the request to the holder."""

    holder: Holder
    failures: int
    token_count: int
    """The watermark."""


Copy = Alone | Opening | Copied | Moving

# ---- events ----


class BareEvent(enum.Enum):
    """Events without data."""

    MOVE_ASKED = enum.auto()
    """The request is to be moved to the holder."""
    MOVE_FAILED = enum.auto()
    """The request stays here."""


@dataclass(frozen=True, slots=True)
class HolderChosen:
    """The policy has chosen a holder."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class CopyRoomGranted:
    """The holder has room."""

    ticket: Ticket
    incarnation: int
    """The life that granted it."""


@dataclass(frozen=True, slots=True)
class CopyLost:
    """There is no room, or the engine's push has ended."""

    pause_s: float
    """Pause after a first failure."""


@dataclass(frozen=True, slots=True)
class CopyGrew:
    """The watermark has risen."""

    token_count: int


@dataclass(frozen=True, slots=True)
class MoveDone:
    """The holder has the KV of all tokens but the last; the engine has ended the request."""

    token_count: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request is gone, and its engine has ended the push."""

    is_given_up: bool = False
    """No router resumes it. Otherwise the holder keeps the copy for a moment: this instance may die before the router
    has the end of the answer."""


Event = HolderChosen | CopyRoomGranted | CopyLost | CopyGrew | BareEvent | MoveDone | RequestEnded

# ---- actions ----


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Ask a holder for room."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """Have the engine copy to the ticket."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CloseCopy:
    """Have a holder drop its copy. If the message is lost, the copy expires."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class TellRouterOfCopy:
    """Send the request's router news of the copy."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class LetGoInEngine:
    """Have the engine release the request to the holder."""


@dataclass(frozen=True, slots=True)
class EndAsMoved:
    """End the request here; its router resumes it from the replica."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class AwaitResumed:
    """Wait until the holder has resumed the request."""

    holder: Holder


Action = AskHolder | BeginCopy | CloseCopy | TellRouterOfCopy | LetGoInEngine | EndAsMoved | AwaitResumed
Step = tuple[Copy, tuple[Action, ...]]


def step(copy: Copy, event: Event, now_s: float) -> Step:
    """The next state and the actions. Late events change nothing."""
    match event, copy:
        case HolderChosen(holder), Alone():
            return Opening(holder, copy.failures, copy.former), (AskHolder(holder),)
        case CopyRoomGranted(ticket, incarnation), Opening():
            return _granted(copy, ticket, copy.holder._replace(incarnation=incarnation))
        case CopyLost(pause_s), Opening():
            return _alone(copy.failures, pause_s, copy.former, now_s), ()
        case CopyLost(pause_s), Copied() | Moving():
            return _alone(copy.failures, pause_s, copy.holder, now_s), ()
        case CopyGrew(token_count), Copied() | Moving() if token_count > copy.token_count:
            grown = replace(copy, failures=0, token_count=token_count)
            return grown, (TellRouterOfCopy(_replica(copy.holder, token_count)),)
        case BareEvent.MOVE_ASKED, Copied():
            return Moving(copy.holder, copy.failures, copy.token_count), (LetGoInEngine(),)
        case BareEvent.MOVE_FAILED, Moving():
            return Copied(copy.holder, copy.failures, copy.token_count), ()
        case MoveDone(token_count), Moving():
            return Alone(), (EndAsMoved(_replica(copy.holder, token_count)), AwaitResumed(copy.holder))
        case RequestEnded(is_given_up=True), Copied() | Moving():
            # The holder may have taken all just before.
            return Alone(), (CloseCopy(copy.holder),)
        case RequestEnded(), Moving():
            # The holder keeps the copy for a moment, whole or not.
            return Alone(), ()
        case RequestEnded(is_given_up=True), Alone() | Opening() if copy.former is not None:
            return Alone(), (CloseCopy(copy.former),)
        case _:
            return copy, ()


def _replica(holder: Holder, token_count: int) -> ReplicaLocation:
    return ReplicaLocation(holder.instance_id, holder.incarnation, token_count)


def _granted(copy: Opening, ticket: Ticket, holder: Holder) -> Step:
    actions: tuple[Action, ...] = (BeginCopy(ticket),)
    # The same life drops its former copy by itself.
    if copy.former is not None and copy.former[:2] != holder[:2]:
        actions = (CloseCopy(copy.former), *actions)
    return Copied(holder, copy.failures), actions


def _alone(failures: int, pause_s: float, former: Holder | None, now_s: float) -> Alone:
    pause_s = min(LONGEST_PAUSE_S, pause_s * 2 ** min(failures, _DOUBLINGS))
    return Alone(now_s + pause_s, failures + 1, former)
