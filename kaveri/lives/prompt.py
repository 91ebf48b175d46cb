"""State machine of a request at prefill. Pure: no clock, no I/O.

::

    AwaitingLength ── Queued ── ComputingPrompt ── Placing ⇄ Pushing ── Ended

A request is AwaitingLength only if the queue's order needs its length. Every state may become Ended. The search for
room at decode, and the push, may begin before the prompt is computed. The service performs the actions in order, after
it has stored the new state.
"""

import enum
from dataclasses import dataclass, replace

from kaveri.domain.length import TokenRange
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.blame import error_of_failure
from kaveri.engine.contract import (
    FirstToken,
    KvPushed,
    KvPushFailed,
    PrefillProgress,
    PrefillStarted,
    PromptLogprobs,
    RequestFailed,
)
from kaveri.errors import DeadlineExceeded, KaveriError
from kaveri.policy.prediction import PredictionOutcome, usable_length
from kaveri.policy.room_search import PlaceSearch

NO_TRANSPORT = "none"
"""Transport of a hand-over without a push."""


@dataclass(frozen=True, slots=True)
class Started:
    """Report on a request at prefill, for its router: the engine has begun its first chunk."""

    queue_s: float


@dataclass(frozen=True, slots=True)
class RoomReserved:
    """Report on a request at prefill, for its router: a decode instance has reserved room; the push begins."""

    decode_instance_id: str
    decode_incarnation: int


@dataclass(frozen=True, slots=True)
class FirstTokenDrawn:
    """Report on a request at prefill, for its router: its first token is sampled. With `finish`, the last report."""

    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None
    prefill_s: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Report on a request at prefill, for its router: decode has taken it over; the last report."""

    kv_bytes: int
    kv_transfer_s: float
    kv_tail_s: float
    kv_transport: str
    kept_tokens: int = 0
    """Tokens whose KV stays on the prefill instance, as a copy to resume from."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Report on a request at prefill, for its router: log-probabilities of prompt tokens from `first` on."""

    first: int
    entries: tuple[Logprobs, ...]


Progress = Started | RoomReserved | PromptScored | FirstTokenDrawn | HandedOver


@dataclass(frozen=True, slots=True)
class Adopted:
    """Report of a hand-over to decode: the engine that computed the prompt decodes it too, without a push."""

    placed: RoomReserved


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """Report of a hand-over to decode: it failed, which ends the request at prefill."""

    error: KaveriError


HandOverReport = RoomReserved | Adopted | HandOverFailed
"""Reports of a hand-over. RoomReserved: room is reserved and the push has begun."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Constants of one request at prefill: arrival time and token counts."""

    arrived_s: float
    token_count: int
    generated_count: int
    """Tokens that earlier attempts generated."""
    most_tokens: int
    """The longest answer that may be generated, earlier attempts included."""
    place_search: PlaceSearch
    least_tokens: int = 0
    """The shortest answer, earlier attempts included: min_tokens."""


@dataclass(frozen=True, slots=True)
class Known:
    """Answer length of a request at prefill, without a pending prediction; None: unknown."""

    length: TokenRange | None


@dataclass(frozen=True, slots=True)
class LengthPending:
    """Answer length of a request at prefill: the predictor has not responded yet."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Answer length of a request at prefill, as the predictor responded."""

    length: TokenRange


Forecast = Known | LengthPending | Predicted


@dataclass(frozen=True, slots=True)
class FirstChunkBegun:
    """Progress of a prompt at prefill: the engine has begun its first chunk."""

    started_s: float
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Progress of a prompt at prefill: it is computed, and the first token is sampled."""

    first_token_s: float


@dataclass(frozen=True, slots=True)
class AwaitingLength:
    """State of a request at prefill: it waits for a predicted answer length, and is queued afterwards."""

    terms: Terms


@dataclass(frozen=True, slots=True)
class Queued:
    """State of a request at prefill: it waits for its first chunk, in the queue or in the engine."""

    terms: Terms
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ComputingPrompt:
    """State of a request at prefill: its prompt is being computed; the search for a decode instance has not begun."""

    terms: Terms
    compute: FirstChunkBegun
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Placing:
    """State of a request at prefill: a decode instance with free KV blocks for it is searched for."""

    terms: Terms
    compute: FirstChunkBegun | PromptComputed


@dataclass(frozen=True, slots=True)
class Pushing:
    """State of a request at prefill: its KV is being pushed to the decode instance that has reserved room."""

    terms: Terms
    compute: FirstChunkBegun | PromptComputed
    since_s: float


class Outcome(enum.StrEnum):
    """Reason for a request's end on a prefill instance."""

    HANDED_OVER = "handed_over"
    FINISHED = "finished"
    """The first token is the last one."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused"
    """Replaced by a newer attempt or by another router's request."""
    GIVEN_BACK = "given_back"
    """Not begun, and the instance drains, ceases to prefill, or has a longer queue than another."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """State of a request at prefill: it has ended on this instance."""

    outcome: Outcome


Alive = AwaitingLength | Queued | ComputingPrompt | Placing | Pushing
State = Alive | Ended


@dataclass(frozen=True, slots=True)
class LengthAnswered:
    """Event for a request at prefill: the predictor has responded; None: without a prediction."""

    length: TokenRange | None


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Event for a request at prefill: it must end now. error: sent to its router."""

    outcome: Outcome
    error: KaveriError | None = None


