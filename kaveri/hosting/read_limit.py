"""Aborts answers to clients that do not read them."""

import asyncio
from types import TracebackType
from typing import Self

from kaveri.errors import SlowReader

_LIMIT_TICKS = 10


class ReadLimit:
    """Limits the writes of one answer. Within the context a write may take `limit_s` seconds, and a tenth more; a
    longer one ends the context with SlowReader.

    Only time counts in which the event loop runs: a stalled loop does not notice that the client has read, and counts
    one tick for the stall. One timer serves a whole answer: one per write would cost more.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ticks: int | None = None
        """Ticks since the write began; None if no write is active."""
        self._timeout = asyncio.timeout(None)
        self._wait_for_tick()

    def begin(self) -> None:
        """Mark the start of a write."""
        self._ticks = 0

    def end(self) -> None:
        """Mark the end of a write."""
        self._ticks = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            if self._timeout.expired():
                raise SlowReader(self._limit_s) from timeout
            raise

    def _wait_for_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / _LIMIT_TICKS, self._tick)

    def _tick(self) -> None:
        if self._ticks is not None:
            self._ticks += 1
            # The first tick may follow right after the start.
            if self._ticks > _LIMIT_TICKS:
                self._timeout.reschedule(asyncio.get_running_loop().time())
                return
        self._wait_for_tick()
