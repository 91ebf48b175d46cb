"""A request's life on a decode instance, as a value. Pure: no clock, no waiting, no I/O, no protobuf.

    InLine <-> Reserving -> Reserved -> Ready -> Running    from every state: Released
                 +--- adopted ---------^

step() returns the next state and the actions for the service, in order.
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
    """It waits in line for room."""

    stays: bool
    """It may wait if there is no room now."""


@dataclass(frozen=True, slots=True)
class Reserving:
    """The engine is asked to reserve its room, or to adopt it."""

    stays: bool
    asked_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """It has room; its KV is expected."""

    asked_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Its KV has landed, and it waits for a seat in the batch."""

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
    """False: preempted, and no token drawn since."""


class DecodeOutcome(enum.StrEnum):
    """How a request ended here."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REPLACED = "replaced"
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    LEFT_LINE = "left_line"
    """Its Reserve call ended before it had room."""
    REFUSED = "refused"
    NOT_LANDED = "not_landed"
    ROUTER_GONE = "router_gone"
    MOVED = "moved"
    """The holder of its copy continues it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Released:
    """It ended here, and holds nothing."""

    outcome: DecodeOutcome


State = InLine | Reserving | Reserved | Ready | Running | Released

# ---- Events ----


class BareEvent(enum.Enum):
    """Events without data."""

    ROOM_ASKED = enum.auto()
    """The request is next in line: the service asks the engine."""
    ADOPTED = enum.auto()
    """The engine that has prefilled the request decodes it."""
    SEAT_TAKEN = enum.auto()
    """It joins the batch."""
    BLOCKS_LOST = enum.auto()
    """The engine has preempted it."""
    CALL_ENDED = enum.auto()
    """Its Reserve call was cancelled."""
    TIME_OVER = enum.auto()
    """Its deadline has passed."""
    ROUTER_LOST = enum.auto()
    """Its router had no stream for the whole grace time."""


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
    """It may not wait: its call forbids it, the line is full, or the instance drains."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class KvLanded:
    """All its KV is here."""

    kv_bytes: int


@dataclass(frozen=True, slots=True)
class KvNotLanded:
    """Its KV will not come. The prefill side is told by its push."""

    reason: str


class Drew(NamedTuple):
    """The engine has drawn a token for it."""

    is_last: bool


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """Its prefill instance or its router aborts it."""

    by_router: bool


class Rival(enum.Enum):
    """The kind of a request that replaces another."""

    NEWER_OWNER = "newer owner"
    """A newer attempt or session."""
    SAME_OWNER = "same owner"
    """Prefill missed the landing. The router may have tokens, and wait for more."""
    OTHER_REQUEST = "other request"
    """The former router must not place it again: the two would replace each other in turn."""


@dataclass(frozen=True, slots=True)
class RivalCame:
    """Room is asked for under the same request id."""

    rival: Rival
    error: KaveriError
    """Answer to the former Reserve call, if it still waits."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The engine has released it: the holder of its copy has the KV of all tokens but the last."""

    holder_id: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine failed it, or the instance ends."""

    error: EngineError | Unavailable
    """EngineError: it must not be placed again."""


Event = (
    BareEvent
    | RoomGranted
    | RoomRefused
    | TurnedAway
    | KvLanded
    | KvNotLanded
    | Drew
    | AbortAsked
    | RivalCame
    | Moved
    | Broken
)

# ---- Actions ----


class BareAction(enum.Enum):
    """Actions without data."""

    LEAVE_LINE = enum.auto()
    """Give up its place in line."""
    KEEP_PLACE = enum.auto()
    """Keep it waiting, at its place in line."""
    ABORT_IN_ENGINE = enum.auto()
    """End it in the engine, which frees its blocks."""
    DROP_TOKENS = enum.auto()
    """Forget unsent tokens."""
    COUNT_PREEMPTION = enum.auto()
    """Count a preemption."""


@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """Answer its Reserve call, if it still waits."""

    result: Ticket | KaveriError | None
    """None: the request was aborted."""


@dataclass(frozen=True, slots=True)
class TellRouter:
    """Send its router the error that ends it here, after the tokens."""

    error: str
    replaced: bool = False
    """Another request with the same id has begun."""
    moved: bool = False
    """The router resumes it from its copy."""
    fault: EngineError | EngineBroke | None = None
    """The exception that the engine raised."""


@dataclass(frozen=True, slots=True)
class KeepTokens:
    """Send its router nothing more. Keep the tokens, which end with `error`, for a router that attaches."""

    error: str


@dataclass(frozen=True, slots=True)
class CountLanding:
    """Count a landing."""

    kv_bytes: int
    landing_s: float


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a finished request."""

    queue_s: float
    decode_s: float
    preemptions: int
    held_tokens: int = 0
    """Resumed requests: tokens whose KV came from a copy."""
    recomputed_tokens: int = 0
    """Resumed requests: tokens that the copy lacked."""


@dataclass(frozen=True, slots=True)
class NoteEnd:
    """Log and count its end. The last action of every life."""

    outcome: DecodeOutcome
    reason: str | None = None
    preemptions: int = 0
    times: RequestTimes | None = None
    """None unless it finished."""