EngineReport = PrefillStarted | PrefillProgress | PromptLogprobs | FirstToken | KvPushed | KvPushFailed | RequestFailed
Event = EngineReport | LengthAnswered | RoomReserved | Adopted | HandOverFailed | EndRequested


class BareAction(enum.Enum):
    """Action for a request at prefill, without data."""

    ENQUEUE = enum.auto()
    """Move the held request into the line."""
    LEAVE_QUEUE = enum.auto()
    """Remove the request from the queue and its count of prompts under way."""
    DROP_QUESTION = enum.auto()
    """Ignore the predictor's answer."""
    ABORT_IN_ENGINE = enum.auto()


@dataclass(frozen=True, slots=True)
class Advance:
    """Action for a request at prefill: record that the engine has computed the prompt up to `computed_tokens`."""

    computed_tokens: int
    new_tokens: int
    """Tokens since the last Advance."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """Action for a request at prefill: send its router a progress report."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class CountPrediction:
    """Action for a request at prefill: count how its predicted length was used. LATE: ignore a later prediction."""

    outcome: PredictionOutcome


@dataclass(frozen=True, slots=True)
class FindPlace:
    """Action for a request at prefill: begin its hand-over to decode. length: of the whole answer; None: unknown."""

    length: TokenRange | None


@dataclass(frozen=True, slots=True)
class FindAnotherPlace:
    """Action for a request at prefill: search for another decode instance after a failed push."""

    failure: KvPushFailed


@dataclass(frozen=True, slots=True)
class EndHandOver:
    """Action for a request at prefill: end its hand-over; give back room at decode unless `handed_over`."""

    handed_over: bool


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Action for a request at prefill: end its report log, count and log its end; always the last action."""

    outcome: Outcome
    error: KaveriError | None
    seconds: float
    """From the request's arrival to its end."""


Action = BareAction | Advance | SendReport | CountPrediction | FindPlace | FindAnotherPlace | EndHandOver | RecordEnd
Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float) -> Step:
    """Return the next state of a request at prefill and the actions. An impossible event raises AssertionError."""
    assert not isinstance(state, Ended), f"{event} in {state}"
    terms = state.terms
    match event:
        case EndRequested():
            return _end(state, event.outcome, now_s, error=event.error)
        case HandOverFailed():
            outcome = Outcome.DEADLINE if isinstance(event.error, DeadlineExceeded) else Outcome.FAILED
            return _end(state, outcome, now_s, error=event.error)
        case RequestFailed():
            return _end(state, Outcome.FAILED, now_s, error=error_of_failure(event))
    match state, event:
        case AwaitingLength(), LengthAnswered():
            return Queued(terms, _answered(event)), (BareAction.ENQUEUE,)
        case Queued(forecast=LengthPending()), LengthAnswered():
            return Queued(terms, _answered(event)), ()
        case ComputingPrompt(forecast=LengthPending()), LengthAnswered():
            return _search_if_due(replace(state, forecast=_answered(event)))
        case Queued(), PrefillStarted():
            started = SendReport(Started(now_s - terms.arrived_s))
            return _search_if_due(ComputingPrompt(terms, FirstChunkBegun(now_s), state.forecast), started)
        case ComputingPrompt() | Placing() | Pushing(), PrefillProgress() if isinstance(state.compute, FirstChunkBegun):
            advance = Advance(event.computed_tokens, event.computed_tokens - state.compute.computed_tokens)
            after = replace(state, compute=replace(state.compute, computed_tokens=event.computed_tokens))
            return _search_if_due(after, advance)
        case ComputingPrompt() | Placing() | Pushing(), PromptLogprobs() if isinstance(state.compute, FirstChunkBegun):
            return state, (SendReport(PromptScored(event.first, event.entries)),)
        case ComputingPrompt() | Placing() | Pushing(), FirstToken() if isinstance(state.compute, FirstChunkBegun):
            return _first_token(state, state.compute, event, now_s)
        case Placing(), RoomReserved():
            return Pushing(terms, state.compute, now_s), (SendReport(event),)
        case Placing(compute=PromptComputed() as compute), Adopted():
            handed_over = HandedOver(0, 0.0, now_s - compute.first_token_s, NO_TRANSPORT)
            return _end(state, Outcome.HANDED_OVER, now_s, SendReport(event.placed), SendReport(handed_over))
        case Pushing(compute=PromptComputed() as compute), KvPushed():
            transfer_s, tail_s = now_s - state.since_s, now_s - compute.first_token_s
            handed_over = HandedOver(event.kv_bytes, transfer_s, tail_s, event.transport, event.kept_tokens)
            return _end(state, Outcome.HANDED_OVER, now_s, SendReport(handed_over))
        case Pushing(), KvPushFailed():
            return Placing(terms, state.compute), (FindAnotherPlace(event),)
    raise AssertionError(f"{event} in {state}")


