"""A request's life on a decode instance, as a value. Pure: no clock, no waiting, no I/O, no protobuf.

    InLine <-> Reserving -> Reserved -> Ready -> Running    from every state: Released
                 +--- adopted ---------^

step() returns the next state and the actions that the service has to carry out, in order. What room, seats and tokens
there are the service knows; here is what they mean for one request.
"""

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from kaveri.errors import (
    DeadlineExceeded,
    EngineBroke,
    EngineError,
    KaveriError,
    NoCapacity,
    Unavailable,
)
from kaveri.kv.transfer.ticket import Ticket

# ---- States ----


@dataclass(frozen=True, slots=True)
class InLine:
    """It waits for room."""

    stays: bool
    """Whether it waits when there is none now."""


@dataclass(frozen=True, slots=True)
class Reserving:
    """The engine is asked for its room, or to adopt it."""

    stays: bool
    asked_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """It has room; its KV is expected."""

    asked_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """It has landed, and waits for a seat in the batch. Its KV is here, unless it was preempted since."""

    landed_s: float
    preemptions: int = 0
    holds_blocks: bool = True


class Running(NamedTuple):
    """It is in the batch. A tuple, because each token makes a new one."""

    landed_s: float
    first_step_s: float | None = None
    drawn: int = 0
    """Tokens drawn on this instance."""
    preemptions: int = 0
    holds_blocks: bool = True
    """False: it was preempted, and has drawn no token since."""


class DecodeOutcome(enum.StrEnum):
    """How a request has ended here."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REPLACED = "replaced"
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    LEFT_LINE = "left_line"
    """Its Reserve ended before it had room."""
    REFUSED = "refused"
    NOT_LANDED = "not_landed"
    ROUTER_GONE = "router_gone"
    MOVED = "moved"
    """The holder of its copy goes on with it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Released:
    """It has ended here, and holds nothing."""

    outcome: DecodeOutcome


State = InLine | Reserving | Reserved | Ready | Running | Released

# ---- Events ----


@dataclass(frozen=True, slots=True)
class RoomAsked:
    """It is its turn: the service asks the engine."""


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """The engine has reserved its room."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RoomRefused:
    """The engine has refused."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The instance lets it wait no longer: it must not wait, the line is full, or the instance drains."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class AdoptedHere:
    """The engine that has prefilled it decodes it."""


@dataclass(frozen=True, slots=True)
class KvLanded:
    """All its KV is here."""

    kv_bytes: int


@dataclass(frozen=True, slots=True)
class KvNotLanded:
    """Its KV will not come. The prefill side hears that from its push."""

    reason: str


@dataclass(frozen=True, slots=True)
class SeatTaken:
    """It joins the batch."""


