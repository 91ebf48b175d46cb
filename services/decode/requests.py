"""Table of the requests on a decode instance. No I/O."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.owner import Owner, Ownership
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.growth import BatchMember
from services.decode.answer_log import AnswerLog, GainedTokens
from services.decode.lifecycle import Running, State
from services.decode.spans import DecodeSpans


@dataclass(frozen=True, slots=True)
class ResumedHere:
    """Copy from which a request was resumed on this instance."""

    held_tokens: int
    """Number of tokens whose KV comes from the copy."""
    landed: asyncio.Future[bool]
    """Done when the KV has landed. False: the request ended before."""


class Reader(Protocol):
    """A client that reads the answer directly from this instance."""

    def changed(self) -> None:
        """Handle growth or end of the request's log."""

    def leave(self) -> None:
        """Detach the client: the router sends the rest, or the request was aborted."""


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """A reservation of one attempt, until its end. Times are time.monotonic()'s: uvloop's own clock has a resolution of
    milliseconds."""

    engine_request: EngineRequest
    ownership: Ownership
    came_s: float
    expires_s: float
    member: BatchMember
    """The request's weight in the batch at its arrival."""
    state: State
    source: KvLayout | None = None
    """Layout of the engine that pushes the request's KV."""
    heavy: bool = False
    """True if the request counts as heavy in the load."""
    reservation: int = 0
    """Number of the Reserve call within the attempt; 0: not counted."""
    placed_by: str = ""
    """Id of the prefill instance that reserved the room; empty: unknown or none."""
    answer: asyncio.Future[Ticket] | None = None
    """Result of the Reserve call; None: prefilled on this instance."""
    deadline: asyncio.TimerHandle | None = None
    resumed: ResumedHere | None = None
    spans: DecodeSpans | None = None
    reader: Reader | None = None
    """Client that reads the answer directly; None: only the router reads it."""
    log: AnswerLog = field(init=False)

    def __post_init__(self) -> None:
        # Prefill samples and sends the first token.
        self.log = AnswerLog.drawn_here(self.engine_request.generated_count + 1)

    @property
    def key(self) -> EngineKey:
        """Key in the engine. The serial is unique, so events of an earlier request with the same id do not match."""
        return self.engine_request.key

    @property
    def request_id(self) -> str:
        return self.engine_request.key.request_id

    @property
    def context_tokens(self) -> int:
        """Number of tokens of prompt and answer so far."""
        return self.engine_request.prompt_tokens + self.log.next_index

    @property
    def rest_tokens(self) -> int | None:
        """Upper bound on remaining tokens; None if unknown."""
        drawn = self.state.drawn if isinstance(self.state, Running) else 0
        predicted = self.member.remaining_tokens - drawn
        most = self.engine_request.params.max_tokens
        limits = [predicted] if predicted > 0 else []
        limits += [most - self.log.next_index] if most is not None else []
        return min(limits, default=None)

    @property
    def owner(self) -> Owner:
        return self.ownership.owner

    @property
    def router_id(self) -> str:
        return self.ownership.router_id


class DecodeRequests:
    """Table of an instance's requests, indexed by engine key, request id and router."""

    def __init__(self) -> None:
        self._by_serial: dict[int, DecodeRequest] = {}
        self._by_request_id: dict[str, DecodeRequest] = {}
        # Ordered: requests of a lost router end in the order of their arrival.
        self._by_router: dict[str, dict[DecodeRequest, None]] = {}

    def __len__(self) -> int:
        return len(self._by_serial)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._by_serial.values())

    def add(self, request: DecodeRequest) -> None:
        """Add a request whose id is not in use."""
        assert request.request_id not in self._by_request_id
        self._by_serial[request.key.serial] = request
        self._by_request_id[request.request_id] = request
        self._by_router.setdefault(request.router_id, {})[request] = None

    def remove(self, request: DecodeRequest) -> None:
        del self._by_serial[request.key.serial]
        del self._by_request_id[request.request_id]
        self._leave_router(request)

    def give(self, request: DecodeRequest, ownership: Ownership) -> None:
        self._leave_router(request)
        request.ownership = ownership
        self._by_router.setdefault(request.router_id, {})[request] = None

    def by_key(self, key: EngineKey) -> DecodeRequest | None:
        return self._by_serial.get(key.serial)

    def by_serial(self, serial: int) -> DecodeRequest:
        return self._by_serial[serial]

    def by_request_id(self, request_id: str) -> DecodeRequest | None:
        return self._by_request_id.get(request_id)

    def of_router(self, router_id: str) -> tuple[DecodeRequest, ...]:
        return tuple(self._by_router.get(router_id, ()))

    def has_any_of(self, router_id: str) -> bool:
        return router_id in self._by_router

    def _leave_router(self, request: DecodeRequest) -> None:
        of_router = self._by_router[request.router_id]
        del of_router[request]
        if not of_router:
            del self._by_router[request.router_id]


def gained_of(news: DecodeRequest | GainedTokens) -> GainedTokens:
    """Take the unsent tokens of a request; a notice is returned unchanged."""
    if isinstance(news, GainedTokens):
        return news
    gained = news.log.take(news.request_id, news.owner)
    gained.read_here = news.reader is not None
    return gained
