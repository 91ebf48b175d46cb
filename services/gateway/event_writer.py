"""Writes a stream of events to one client, and gives up on a client that does not read them."""

from types import TracebackType
from typing import Self

from starlette.types import Send

from kaveri.hosting.read_limit import ReadLimit
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
        self._limit = ReadLimit(slow_reader_s)
        self.begun = False
        """Whether the client has got the status."""

    async def write(self, data: bytes) -> None:
        """Writes events. The first time also the status, 200."""
        self._limit.begin()
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._limit.end()

    async def end(self, data: bytes) -> None:
        """Writes the last events, and the end."""
        await self.write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, traceback)