class Drew(NamedTuple):
    """The engine has drawn a token for it."""

    is_last: bool


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """The engine has preempted it."""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Its Reserve call was cancelled, or its deadline is over."""


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """Its prefill instance or its router gives it up."""

    by_router: bool


class Rival(enum.Enum):
    """What replaces a request."""

    NEWER_OWNER = "newer owner"
    """The doing of the router, or of a later session."""
    SAME_OWNER = "same owner"
    """Prefill did not hear of the landing. The router may have got tokens, and wait for more of them."""
    OTHER_REQUEST = "other request"
    """The former router must not place it again: the two would replace each other in turn."""


@dataclass(frozen=True, slots=True)
class RivalCame:
    """Room is asked for under the same request id."""

    rival: Rival
    error: KaveriError
    """For the former Reserve call, if it still waits."""


@dataclass(frozen=True, slots=True)
class TimeOver:
    """The request's deadline has passed."""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """Its router had no token stream for the whole grace time."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The engine has let it go: the holder of its copy has the KV of all tokens but the last."""

    holder_id: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine has failed it, or the instance ends."""

    error: EngineError | Unavailable
    """EngineError: it must not be placed again."""


Event = (
    RoomAsked
    | RoomGranted
    | RoomRefused
    | TurnedAway
    | AdoptedHere
    | KvLanded
    | KvNotLanded
    | SeatTaken
    | Drew
    | BlocksLost
    | CallEnded
    | AbortAsked
    | RivalCame
    | TimeOver
    | RouterLost
    | Moved
    | Broken
)

# ---- Actions ----


@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """Answer its Reserve call, if it still waits."""

    result: Ticket | KaveriError | None
    """None: the request was aborted."""


@dataclass(frozen=True, slots=True)
class LeaveLine:
    """Give its place in line up."""


@dataclass(frozen=True, slots=True)
class KeepPlace:
    """It waits on, at its place in line."""


@dataclass(frozen=True, slots=True)
class AbortInEngine:
    """End it in the engine, which frees its blocks."""


@dataclass(frozen=True, slots=True)
class TellRouter:
    """Send its router, behind the tokens, that it cannot go on here."""

    error: str
    replaced: bool = False
    """Another request with the same id has begun."""
    moved: bool = False
    """It is to be resumed from its copy."""
    fault: EngineError | EngineBroke | None = None
    """The engine has raised an exception."""


@dataclass(frozen=True, slots=True)
class KeepTokens:
    """Send its router nothing more, and keep the tokens for one that attaches; to that one they end with `error`."""

    error: str


@dataclass(frozen=True, slots=True)
class DropTokens:
    """Forget the tokens that were not sent."""


@dataclass(frozen=True, slots=True)
class CountLanding:
    """Note in the metrics that its KV has landed."""

    kv_bytes: int
    landing_s: float


@dataclass(frozen=True, slots=True)
class CountPreemption:
    """Note in the metrics that it was preempted."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Where a finished request spent its time here."""

    queue_s: float
    decode_s: float
    preemptions: int
    held_tokens: int = 0
    """Of a resumed one: tokens whose KV came from a copy."""
    recomputed_tokens: int = 0
    """Of a resumed one: tokens that the copy lacked."""


@dataclass(frozen=True, slots=True)
class NoteEnd:
    """Note its end in metrics and log. The last action of every life."""

    outcome: DecodeOutcome
    reason: str | None = None
    preemptions: int = 0
    times: RequestTimes | None = None
    """Of a finished one."""


Action = (
    AnswerReserve
    | LeaveLine
    | KeepPlace
    | AbortInEngine
    | TellRouter
    | KeepTokens
    | DropTokens
    | CountLanding
    | CountPreemption
    | NoteEnd
)
Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float) -> Step:
    """The next state, and what to do. An impossible pair is an AssertionError that names both."""
    match event, state:
        case Drew(), Running():
            return _drew(state, event, now_s)
        case RoomAsked(), InLine():
            return Reserving(state.stays, now_s), ()
        case RoomGranted(), Reserving():
            return Reserved(state.asked_s), (LeaveLine(), AnswerReserve(event.ticket))
        case RoomRefused(NoCapacity()), Reserving(stays=True):
            return InLine(stays=True), (KeepPlace(),)
        case RoomRefused(), Reserving():
            return _refused(state, event.error)
        case TurnedAway(), InLine():
            return _refused(state, event.error)
        case AdoptedHere(), Reserving():
            return Ready(now_s), ()
        case KvLanded(), Reserved():
            return Ready(now_s), (CountLanding(event.kv_bytes, now_s - state.asked_s),)
        case KvNotLanded(), Reserving() | Reserved():
            # Reserving: the reservation has expired before its grant was heard of.
            return _ended(state, DecodeOutcome.NOT_LANDED, reason=event.reason)
        case SeatTaken(), Ready():
            return Running(state.landed_s, None, 0, state.preemptions, state.holds_blocks), ()
        case BlocksLost(), Ready():
            return replace(state, preemptions=state.preemptions + 1, holds_blocks=False), (CountPreemption(),)
        case BlocksLost(), Running():
            return state._replace(preemptions=state.preemptions + 1, holds_blocks=False), (CountPreemption(),)
        case RouterLost(), InLine():
            # It has no tokens yet: its router may open a stream before it has.
            return state, ()
        case Moved(holder_id), Ready() | Running():
            tell = TellRouter(f"it goes on at {holder_id}", moved=True)
            return _ended(state, DecodeOutcome.MOVED, tell=tell, aborts=False)
        case ((CallEnded() | AbortAsked() | RivalCame() | TimeOver() | RouterLost() | Broken()), live) if (
            not isinstance(live, Released)
        ):
            return _given_up(live, event)
        case _:
            raise AssertionError(f"{event!r} in state {state!r}")


