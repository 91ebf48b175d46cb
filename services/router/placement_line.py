"""The requests that no prefill instance takes now.

Those that wait for room stand in line. When room appears the first one is woken, and it wakes the next when it has
found a place. So not all of them look at every heartbeat. Those that an instance has failed rest beside the line, until
their time is over or an instance comes or goes. Bounded by the router's `max_requests`.
"""

import asyncio
from typing import Generic, TypeVar

RequestT = TypeVar("RequestT")


class PlacementLine(Generic[RequestT]):
    """For one event loop."""

    def __init__(self) -> None:
        self._line: dict[RequestT, asyncio.Future[None] | None] = {}
        self._resting: dict[RequestT, asyncio.Future[None] | None] = {}

    def __len__(self) -> int:
        """Requests in line and beside it."""
        return len(self._line) + len(self._resting)

    def must_join(self, request: RequestT) -> bool:
        """Whether others stand in line, and the request has not waited yet: it may not look for room before them."""
        return bool(self._line) and request not in self._line and request not in self._resting

    def join(self, request: RequestT) -> None:
        """Takes the last place in line, unless it has one."""
        self._resting.pop(request, None)
        self._line.setdefault(request, None)

    def rest(self, request: RequestT) -> None:
        """Stands beside the line. One that was in line gives its place up: an instance that had failed it has left the
        view meanwhile, and come back."""
        if request in self._line:
            self.leave(request)
        self._resting[request] = None

    async def wait(self, request: RequestT, timeout_s: float) -> None:
        """Returns when the request is woken, at the latest after the time-out. It has joined, or rests."""
        places = self._line if request in self._line else self._resting
        woken = places[request] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        finally:
            places[request] = None

    def wake_first(self) -> None:
        """There may be room: wakes the first in line. One that is awake looks by itself."""
        _wake(next(iter(self._line.values()), None))

    def wake_all(self) -> None:
        """An instance came or went: wakes the first in line, and all that rest."""
        self.wake_first()
        for waiter in self._resting.values():
            _wake(waiter)

    def leave(self, request: RequestT) -> None:
        """The request has found a place or ended; the first of the others may find one too. Idempotent."""
        self._line.pop(request, None)
        self._resting.pop(request, None)
        self.wake_first()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