def _answered(event: LengthAnswered) -> Forecast:
    return Known(None) if event.length is None else Predicted(event.length)


def _first_token(
    state: ComputingPrompt | Placing | Pushing, compute: FirstChunkBegun, event: FirstToken, now_s: float
) -> Step:
    token_count = state.terms.token_count
    advance = Advance(token_count, token_count - compute.computed_tokens)
    prefill_s = now_s - compute.started_s
    drawn = SendReport(FirstTokenDrawn(event.token_id, event.logprobs, event.finish, prefill_s, event.cached_tokens))
    if event.finish is not None:
        return _end(state, Outcome.FINISHED, now_s, advance, drawn)
    if isinstance(state, ComputingPrompt):
        return _search(state.terms, PromptComputed(now_s), state.forecast, advance, drawn)
    return replace(state, compute=PromptComputed(now_s)), (advance, drawn)


def _search_if_due(state: ComputingPrompt | Placing | Pushing, *actions: Action) -> Step:
    if not isinstance(state, ComputingPrompt):
        return state, actions
    match state.terms.place_search:
        case PlaceSearch.AT_START:
            # The length may still come within the first chunk.
            is_due = state.compute.computed_tokens > 0 or not isinstance(state.forecast, LengthPending)
        case PlaceSearch.AFTER_FIRST_CHUNK:
            is_due = state.compute.computed_tokens > 0
        case PlaceSearch.AFTER_FIRST_TOKEN:
            is_due = False
    return _search(state.terms, state.compute, state.forecast, *actions) if is_due else (state, actions)


def _search(terms: Terms, compute: FirstChunkBegun | PromptComputed, forecast: Forecast, *actions: Action) -> Step:
    length = None
    match forecast:
        case Known():
            length = forecast.length
        case LengthPending():
            actions = (*actions, CountPrediction(PredictionOutcome.LATE))
        case Predicted():
            length = usable_length(forecast.length, terms.generated_count, terms.most_tokens, terms.least_tokens)
            outcome = PredictionOutcome.OUTLIVED if length is None else PredictionOutcome.USED
            actions = (*actions, CountPrediction(outcome))
    return Placing(terms, compute), (*actions, FindPlace(length))


def _end(state: Alive, outcome: Outcome, now_s: float, *actions: Action, error: KaveriError | None = None) -> Step:
    ends = list(actions)
    match state:
        case AwaitingLength() | Queued(forecast=LengthPending()) | ComputingPrompt(forecast=LengthPending()):
            ends.append(BareAction.DROP_QUESTION)
    match state:
        case AwaitingLength() | Queued():
            ends.append(BareAction.LEAVE_QUEUE)
        case _ if isinstance(state.compute, FirstChunkBegun) and outcome is not Outcome.FINISHED:
            ends.append(BareAction.LEAVE_QUEUE)
    if isinstance(state, Placing | Pushing):
        ends.append(EndHandOver(outcome is Outcome.HANDED_OVER))
    if outcome not in (Outcome.HANDED_OVER, Outcome.FINISHED):
        ends.append(BareAction.ABORT_IN_ENGINE)
    return Ended(outcome), (*ends, RecordEnd(outcome, error, now_s - state.terms.arrived_s))
