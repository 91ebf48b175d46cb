"""Gives up on a client that does not read what it is sent."""

import asyncio
from types import TracebackType
from typing import Self

from kaveri.errors import SlowReader

_LIMIT_TICKS = 10


class ReadLimit:
    """Of one answer. While the context lasts, a write may take `limit_s` seconds, and a tenth more; the context is left
    with SlowReader when one takes longer.

    Only time counts in which the event loop runs: while it stands still it does not notice that the client has read. A
    loop that stood still ticks once for it. One timer for a whole answer: one for each write would cost more.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ticks: int | None = None
        """Since the write began. None: nothing is being written."""
        self._timeout = asyncio.timeout(None)
        self._wait_for_tick()

    def begin(self) -> None:
        """A write begins."""
        self._ticks = 0

    def end(self) -> None:
        """It is done."""
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
            # The first tick may come right after the beginning.
            if self._ticks > _LIMIT_TICKS:
                self._timeout.reschedule(asyncio.get_running_loop().time())
                return
        self._wait_for_tick()
