"""One HTTP connection: uvicorn's, with limits on what a client may send, how slowly, and how slowly it may read."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.gateway.http_errors import HttpError, retry_headers

CONNECTION_KEY = "kaveri.connection"
"""Of an HTTP scope: its connection."""
_RETRY_AFTER_S = 1.0
_LINGER_S = 2.0
_LINGER_BYTES = 2**20
"""What a refused client may send until it has read why."""
_PHRASES = {400: "Bad Request", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may cost."""

    max_connections: int
    max_header_bytes: int
    slow_sender_s: float
    slow_reader_s: float


class _HeadTooLarge(Exception):
    """Raised within the parser, which reports it as an error of its own."""


class HttpConnection(HttpToolsProtocol):
    """Owned by its transport. While a request is answered nothing more is read than that the client has gone: a request
    that comes before the answer's end is dropped, and the connection ends with the answer."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the head of a request is awaited, and while the last bytes of a closed connection are read."""
        self._head_bytes = 0
        """Of the present request's line and headers."""
        self._quiet_bytes = 0
        """Read since the request began, or since the last piece of its body."""
        self._has_progress = False
        """Whether the last piece of data ended a head, or had a piece of a body."""
        self._is_refused = False
        """Whether nothing is read any more but what the client still sends."""
        self._dropped_bytes = 0
        """Of requests that came too early."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"more than {self._limits.max_connections} connections are open"
            self._refuse(
                HttpError(
                    503, message, "service_unavailable", "too_many_connections", headers=retry_headers(_RETRY_AFTER_S)
                )
            )
            return
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_refused:
            self._drop_refused(data)
            return
        if self._is_answering():
            self._drop(data)
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        self._has_progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered as if it had not asked for another protocol.
            self._unset_keepalive_if_required()
            return
        except httptools.HttpParserError as error:
            if not self._is_answering():
                self._refuse(_parse_error(error, self._limits))
            return
        self._unset_keepalive_if_required()
        if not self._has_progress:
            self._quiet_bytes += len(data)
        if self._quiet_bytes > self._limits.max_header_bytes:
            self._refuse(_too_large(self._limits))

    def on_message_begin(self) -> None:
        self._head_bytes = self._quiet_bytes = 0
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION_KEY] = self

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also those after a body in chunks.
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """The parser's call."""
        self._note_progress()

    def on_headers_complete(self) -> None:
        if self._is_answering():
            self._drop(b"")
            raise _HeadTooLarge
        self._note_progress()
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._note_progress()
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_within_limit()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close_within_limit()

    def shutdown(self) -> None:
        super().shutdown()
        self._close_within_limit()

    def abort(self) -> None:
        """Closes the connection at once; what was written and not sent is lost."""
        self.transport.abort()

    def _is_answering(self) -> bool:
        """Whether a whole request has come that is not answered yet."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _note_progress(self) -> None:
        self._has_progress = True
        self._quiet_bytes = 0

    def _drop(self, data: bytes) -> None:
        self.cycle.keep_alive = False
        self._dropped_bytes += len(data)
        if self._dropped_bytes > self._limits.max_header_bytes:
            self.transport.abort()

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            raise _HeadTooLarge

    def _begin_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._limits.slow_sender_s, self._end_head)

    def _end_head(self) -> None:
        # No answer: it may be in the middle of one, and a client this slow is seldom honest.
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: HttpError) -> None:
        """Answers what the parser could not, and closes once the client has, or after a while: closed at once, with
        data that was not read, the connection would be reset and the answer lost."""
        self._is_refused = True
        body = error.body()
        head = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n".encode()]
        headers = [
            *error.headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head += [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([*head, b"\r\n", body]))
        if self.transport.can_write_eof():
            # Not over TLS.
            self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _drop_refused(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > _LINGER_BYTES:
            self.transport.abort()

    def _close_within_limit(self) -> None:
        """A closing connection ends when all is sent, which a client that does not read would never let happen."""
        if self.transport.is_closing():
            self._stop_timer()
            self._timer = self.loop.call_later(self._limits.slow_reader_s, self.transport.abort)


def _parse_error(error: httptools.HttpParserError, limits: ConnectionLimits) -> HttpError:
    if isinstance(error.__context__, _HeadTooLarge):
        return _too_large(limits)
    return HttpError(400, "this is not an HTTP request", code="invalid_http")


def _too_large(limits: ConnectionLimits) -> HttpError:
    message = f"the request's line and headers are larger than {limits.max_header_bytes} bytes"
    return HttpError(431, message, code="headers_too_large")


def connection_factory(limits: ConnectionLimits) -> Any:
    """What uvicorn calls for each connection."""
    return partial(HttpConnection, limits)
