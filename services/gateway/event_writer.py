"""Writes a stream of events to one client, and gives up on a client that does not read them."""

import asyncio
import time
from types import TracebackType
from typing import Self

from starlette.types import Send

from kaveri.errors import SlowReader
from services.gateway.http_errors import Headers

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold events back.
    (b"x-accel-buffering", b"no"),
]


class EventWriter:
    """One response. Use it as a context; leaving it ends the limit on reading.

    Raises SlowReader out of the context when the client takes longer than the limit to make room for one event. What
    such a client costs until then are the buffers of its connection.
    """

    def __init__(self, send: Send, slow_reader_s: float) -> None:
        self._send = send
        self._limit_s = slow_reader_s
        self._writing_since_s: float | None = None
        self._timeout = asyncio.timeout(None)
        # One timer for a whole answer: one for each event would cost more.
        self._timer = asyncio.get_running_loop().call_later(slow_reader_s, self._check)
        self.begun = False
        """Whether the client has got the status."""

    async def write(self, data: bytes) -> None:
        """Writes events. The first time also the status, 200."""
        self._writing_since_s = time.monotonic()
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing_since_s = None

    async def end(self, data: bytes) -> None:
        """Writes the last events, and the end."""
        await self.write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

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
