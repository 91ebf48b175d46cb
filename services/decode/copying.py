"""The life of the copy of one request, as its owner sees it. Pure: no clock, no waiting, no I/O.

    Alone <-> Opening -> Copied -> Alone        until the request ends
                         Copied <-> Moving -> gone

step() returns the next state and what the service has to carry out, in order.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.kv.transfer.ticket import Ticket

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_DOUBLINGS = 6
"""Of the first pause, until it is longer than the longest."""


class Holder(NamedTuple):
    """One life of an instance that holds a copy, or is asked to."""

    instance_id: str
    incarnation: int
    address: str
    number: int = 0
    """Of the copy, among all that this instance has asked for."""


# ---- states ----


@dataclass(frozen=True, slots=True)
class Alone:
    """No holder takes what the request draws."""

    until_s: float = 0.0
    """No holder is asked before."""
    failures: int = 0
    """In a row; they double the pauses."""
    former: Holder | None = None
    """It may still have what was copied before."""


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
    """The engine lets the request go to the holder."""

    holder: Holder
    failures: int
    token_count: int
    """The watermark."""


Copy = Alone | Opening | Copied | Moving

# ---- events ----


@dataclass(frozen=True, slots=True)
class HolderChosen:
    """The policy names a holder."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class CopyRoomGranted:
    """The holder has room."""

    ticket: Ticket
    incarnation: int
    """The life that has granted it."""


@dataclass(frozen=True, slots=True)
class CopyLost:
    """There is no room, or the engine's push has ended."""

    pause_s: float
    """Longest pause before another try, as drawn for a first failure."""


@dataclass(frozen=True, slots=True)
class CopyGrew:
    """The watermark has risen."""

    token_count: int


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """The request is to go on at the holder."""


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The request goes on here."""


@dataclass(frozen=True, slots=True)
class MoveDone:
    """The holder has the KV of all tokens but the last, and the engine has ended the request."""

    token_count: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request is not here any more. Its engine has ended the push."""

    is_given_up: bool = False
    """No router goes on with it. Otherwise the holder keeps the copy for a moment: this instance may die before the
    router has the end of the answer."""


Event = HolderChosen | CopyRoomGranted | CopyLost | CopyGrew | MoveAsked | MoveFailed | MoveDone | RequestEnded

# ---- actions ----


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Ask for room."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """Have the engine copy there."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CloseCopy:
    """Tell a holder that its copy is not wanted any more. It may not hear it: then the copy expires."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class TellRouterOfCopy:
    """Send the request's router news of the copy."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class LetGoInEngine:
    """Have the engine let the request go to the holder."""


@dataclass(frozen=True, slots=True)
class EndAsMoved:
    """End the request here. Its router resumes it from this replica."""

    replica: ReplicaLocation


@dataclass(frozen=True, slots=True)
class AwaitResumed:
    """Ask the holder when the request goes on there."""

    holder: Holder


Action = AskHolder | BeginCopy | CloseCopy | TellRouterOfCopy | LetGoInEngine | EndAsMoved | AwaitResumed
Step = tuple[Copy, tuple[Action, ...]]


def step(copy: Copy, event: Event, now_s: float) -> Step:
    """The next state, and what to do. Events that come too late change nothing."""
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
            # What has grown was no failure.
            grown = replace(copy, failures=0, token_count=token_count)
            return grown, (TellRouterOfCopy(_replica(copy.holder, token_count)),)
        case MoveAsked(), Copied():
            return Moving(copy.holder, copy.failures, copy.token_count), (LetGoInEngine(),)
        case MoveFailed(), Moving():
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
    # The same life has dropped its former copy by itself.
    if copy.former is not None and copy.former[:2] != holder[:2]:
        actions = (CloseCopy(copy.former), *actions)
    return Copied(holder, copy.failures), actions


def _alone(failures: int, pause_s: float, former: Holder | None, now_s: float) -> Alone:
    pause_s = min(LONGEST_PAUSE_S, pause_s * 2 ** min(failures, _DOUBLINGS))
    return Alone(now_s + pause_s, failures + 1, former)
