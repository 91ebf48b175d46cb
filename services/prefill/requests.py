"""A request at a prefill instance, the log of its router, and the seam to what decodes it. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import EngineKey, EngineRequest, KvPushFailed
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
    """The prompt is computed. With `finish` nothing follows."""

    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None
    prefill_s: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode instance owns the request now. Nothing follows."""

    kv_bytes: int
    kv_transfer_s: float
    kv_tail_s: float
    kv_transport: str


@dataclass(frozen=True, slots=True)
class PromptScored:
    """What the model thinks of the prompt's tokens from position `first` on."""

    first: int
    entries: tuple[Logprobs, ...]


Progress = Started | RoomReserved | PromptScored | FirstTokenDrawn | HandedOver


@dataclass(frozen=True, slots=True)
class Adopted:
    """The engine that computed the request decodes it too; nothing is pushed."""

    placed: RoomReserved


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """The request cannot be handed over."""

    error: KaveriError


HandOverReport = RoomReserved | Adopted | HandOverFailed
"""What a hand-over reports about a request. RoomReserved: room is reserved and the push has begun."""


_Kind = type[Progress] | int
"""Of parts of a prompt, which stand beside one another: the first position."""


@dataclass(frozen=True, slots=True)
class PromptNews:
    """What a router has not been sent of one request."""

    request_id: str
    owner: Owner
    progress: tuple[Progress, ...] = ()
    ended: bool = False
    error: KaveriError | None = None
    """Why it has ended. None: as the progress says."""


class ReportLog:
    """What has happened to one request: at most one entry per kind, the latest, and all parts of the report on the
    prompt, whose size the router has limited."""

    def __init__(self) -> None:
        self._told: dict[_Kind, Progress] = {}
        self._unsent: dict[_Kind, Progress] = {}
        self.ended = False
        self.error: KaveriError | None = None
        """Why it has ended; None: it goes on, or its last entry says."""
        self._end_is_unsent = False

    def put(self, progress: Progress) -> None:
        """Adds an entry; a second placement replaces one that was not sent."""
        kind: _Kind = progress.first if isinstance(progress, PromptScored) else type(progress)
        self._told[kind] = self._unsent[kind] = progress

    def end(self, error: KaveriError | None) -> None:
        """Nothing follows."""
        self.ended = self._end_is_unsent = True
        self.error = error

    @property
    def first_token(self) -> FirstTokenDrawn | None:
        """The token that prefill drew, once it has."""
        told = self._told.get(FirstTokenDrawn)
        return told if isinstance(told, FirstTokenDrawn) else None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) or self._end_is_unsent

    def forget_report(self) -> None:
        """Leaves the report on the prompt out of what is repeated. What is unsent is still sent."""
        self._told = {kind: told for kind, told in self._told.items() if not isinstance(told, PromptScored)}

    def repeat(self) -> None:
        """Has everything sent again, for another stream or another router."""
        self._unsent, self._end_is_unsent = dict(self._told), self.ended

    def take(self, request_id: str, owner: Owner) -> PromptNews:
        """Returns what is unsent, in the order in which it happened; it counts as sent."""
        news = PromptNews(request_id, owner, tuple(self._unsent.values()), self._end_is_unsent, self.error)
        self._unsent, self._end_is_unsent = {}, False
        return news


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """One attempt of one request: what is asked, and where its router and its hand-over reach its owner.

    deadline_s is time.monotonic()'s: uvloop's own clock counts in milliseconds.
    """

    ownership: Ownership
    engine_request: EngineRequest
    deadline_s: float
    report: Callable[["PrefillRequest", HandOverReport], None]
    """How the hand-over tells the owner of the request what has happened. The owner may end the request within."""
    predicted_length: TokenRange | None = None
    """Tokens of the whole answer, earlier attempts included. None: unknown. Final once a place is looked for."""
    silent_decode_ids: frozenset[str] = frozenset()
    """Decode instances that its router hears nothing from."""
    traceparent: str = ""
    """Of the span that what happens here is below. Empty: it is not traced."""
    reservation_count: int = 0
    """Reserve calls so far, at any instance."""
    placed_at_first_token: bool = False
    """Whether a place is looked for only when the first token is drawn."""
    log: ReportLog = field(default_factory=ReportLog)

    @property
    def key(self) -> EngineKey:
        """What the engine knows it by. Its serial is new: no event of an earlier request is taken for this one's."""
        return self.engine_request.key

    @property
    def request_id(self) -> str:
        return self.engine_request.key.request_id

    @property
    def owner(self) -> Owner:
        return self.ownership.owner

    @property
    def router_id(self) -> str:
        """Where its reports go."""
        return self.ownership.router_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return self.engine_request.prompt_tokens

    @property
    def token_count(self) -> int:
        """Tokens to compute: the prompt and what earlier attempts generated."""
        return len(self.engine_request.token_ids)


class HandOver(Protocol):
    """The DecodePlacer pushes to decode instances; where one engine does both phases nothing is pushed.

    It reports on a request by request.report(): RoomReserved when a push has begun, Adopted, or HandOverFailed.
    """

    @property
    def at_first_token(self) -> bool:
        """Whether requests are placed only once their first token is drawn, not before."""

    async def run(self) -> None:
        """Works until cancelled. begin() is called within."""

    def begin(self, request: PrefillRequest) -> None:
        """The request is or will be computed and needs a place. Once for a request, and not before its first token is
        drawn where at_first_token."""

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """The engine's push ended without acceptance."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """The request, which has begun, has ended here."""
