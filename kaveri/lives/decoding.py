"""State machine of a request on a decode instance. Pure: no clock, no waiting, no I/O, no protobuf.

    InLine <-> Reserving -> Reserved -> Landed -> Running    from every state: Ended
                  +--- adopted ---------^

step() returns the next state and the actions for the service, in order.
"""

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from kaveri.errors import DeadlineExceeded, EngineBroke, EngineError, KaveriError, NoCapacity, Unavailable
from kaveri.kv.transfer.ticket import Ticket


@dataclass(frozen=True, slots=True)
class InLine:
    """State of a request at decode: it waits in line for free KV blocks."""

    stays: bool
    """True if the request may wait when there is no room now."""


@dataclass(frozen=True, slots=True)
class Reserving:
    """State of a request at decode: the engine was asked for KV blocks, or to take it over from its own prefill."""

    stays: bool
    asked_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """State of a request at decode: KV blocks are reserved, and a push of its KV is expected."""

    asked_s: float


@dataclass(frozen=True, slots=True)
class Landed:
    """State of a request at decode: its KV has arrived; it waits to join the running batch."""

    landed_s: float
    preemptions: int = 0
    holds_blocks: bool = True


class Running(NamedTuple):
    """State of a request at decode: it is in the running batch. A tuple, because each token creates a new one."""

    landed_s: float
    first_step_s: float | None = None
    drawn: int = 0
    """Number of tokens sampled on this instance."""
    preemptions: int = 0
    holds_blocks: bool = True
    """False after a preemption, until the next token."""


class Outcome(enum.StrEnum):
    """Reason for a request's end on a decode instance."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REPLACED = "replaced"
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    LEFT_LINE = "left_line"
    """The Reserve call ended before room was granted."""
    REFUSED = "refused"
    NOT_LANDED = "not_landed"
    ROUTER_GONE = "router_gone"
    MOVED = "moved"
    """The instance that holds the request's KV copy continues it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """State of a request at decode: it has ended on this instance and holds no resources."""

    outcome: Outcome


State = InLine | Reserving | Reserved | Landed | Running | Ended


class BareEvent(enum.Enum):
    ROOM_REQUESTED = enum.auto()
    """The request is next in line; the service asks the engine for room."""
    ADOPTED = enum.auto()
    SEAT_TAKEN = enum.auto()
    """The request joins the batch."""
    BLOCKS_LOST = enum.auto()
    """The engine has preempted the request."""
    CALL_ENDED = enum.auto()
    """The request's Reserve call was cancelled."""
    TIME_OVER = enum.auto()
    """The request's deadline has passed."""
    ROUTER_LOST = enum.auto()
    """The request's router had no stream for the whole grace time."""


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """Event for a request at decode: the engine has reserved KV blocks."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RoomRefused:
    """Event for a request at decode: it gets no KV blocks. The engine refused, or it may not wait in line: its call
    forbids that, the line is full, or the instance drains."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class LandingDone:
    """Event for a request at decode: its whole KV cache has arrived."""

    kv_bytes: int


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """Event for a request at decode: its KV will not arrive. The push reports this to the prefill side."""

    reason: str


