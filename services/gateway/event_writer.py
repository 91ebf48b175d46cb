"""Writes server-sent events to one client, and aborts when the client does not read."""

from starlette.types import Send

from kaveri.hosting.read_limit import Writes
from services.gateway.http_errors import Headers

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter:
    """Writer of one streamed response. Aborts when the client takes longer than read_limit() allows to accept one
    event; until then unread events occupy the connection's buffers."""

    def __init__(self, send: Send, writes: Writes) -> None:
        """writes: watched by the enclosing read_limit(), which raises SlowReader when a write takes too long."""
        self._send = send
        self._writes = writes
        self.begun = False
        """True once the status was sent."""

    async def write(self, data: bytes) -> None:
        """Write encoded events; the first call sends status 200 and the headers first."""
        self._writes.ticks = 0
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writes.ticks = None

    async def finish(self, data: bytes) -> None:
        """Write the last events, and end the response."""
        await self.write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
