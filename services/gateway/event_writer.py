"""Writes a stream of events to one client, and aborts when the client does not read."""

from starlette.types import Send

from kaveri.hosting.read_limit import ReadLimit
from services.gateway.http_errors import Headers

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter(ReadLimit):
    """Writer of one response, and context for its writes. Raises SlowReader when the client takes longer than the limit
    to make room for one event; until then such a client costs the buffers of its connection."""

    def __init__(self, send: Send, slow_reader_s: float) -> None:
        super().__init__(slow_reader_s)
        self._send = send
        self.begun = False
        """True once the status was sent."""

    async def write(self, data: bytes) -> None:
        """Write events; the first call sends the status 200 before them."""
        self.begin()
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.end()

    async def finish(self, data: bytes) -> None:
        """Write the last events, and end the response."""
        await self.write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
