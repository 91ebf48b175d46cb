"""The requests that a decode instance holds, and which attempts of them it has known. No I/O."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.errors import StaleAttempt
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.growth import BatchMember
from services.decode.lifecycle import State


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """One reservation of one attempt, until its end. Times are time.monotonic()'s: uvloop's own clock
    counts in milliseconds."""

    engine_request: EngineRequest
    attempt: int
    router_id: str
    came_s: float
    expires_s: float
    member: BatchMember
    """What it counts as in the batch, when it comes."""
    state: State
    source: KvLayout | None = None
    """The layout of the engine that pushes its KV."""
    heavy: bool = False
    """Long in decode, by the thresholds here."""
    reservation: int = 0
    """The number of its Reserve call, as prefill counts them within the attempt. 0: not counted."""
    answer: asyncio.Future[Ticket] | None = None
    """What its Reserve call waits for. None: it was prefilled here."""
    deadline: asyncio.TimerHandle | None = None
    """Ends the request when its time is over."""

    @property
    def key(self) -> EngineKey:
        """What the engine knows it by. Its serial is new, so no event of an earlier one is taken for this one's."""
        return self.engine_request.key

    @property
    def request_id(self) -> str:
        return self.engine_request.key.request_id


class DecodeRequests:
    """All requests here, found by engine key, by request id and by router."""

    def __init__(self) -> None:
        self._by_key: dict[EngineKey, DecodeRequest] = {}
        self._by_serial: dict[int, DecodeRequest] = {}
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
        self._by_serial[request.key.serial] = request
        self._by_request_id[request.request_id] = request
        self._by_router.setdefault(request.router_id, {})[request] = None

    def remove(self, request: DecodeRequest) -> bool:
        """False when it was not here (any more)."""
        if self._by_key.pop(request.key, None) is None:
            return False
        del self._by_serial[request.key.serial]
        del self._by_request_id[request.request_id]
        of_router = self._by_router[request.router_id]
        del of_router[request]
        if not of_router:
            del self._by_router[request.router_id]
        return True

    def by_key(self, key: EngineKey) -> DecodeRequest | None:
        """The request that the engine knows as `key`."""
        return self._by_key.get(key)

    def by_serial(self, serial: int) -> DecodeRequest:
        """The one whose key has that serial. It must be here."""
        return self._by_serial[serial]

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
