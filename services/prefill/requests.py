"""One request on its way through a prefill instance, and what its router hears of it. No I/O."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import EngineKey, EngineRequest
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


class ProgressOutbox:
    """What one router has not read yet: at most one entry per kind, the latest, and all parts of the report on the
    prompt, whose size the router has limited. For one reader."""

    def __init__(self, told: Mapping[_Kind, Progress] = MappingProxyType({})) -> None:
        """told: entries of the past, for a reader that has not read them."""
        self._told = dict(told)
        self._unread = dict(told)
        self._closed = False
        self._error: KaveriError | None = None
        self._changed = asyncio.Event()

    def put(self, progress: Progress) -> None:
        """Adds an entry; a second placement replaces one that was not read."""
        kind: _Kind = progress.first if isinstance(progress, PromptScored) else type(progress)
        self._told[kind] = self._unread[kind] = progress
        self._changed.set()

    @property
    def first_token(self) -> FirstTokenDrawn | None:
        """The token that prefill drew, once it has."""
        told = self._told.get(FirstTokenDrawn)
        return told if isinstance(told, FirstTokenDrawn) else None

    def forget_report(self) -> None:
        """Leaves the report on the prompt out of what is repeated. Its reader still gets what is unread."""
        self._told = {kind: told for kind, told in self._told.items() if not isinstance(told, PromptScored)}

    def repeated(self) -> "ProgressOutbox":
        """An outbox for another reader, who gets all entries from the first one on. Nothing more comes here."""
        outbox = ProgressOutbox(self._told)
        if self._closed:
            outbox.close(self._error)
        return outbox

    def close(self, error: KaveriError | None) -> None:
        """Nothing follows; the reader gets what is unread, then the error."""
        self._closed = True
        self._error = error
        self._changed.set()

    async def take(self) -> list[Progress]:
        """Waits for entries and returns all that are unread, in the order in which they happened; none: the end.

        Raises the error that close() was given, after the last entry.
        """
        while not self._unread and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        unread = list(self._unread.values())
        self._unread.clear()
        if not unread and self._error is not None:
            raise self._error
        return unread


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
    outbox: ProgressOutbox = field(default_factory=ProgressOutbox)

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
    def can_be_attached(self) -> bool:
        """Whether its client can re-attach. Otherwise it ends with its router."""
        return bool(self.ownership.secret)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return self.token_count - self.engine_request.generated_count

    @property
    def token_count(self) -> int:
        """Tokens to compute: the prompt and what earlier attempts generated."""
        return len(self.engine_request.token_ids)
