"""The requests that a decode instance holds, and which attempts of them it has known. No I/O."""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kaveri.domain.length import TokenRange
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.errors import StaleAttempt
from kaveri.kv.transfer.ticket import Ticket


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """It waits in line for room."""
    ASKED = "asked"
    """The engine is asked for its room."""
    RESERVED = "reserved"
    """Room is taken; its KV is expected."""
    LANDED = "landed"
    """Its KV is here."""
    RUNNING = "running"
    """It has joined the batch."""


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """One reservation of one attempt, until its end. Times are time.monotonic()'s: uvloop's own clock
    counts in milliseconds."""

    engine_request: EngineRequest
    attempt: int
    router_id: str
    reserved_s: float
    """When the engine was asked for its room; until then, when it came."""
    expires_s: float = 0.0
    waits: bool = False
    """Whether it stays in line when there is no room."""
    answer: asyncio.Future[Ticket] | None = None
    """What reserve() waits for. None: it was prefilled here."""
    heavy: bool = False
    """Long in decode, by the thresholds here."""
    predicted_length: TokenRange | None = None
    """Tokens of the whole answer, cut to what may be generated. None: unknown."""
    phase: Phase = Phase.WAITING
    deadline: asyncio.TimerHandle | None = None
    """Ends the request when its time is over."""
    landing_number: int = 0
    landed_s: float = 0.0
    first_step_s: float | None = None
    preemptions: int = 0
    drawn_here: int = 0
    """Tokens drawn on this instance."""
    without_blocks: bool = False
    """It was preempted and has drawn no token since."""

    @property
    def key(self) -> EngineKey:
        """The request's id, and a number that is unique in this process: what the engine knows it by. Not the attempt,
        so that events of a former reservation of the same attempt are never taken for this one's."""
        return self.engine_request.key

    @property
    def request_id(self) -> str:
        return self.key.request_id

    @property
    def token_count(self) -> int:
        """Tokens whose KV is pushed."""
        return len(self.engine_request.token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV it holds between two steps."""
        return self.token_count + self.drawn_here

    @property
    def remaining(self) -> TokenRange | None:
        """Tokens that it will still draw, as predicted."""
        if self.predicted_length is None:
            return None
        # Prefill drew the first one of this attempt.
        return self.predicted_length.after(self.engine_request.generated_count + 1 + self.drawn_here)


class DecodeRequests:
    """All requests here, found by engine key, by request id and by router; counted by phase."""

    def __init__(self) -> None:
        self._by_key: dict[EngineKey, DecodeRequest] = {}
        self._by_request_id: dict[str, DecodeRequest] = {}
        # Ordered: what ends one by one ends in the order in which it came.
        self._by_router: dict[str, dict[DecodeRequest, None]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._by_key.values())

    def add(self, request: DecodeRequest) -> None:
        """Its request id must not be in use here."""
        assert request.request_id not in self._by_request_id
        self._by_key[request.key] = request
        self._by_request_id[request.request_id] = request
        self._by_router.setdefault(request.router_id, {})[request] = None

    def remove(self, request: DecodeRequest) -> bool:
        """False when it was not here (any more)."""
        if self._by_key.pop(request.key, None) is None:
            return False
        del self._by_request_id[request.request_id]
        of_router = self._by_router[request.router_id]
        del of_router[request]
        if not of_router:
            del self._by_router[request.router_id]
        return True

    def by_key(self, key: EngineKey) -> DecodeRequest | None:
        """The request that the engine knows as `key`."""
        return self._by_key.get(key)

    def by_request_id(self, request_id: str) -> DecodeRequest | None:
        """The one attempt of the request that is here."""
        return self._by_request_id.get(request_id)

    def of_router(self, router_id: str) -> tuple[DecodeRequest, ...]:
        """The requests whose tokens go to the router."""
        return tuple(self._by_router.get(router_id, ()))


class KnownAttempts:
    """The newest attempt of each router's requests, remembered for a while after its end, so that a straggler is
    refused. The attempts of two routers are not compared."""

    def __init__(self, remembered_s: float, max_count: int) -> None:
        """remembered_s: after the last word of a request. max_count: beyond it the oldest are forgotten."""
        self._remembered_s = remembered_s
        self._max_count = max_count
        self._newest: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def note(self, router_id: str, request_id: str, attempt: int, now_s: float) -> None:
        """Remembers the attempt. Raises StaleAttempt when a newer one is known."""
        while self._newest:
            oldest, (_, until_s) = next(iter(self._newest.items()))
            if until_s > now_s and len(self._newest) <= self._max_count:
                break
            del self._newest[oldest]
        name = router_id, request_id
        newest, _ = self._newest.get(name, (attempt, 0.0))
        if attempt < newest:
            raise StaleAttempt(request_id, attempt, newest)
        self._newest[name] = (attempt, now_s + self._remembered_s)
        self._newest.move_to_end(name)
