"""Gives up on a client that does not read what it is sent."""

import asyncio
import time
from types import TracebackType
from typing import Self

from kaveri.errors import SlowReader


class ReadLimit:
    """Of one answer. While the context lasts, a write may take `limit_s` seconds; the context is left with SlowReader
    when one takes longer.

    One timer for a whole answer: one for each write would cost more.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._writing_since_s: float | None = None
        self._timeout = asyncio.timeout(None)
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._check)

    def begin(self) -> None:
        """A write begins."""
        self._writing_since_s = time.monotonic()

    def end(self) -> None:
        """It is done."""
        self._writing_since_s = None

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

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        since_s = self._writing_since_s
        left_s = self._limit_s if since_s is None else since_s + self._limit_s - time.monotonic()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._check)
        else:
            self._timeout.reschedule(loop.time())