class Drew(NamedTuple):
    """Event for a request at decode: the engine has sampled a token."""

    is_last: bool


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Event for a request at decode: its prefill instance or router aborts it."""

    by_router: bool


class Rival(enum.Enum):
    """Relation of a new request to the one with the same id that it replaces."""

    NEWER_OWNER = "newer owner"
    """Same request, newer attempt or session."""
    SAME_OWNER = "same owner"
    """Same attempt: prefill missed the arrival of its KV. The router may have tokens and wait for more."""
    OTHER_REQUEST = "other request"
    """Different request. Its former router must not place it again: the two would replace each other forever."""


@dataclass(frozen=True, slots=True)
class RivalCame:
    """Event for a request at decode: a newer Reserve call with the same request id replaces it."""

    rival: Rival
    error: KaveriError
    """Result of the former Reserve call, if still waiting."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Event for a request at decode: the engine has stopped it; another instance, which has its KV, resumes it."""

    holder_id: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Event for a request at decode: the engine failed on it, or the instance ends."""

    error: EngineError | Unavailable
    """EngineError: the request must not be placed again."""


Event = (
    BareEvent
    | RoomGranted
    | RoomRefused
    | LandingDone
    | LandingFailed
    | Drew
    | EndRequested
    | RivalCame
    | Moved
    | Broken
)


class BareAction(enum.Enum):
    """Action for a request at decode, without data."""

    LEAVE_LINE = enum.auto()
    KEEP_PLACE = enum.auto()
    """Keep the request waiting at its place in line."""
    ABORT_IN_ENGINE = enum.auto()
    """End the request in the engine, which frees its blocks."""
    DROP_TOKENS = enum.auto()
    COUNT_PREEMPTION = enum.auto()


@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """Action for a request at decode: set the result of its Reserve call, if still waiting."""

    result: Ticket | KaveriError | None
    """The ticket or the error; None: the request was aborted."""


@dataclass(frozen=True, slots=True)
class SendError:
    """Action for a request at decode: send its router the error that ends it on this instance, after its tokens."""

    error: str
    replaced: bool = False
    """True if another request with the same id has begun."""
    moved: bool = False
    """True if the router resumes the request from its copy."""
    fault: EngineError | EngineBroke | None = None


@dataclass(frozen=True, slots=True)
class KeepTokens:
    """Action for a request at decode: send its router no more; keep the tokens for a later takeover."""

    error: str


@dataclass(frozen=True, slots=True)
class CountLanding:
    kv_bytes: int
    landing_s: float


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Durations, in seconds, and token counts of a request that has finished at decode."""

    queue_s: float
    decode_s: float
    preemptions: int
    held_tokens: int = 0
    """Tokens of a resumed request whose KV came from a copy."""
    recomputed_tokens: int = 0
    """Tokens of a resumed request that its copy lacked."""


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Action for a request at decode: log and count its end; always the last action."""

    outcome: Outcome
    reason: str | None = None
    preemptions: int = 0
    times: RequestTimes | None = None
    """None unless the request finished."""


Action = BareAction | AnswerReserve | SendError | KeepTokens | CountLanding | RecordEnd
Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float) -> Step:
    """Return the next state of a request at decode and the actions. An impossible event raises AssertionError."""
    match event, state:
        case Drew(), Running():
            first_step_s = now_s if state.first_step_s is None else state.first_step_s
            if not event.is_last:
                return Running(state.landed_s, first_step_s, state.drawn + 1, state.preemptions), ()
            times = RequestTimes(first_step_s - state.landed_s, now_s - first_step_s, state.preemptions)
            finished = RecordEnd(Outcome.FINISHED, preemptions=state.preemptions, times=times)
            return Ended(Outcome.FINISHED), (finished,)
        case BareEvent.ROOM_REQUESTED, InLine():
            return Reserving(state.stays, now_s), ()
        case RoomGranted(), Reserving():
            return Reserved(state.asked_s), (BareAction.LEAVE_LINE, AnswerReserve(event.ticket))
        case RoomRefused(NoCapacity()), Reserving(stays=True):
            return InLine(stays=True), (BareAction.KEEP_PLACE,)
        case RoomRefused(), InLine() | Reserving():
            return _refused(state, event.error)
        case BareEvent.ADOPTED, Reserving():
            return Landed(now_s), ()
        case LandingDone(), Reserved():
            return Landed(now_s), (CountLanding(event.kv_bytes, now_s - state.asked_s),)
        case LandingFailed(), Reserving() | Reserved():
            # The reservation expired before its grant arrived.
            return _ended(state, Outcome.NOT_LANDED, reason=event.reason)
        case BareEvent.SEAT_TAKEN, Landed():
            return Running(state.landed_s, None, 0, state.preemptions, state.holds_blocks), ()
        case BareEvent.BLOCKS_LOST, Landed():
            return replace(state, preemptions=state.preemptions + 1, holds_blocks=False), (BareAction.COUNT_PREEMPTION,)
        case BareEvent.BLOCKS_LOST, Running():
            return state._replace(preemptions=state.preemptions + 1, holds_blocks=False), (BareAction.COUNT_PREEMPTION,)
        case BareEvent.ROUTER_LOST, InLine():
            # The request has no tokens yet: its router may still open a stream in time.
            return state, ()
        case Moved(holder_id), Landed() | Running():
            tell = SendError(f"it goes on at {holder_id}", moved=True)
            return _ended(state, Outcome.MOVED, tell=tell, aborts=False)
        case _:
            return _end_early(state, event)


def _refused(state: InLine | Reserving, error: KaveriError) -> Step:
    match error:
        case NoCapacity():
            return _ended(state, Outcome.NO_ROOM, error)
        case EngineError():
            return _ended(state, Outcome.FAILED, Unavailable(str(error)), str(error))
        case _:
            return _ended(state, Outcome.REFUSED, error, str(error))


def _end_early(state: State, event: Event) -> Step:
    match event:
        case _ if isinstance(state, Ended):
            pass
        case BareEvent.CALL_ENDED | EndRequested() if isinstance(state, InLine):
            return _ended(state, Outcome.LEFT_LINE)
        case EndRequested(by_router=True) if isinstance(state, Running):
            # The router may have all it needs, for instance a stop text, and die before its client has received it.
            return _ended(state, Outcome.ABORTED, tell=KeepTokens("it was aborted"))
        case BareEvent.CALL_ENDED | EndRequested(by_router=True):
            return _ended(state, Outcome.ABORTED)
        case EndRequested():
            # After the landing, the router may wait for tokens of this instance only.
            tell = SendError("its prefill instance has given the request up") if _has_landed(state) else None
            return _ended(state, Outcome.ABORTED, tell=tell)
        case RivalCame(Rival.OTHER_REQUEST, error):
            tell = SendError("another request with the same id has begun", replaced=True)
            return _ended(state, Outcome.REPLACED, error, tell=tell)
        case RivalCame(Rival.SAME_OWNER, error) if _has_landed(state):
            return _ended(state, Outcome.REPLACED, error, tell=SendError("its room was asked for again"))
        case RivalCame(_, error):
            return _ended(state, Outcome.REPLACED, error)
        case BareEvent.TIME_OVER:
            return _ended(state, Outcome.DEADLINE, DeadlineExceeded())
        case BareEvent.ROUTER_LOST:
            return _ended(state, Outcome.ROUTER_GONE, tell=SendError("its router was away for too long"))
        case Broken(error):
            # No abort after the landing: the engine has ended the request, or ends with this process. An abort would
            # make the holder drop the copy from which the request can be resumed.
            tell = SendError(error.reason, fault=error if isinstance(error, EngineError | EngineBroke) else None)
            return _ended(state, Outcome.FAILED, error, str(error), tell, aborts=not _has_landed(state))
    raise AssertionError(f"{event!r} in state {state!r}")


def _ended(
    state: State,
    outcome: Outcome,
    error: KaveriError | None = None,
    reason: str | None = None,
    tell: SendError | KeepTokens | None = None,
    aborts: bool = True,
) -> Step:
    """End the request. error: result of a waiting Reserve call; None: aborted. tell: not sent from the line, as the
    router does not know this instance yet."""
    preemptions = state.preemptions if isinstance(state, Landed | Running) else 0
    report = RecordEnd(outcome, reason, preemptions)
    actions: tuple[Action, ...] = ()
    if isinstance(state, InLine | Reserving):
        actions = (BareAction.LEAVE_LINE, AnswerReserve(error))
    if not isinstance(state, InLine):
        actions += (BareAction.ABORT_IN_ENGINE,) if aborts else ()
        actions += (BareAction.DROP_TOKENS if tell is None else tell,)
    return Ended(outcome), (*actions, report)


def _has_landed(state: State) -> bool:
    return isinstance(state, Landed | Running)