Action = BareAction | AnswerReserve | TellRouter | KeepTokens | CountLanding | NoteEnd
Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float) -> Step:
    """The next state and the actions. An impossible pair raises an AssertionError that names both."""
    match event, state:
        case Drew(), Running():
            first_step_s = now_s if state.first_step_s is None else state.first_step_s
            if not event.is_last:
                return Running(state.landed_s, first_step_s, state.drawn + 1, state.preemptions), ()
            times = RequestTimes(first_step_s - state.landed_s, now_s - first_step_s, state.preemptions)
            finished = NoteEnd(DecodeOutcome.FINISHED, preemptions=state.preemptions, times=times)
            return Released(DecodeOutcome.FINISHED), (finished,)
        case BareEvent.ROOM_ASKED, InLine():
            return Reserving(state.stays, now_s), ()
        case RoomGranted(), Reserving():
            return Reserved(state.asked_s), (BareAction.LEAVE_LINE, AnswerReserve(event.ticket))
        case RoomRefused(NoCapacity()), Reserving(stays=True):
            return InLine(stays=True), (BareAction.KEEP_PLACE,)
        case RoomRefused(), Reserving():
            return _refused(state, event.error)
        case TurnedAway(), InLine():
            return _refused(state, event.error)
        case BareEvent.ADOPTED, Reserving():
            return Ready(now_s), ()
        case KvLanded(), Reserved():
            return Ready(now_s), (CountLanding(event.kv_bytes, now_s - state.asked_s),)
        case KvNotLanded(), Reserving() | Reserved():
            # Reserving: the reservation expired before its grant arrived.
            return _ended(state, DecodeOutcome.NOT_LANDED, reason=event.reason)
        case BareEvent.SEAT_TAKEN, Ready():
            return Running(state.landed_s, None, 0, state.preemptions, state.holds_blocks), ()
        case BareEvent.BLOCKS_LOST, Ready():
            return replace(state, preemptions=state.preemptions + 1, holds_blocks=False), (BareAction.COUNT_PREEMPTION,)
        case BareEvent.BLOCKS_LOST, Running():
            return state._replace(preemptions=state.preemptions + 1, holds_blocks=False), (BareAction.COUNT_PREEMPTION,)
        case BareEvent.ROUTER_LOST, InLine():
            # It has no tokens yet: its router may still open a stream in time.
            return state, ()
        case Moved(holder_id), Ready() | Running():
            tell = TellRouter(f"it goes on at {holder_id}", moved=True)
            return _ended(state, DecodeOutcome.MOVED, tell=tell, aborts=False)
        case _:
            return _end_early(state, event)


def _refused(state: InLine | Reserving, error: KaveriError) -> Step:
    match error:
        case NoCapacity():
            return _ended(state, DecodeOutcome.NO_ROOM, error)
        case EngineError():
            return _ended(state, DecodeOutcome.FAILED, Unavailable(str(error)), str(error))
        case _:
            return _ended(state, DecodeOutcome.REFUSED, error, str(error))


def _end_early(state: State, event: Event) -> Step:
    match event:
        case _ if isinstance(state, Released):
            pass
        case BareEvent.CALL_ENDED | AbortAsked() if isinstance(state, InLine):
            return _ended(state, DecodeOutcome.LEFT_LINE)
        case AbortAsked(by_router=True) if isinstance(state, Running):
            # The router may have all it needs, a stop text for instance, and die before its client has it.
            return _ended(state, DecodeOutcome.ABORTED, tell=KeepTokens("it was aborted"))
        case BareEvent.CALL_ENDED | AbortAsked(by_router=True):
            return _ended(state, DecodeOutcome.ABORTED)
        case AbortAsked():
            # After the landing, its router may wait for this instance's tokens alone.
            tell = TellRouter("its prefill instance has given the request up") if _has_landed(state) else None
            return _ended(state, DecodeOutcome.ABORTED, tell=tell)
        case RivalCame(Rival.OTHER_REQUEST, error):
            tell = TellRouter("another request with the same id has begun", replaced=True)
            return _ended(state, DecodeOutcome.REPLACED, error, tell=tell)
        case RivalCame(Rival.SAME_OWNER, error) if _has_landed(state):
            return _ended(state, DecodeOutcome.REPLACED, error, tell=TellRouter("its room was asked for again"))
        case RivalCame(_, error):
            return _ended(state, DecodeOutcome.REPLACED, error)
        case BareEvent.TIME_OVER:
            return _ended(state, DecodeOutcome.DEADLINE, DeadlineExceeded())
        case BareEvent.ROUTER_LOST:
            return _ended(state, DecodeOutcome.ROUTER_GONE, tell=TellRouter("its router was away for too long"))
        case Broken(error):
            # Not aborted after the landing: the engine has ended it, or ends with this process. An abort would make
            # the holder drop the copy from which it can be resumed.
            tell = TellRouter(error.reason, fault=error if isinstance(error, EngineError | EngineBroke) else None)
            return _ended(state, DecodeOutcome.FAILED, error, str(error), tell, aborts=not _has_landed(state))
    raise AssertionError(f"{event!r} in state {state!r}")


def _ended(
    state: State,
    outcome: DecodeOutcome,
    error: KaveriError | None = None,
    reason: str | None = None,
    tell: TellRouter | KeepTokens | None = None,
    aborts: bool = True,
) -> Step:
    """error: answer to its Reserve call, if that waits; None: it was aborted. tell: ignored in line, where its router
    knows nothing of this instance."""
    preemptions = state.preemptions if isinstance(state, Ready | Running) else 0
    report = NoteEnd(outcome, reason, preemptions)
    actions: tuple[Action, ...] = ()
    if isinstance(state, InLine | Reserving):
        actions = (BareAction.LEAVE_LINE, AnswerReserve(error))
    if not isinstance(state, InLine):
        actions += (BareAction.ABORT_IN_ENGINE,) if aborts else ()
        actions += (BareAction.DROP_TOKENS if tell is None else tell,)
    return Released(outcome), (*actions, report)


def _has_landed(state: State) -> bool:
    return isinstance(state, Ready | Running)
