"""Requests of a prefill instance, each with a log of reports for its router, and the interface for the hand-over to
decode. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Ownership, Term
from kaveri.engine.contract import EngineRequest, KvPushFailed
from kaveri.errors import KaveriError
from kaveri.lives.prompt import FirstTokenDrawn, HandOverReport, Progress, PromptScored

_Kind = type[Progress] | int
"""Key of a report; for parts of the prompt's log-probabilities, the first position."""


@dataclass(frozen=True, slots=True)
class PromptNews:
    """Unsent reports on one request at prefill, for its router."""

    request_id: str
    term: Term
    progress: tuple[Progress, ...] = ()
    ended: bool = False
    error: KaveriError | None = None
    """Cause of the end; None: see the progress."""


@dataclass(eq=False, slots=True)
class ReportLog:
    """Reports on one request at prefill: the latest of each kind, and the prompt's log-probabilities in parts."""

    ended: bool = False
    error: KaveriError | None = None
    """Cause of the end; None: not ended, or see the last entry."""
    first_token: FirstTokenDrawn | None = None
    """The token that prefill drew; None: not yet."""
    _told: dict[_Kind, Progress] = field(default_factory=dict)
    _unsent: dict[_Kind, Progress] = field(default_factory=dict)
    _end_is_unsent: bool = False

    def put(self, progress: Progress) -> None:
        """Add a report. It replaces an earlier one of its kind, such as a former placement."""
        kind: _Kind = progress.first if isinstance(progress, PromptScored) else type(progress)
        self._told[kind] = self._unsent[kind] = progress
        if isinstance(progress, FirstTokenDrawn):
            self.first_token = progress

    def end(self, error: KaveriError | None) -> None:
        """End the log. error: why the request failed; None: see the last report."""
        self.ended = self._end_is_unsent = True
        self.error = error

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) or self._end_is_unsent

    def forget_report(self) -> None:
        """Drop the prompt's log-probabilities, so that repeat() does not send them; unsent parts are still sent."""
        self._told = {kind: told for kind, told in self._told.items() if not isinstance(told, PromptScored)}

    def repeat(self) -> None:
        """Mark all reports as unsent, for another stream or another router."""
        self._unsent, self._end_is_unsent = dict(self._told), self.ended

    def take(self, request_id: str, term: Term) -> PromptNews:
        """Return the unsent reports, in order, and mark them as sent."""
        news = PromptNews(request_id, term, tuple(self._unsent.values()), self._end_is_unsent, self.error)
        self._unsent, self._end_is_unsent = {}, False
        return news


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """One attempt of a request at prefill. deadline_s is time.monotonic()'s, as uvloop's clock counts in
    milliseconds."""

    request_id: str
    ownership: Ownership
    """Its router gets the reports."""
    engine_request: EngineRequest
    token_count: int
    """Tokens to compute: the prompt and what earlier attempts generated."""
    deadline_s: float
    predicted_length: TokenRange | None = None
    """Length of the whole answer, earlier attempts included. None: unknown. Fixed when a place is searched for."""
    silent_decode_ids: frozenset[str] = frozenset()
    """Decode instances that do not answer its router."""
    traceparent: str = ""
    """The parent span. Empty: not traced."""
    placement_count: int = 0
    """Number of Reserve calls, at all instances."""
    log: ReportLog = field(default_factory=ReportLog)


class HandOver(Protocol):
    """Moves prefilled requests to a decode instance, or to the decode side of the same engine."""

    report: Callable[[PrefillRequest, HandOverReport], None]
    """Set by the prefill side, and called with each report; it may end the request within the call."""
    at_first_token: Callable[[], bool]
    """True if requests are placed at their first token now, not before."""

    async def run(self) -> None:
        """Serve hand-overs until cancelled; begin() is called only while this runs."""

    def begin(self, request: PrefillRequest) -> None:
        """Begin a request's hand-over to decode, also before its prompt is computed unless at_first_token()."""

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Search for another decode instance after a failed push of the request's KV."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """End the hand-over of a request. handed_over: False if decode has not taken it."""