def _drew(state: Running, event: Drew, now_s: float) -> Step:
    first_step_s = now_s if state.first_step_s is None else state.first_step_s
    if not event.is_last:
        return Running(state.landed_s, first_step_s, state.drawn + 1, state.preemptions), ()
    times = RequestTimes(first_step_s - state.landed_s, now_s - first_step_s, state.preemptions)
    outcome = DecodeOutcome.FINISHED
    return Released(outcome), (NoteEnd(outcome, preemptions=state.preemptions, times=times),)


def _refused(state: InLine | Reserving, error: KaveriError) -> Step:
    match error:
        case NoCapacity():
            return _ended(state, DecodeOutcome.NO_ROOM, error)
        case EngineError():
            return _ended(state, DecodeOutcome.FAILED, Unavailable(str(error)), str(error))
        case _:
            return _ended(state, DecodeOutcome.REFUSED, error, str(error))


def _given_up(state: State, event: CallEnded | AbortAsked | RivalCame | TimeOver | RouterLost | Broken) -> Step:
    match event:
        case CallEnded() | AbortAsked() if isinstance(state, InLine):
            return _ended(state, DecodeOutcome.LEFT_LINE)
        case AbortAsked(by_router=True) if isinstance(state, Running):
            # The router may have all it needs, a stop text for instance, and die before its client has it.
            return _ended(state, DecodeOutcome.ABORTED, tell=KeepTokens("it was aborted"))
        case CallEnded() | AbortAsked(by_router=True):
            return _ended(state, DecodeOutcome.ABORTED)
        case AbortAsked():
            # Once it has landed, its router may wait for nothing but this instance's tokens.
            tell = TellRouter("its prefill instance has given the request up") if _has_landed(state) else None
            return _ended(state, DecodeOutcome.ABORTED, tell=tell)
        case RivalCame(Rival.OTHER_REQUEST, error):
            tell = TellRouter("another request with the same id has begun", replaced=True)
            return _ended(state, DecodeOutcome.REPLACED, error, tell=tell)
        case RivalCame(Rival.SAME_OWNER, error) if _has_landed(state):
            return _ended(state, DecodeOutcome.REPLACED, error, tell=TellRouter("its room was asked for again"))
        case RivalCame(_, error):
            return _ended(state, DecodeOutcome.REPLACED, error)
        case TimeOver():
            return _ended(state, DecodeOutcome.DEADLINE, DeadlineExceeded())
        case RouterLost():
            return _ended(state, DecodeOutcome.ROUTER_GONE, tell=TellRouter("its router was away for too long"))
        case Broken(error):
            # Not aborted once it has landed: the engine has ended it, or ends with this process. An abort would have
            # the holder drop the copy from which it can go on.
            tell = TellRouter(error.reason, fault=error if isinstance(error, EngineError | EngineBroke) else None)
            return _ended(state, DecodeOutcome.FAILED, error, str(error), tell, aborts=not _has_landed(state))


def _ended(
    state: State,
    outcome: DecodeOutcome,
    error: KaveriError | None = None,
    reason: str | None = None,
    tell: TellRouter | KeepTokens | None = None,
    aborts: bool = True,
) -> Step:
    """error: for its Reserve call, if that waits; None: it was aborted. tell: left out in line, where nothing has been
    said to its router."""
    preemptions = state.preemptions if isinstance(state, Ready | Running) else 0
    report = NoteEnd(outcome, reason, preemptions)
    actions: tuple[Action, ...] = ()
    if isinstance(state, InLine | Reserving):
        actions = (LeaveLine(), AnswerReserve(error))
    if not isinstance(state, InLine):
        actions = (*actions, *((AbortInEngine(),) if aborts else ()), DropTokens() if tell is None else tell)
    return Released(outcome), (*actions, report)


def _has_landed(state: State) -> bool:
    return isinstance(state, Ready | Running)
