"""A request at a prefill instance, the log of its router, and the seam to what decodes it. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import EngineRequest, KvPushFailed
from kaveri.errors import KaveriError


@dataclass(frozen=True, slots=True)
class Started:
    """The first chunk has begun."""

    queue_s: float


@dataclass(frozen=True, slots=True)
class RoomReserved:
    """A decode instance has reserved room."""

    decode_instance_id: str
    decode_incarnation: int


@dataclass(frozen=True, slots=True)
class FirstTokenDrawn:
    """The prompt is computed. With `finish` it is the last report."""

    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None
    prefill_s: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Decode has taken the request over. The last report."""

    kv_bytes: int
    kv_transfer_s: float
    kv_tail_s: float
    kv_transport: str


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from position `first` on."""

    first: int
    entries: tuple[Logprobs, ...]


Progress = Started | RoomReserved | PromptScored | FirstTokenDrawn | HandedOver


@dataclass(frozen=True, slots=True)
class Adopted:
    """The engine that computed the prompt decodes it too, without a push."""

    placed: RoomReserved


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """The request cannot be handed over."""

    error: KaveriError


HandOverReport = RoomReserved | Adopted | HandOverFailed
"""Reports of a hand-over. RoomReserved: room is reserved and the push has begun."""


_Kind = type[Progress] | int
"""Key of an entry; for the parts of a prompt's report, the first position."""


@dataclass(frozen=True, slots=True)
class PromptNews:
    """Unsent reports of one request."""

    request_id: str
    owner: Owner
    progress: tuple[Progress, ...] = ()
    ended: bool = False
    error: KaveriError | None = None
    """Cause of the end; None: see the progress."""


@dataclass(eq=False, slots=True)
class ReportLog:
    """Reports on one request: the latest of each kind, and all parts of the prompt's log-probabilities, whose size the
    router limits."""

    ended: bool = False
    error: KaveriError | None = None
    """Cause of the end; None: not ended, or see the last entry."""
    first_token: FirstTokenDrawn | None = None
    """The token that prefill drew; None: not yet."""
    _told: dict[_Kind, Progress] = field(default_factory=dict)
    _unsent: dict[_Kind, Progress] = field(default_factory=dict)
    _end_is_unsent: bool = False

    def put(self, progress: Progress) -> None:
        """Add an entry; a second placement replaces an unsent one."""
        kind: _Kind = progress.first if isinstance(progress, PromptScored) else type(progress)
        self._told[kind] = self._unsent[kind] = progress
        if isinstance(progress, FirstTokenDrawn):
            self.first_token = progress

    def end(self, error: KaveriError | None) -> None:
        """End the log."""
        self.ended = self._end_is_unsent = True
        self.error = error

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) or self._end_is_unsent

    def forget_report(self) -> None:
        """Do not repeat the prompt's log-probabilities. Unsent parts are still sent."""
        self._told = {kind: told for kind, told in self._told.items() if not isinstance(told, PromptScored)}

    def repeat(self) -> None:
        """Mark everything as unsent, for another stream or another router."""
        self._unsent, self._end_is_unsent = dict(self._told), self.ended

    def take(self, request_id: str, owner: Owner) -> PromptNews:
        """Take unsent reports, in order; they count as sent from now on."""
        news = PromptNews(request_id, owner, tuple(self._unsent.values()), self._end_is_unsent, self.error)
        self._unsent, self._end_is_unsent = {}, False
        return news


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """One attempt of a request, with the log of its reports.

    deadline_s is time.monotonic()'s: uvloop's own clock counts in milliseconds.
    """

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
    reservation_count: int = 0
    """Number of Reserve calls, at all instances."""
    log: ReportLog = field(default_factory=ReportLog)


class HandOver(Protocol):
    """Moves computed requests to a decode instance, or to the decode side of the same engine."""

    report: Callable[[PrefillRequest, HandOverReport], None]
    """Set by the prefill side, which may end the request within a call: RoomReserved when a push has begun, Adopted,
    or HandOverFailed."""
    at_first_token: Callable[[], bool]
    """True if requests are placed at their first token now, not before."""

    async def run(self) -> None:
        """Work until cancelled. begin() is called within."""

    def begin(self, request: PrefillRequest) -> None:
        """Search for a place, before or after the prompt is computed; with at_first_token, after the first token."""

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Search for another place after a failed push."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """End the hand-over of a request."""
