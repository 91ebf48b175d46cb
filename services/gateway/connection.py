"""HTTP connections: uvicorn's h11 protocol with limits on a client's input, timeouts for clients that send or read
slowly, and cancellation when a client disconnects."""

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.gateway.config import HttpLimits
from services.gateway.http_errors import CLOSE, HttpError, unavailable

CONNECTION_KEY = "kaveri.connection"
"""Key of the HttpConnection in an ASGI scope's `state`."""
_SLICE_BYTES = 16 * 1024
"""Max bytes parsed per turn of the event loop: 20 ms for a body in tiny chunks."""
_RETRY_AFTER_S = 1.0
_LINGER_S = 2.0
_LINGER_BYTES = 2**20
"""Max bytes read and dropped from a client whose request was refused, until it has read the error."""
_GONE_CHECK_S = 0.25
"""Interval of checks for a disconnect once the client has closed its sending half."""
_FIRST_BYTE = b"H"
_EVENT_COMMENT = b":\n\n"
"""Comment in a stream of server-sent events, which clients skip."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client has closed its connection."""


class HttpConnection(H11Protocol):
    """HTTP/1.1 connection of one client. The next pipelined request is parsed once the previous one is answered."""

    def __init__(
        self,
        limits: HttpLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION_KEY: self}, _loop)
        self._limits = limits
        self._unparsed = bytearray()
        self._early_bytes = 0
        """Bytes received while the current request is answered or after a refusal."""
        self._timer: asyncio.TimerHandle | None = None
        """Aborts the connection when a request's head is late, or closing takes too long."""
        self._is_refused = False
        """True once a request was refused; further input is dropped."""
        self._has_eof = False
        """True once the client has closed its sending half and still waits for an answer."""
        self.sends_events = False
        """True if the current answer is a stream of server-sent events. Set by App."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"more than {self._limits.max_connections} connections are open"
            self._refuse(unavailable(message, _RETRY_AFTER_S, "too_many_connections"))
            return
        # Close without a response: the client may be in the middle of a head, and such a slow client is seldom honest.
        self._end_within(self._limits.slow_sender_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        is_parsing = bool(self._unparsed)
        self._unparsed += data
        if not is_parsing:
            self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the input. Returns True to stay open for an answer still due; TLS cannot half-close."""
        if self._has_eof:
            # Resume reading after a pause.
            return True
        self._has_eof = self._is_answering() and self.transport.can_write_eof()
        if self._has_eof:
            self._probe()
        else:
            self._end_within(self._limits.slow_reader_s)
        return self._has_eof

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the HTTP parser rejected. Called by uvicorn."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(_head_too_large(self._limits.max_header_bytes))
        else:
            message = f"this is not an HTTP request that is served here: {error!s:.200}"
            self._refuse(HttpError(error.error_status_hint, message, code="invalid_http"))

    def on_response_complete(self) -> None:
        self._early_bytes = 0
        super().on_response_complete()
        if self._has_eof and not self._is_answering():
            self.transport.close()
        if self.transport.is_closing():
            self._end_within(self._limits.slow_reader_s)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_within(self._limits.slow_reader_s)

    def shutdown(self) -> None:
        if not self._is_refused:
            super().shutdown()
        if self.transport.is_closing():
            self._end_within(self._limits.slow_reader_s)

    def _parse(self) -> None:
        data = bytes(self._unparsed[:_SLICE_BYTES])
        del self._unparsed[:_SLICE_BYTES]
        if not self.transport.is_closing():
            self._receive(data)
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _receive(self, data: bytes) -> None:
        if self._is_refused or self._is_answering():
            self._early_bytes += len(data)
        if self._is_refused:
            if self._early_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        if self._is_answering() and self._early_bytes <= self._limits.max_header_bytes:
            # uvicorn would stop reading, and miss a disconnect.
            self.conn.receive_data(data)
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # RFC 9112, 2.2: old clients send an empty line after a body.
            data = data.lstrip(b"\r\n")
            if not data:
                return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._end_within(self._limits.slow_sender_s)
        last = self.cycle
        super().data_received(data)
        if self.cycle is not last and not self._is_refused:
            self._stop_timer()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _probe(self) -> None:
        """Detect a lost client: write bytes that do not change the answer; its kernel replies with a TCP reset."""
        if not self.cycle.response_started:
            self.transport.write(_FIRST_BYTE)
            self.cycle.transport = _BegunTransport(self.cycle)  # type: ignore[assignment]
        elif self.sends_events and not self.flow.write_paused:
            self.transport.write(self.conn.send(h11.Data(data=_EVENT_COMMENT)))
        self._check_gone()

    def _check_gone(self) -> None:
        # The event loop does not watch a connection whose end it has read.
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self._is_answering():
            self._stop_timer()
            self._timer = self.loop.call_later(_GONE_CHECK_S, self._check_gone)

    def _end_within(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: HttpError) -> None:
        """Send the error, then close when the client has closed or after _LINGER_S: closing at once, with unread input,
        would reset the connection and lose the answer."""
        self._is_refused = True
        if self.cycle is not None and self.cycle.more_body:
            # The refused request's body ends here.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # The answer began before its body failed.
            self.transport.close()
        else:
            body = error.body()
            headers = [
                *error.headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                CLOSE,
            ]
            reason = HTTPStatus(error.status).phrase
            response = h11.Response(status_code=error.status, headers=headers, reason=reason)
            events = (response, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            if self.transport.can_write_eof():
                # TLS cannot half-close.
                self.transport.write_eof()
        self._end_within(_LINGER_S)


class _BegunTransport:
    """Transport that drops the first byte of an answer, because _probe() has already sent it."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    def write(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(data.removeprefix(_FIRST_BYTE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def check_head(scope: Scope, max_header_bytes: int) -> None:
    """Check a request's line and headers beyond the HTTP parser; reduce an absolute target URL to its path. Raises
    HttpError; it closes the connection where proxies could disagree about the request's end (request smuggling)."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
    if size > max_header_bytes:
        raise _head_too_large(max_header_bytes)
    if not scope["http_version"].startswith("1."):
        message = f"HTTP/{scope['http_version']} is not served here; use HTTP/1.1"
        raise HttpError(505, message, code="invalid_http", headers=[CLOSE])
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        # RFC 9112, 6.1.
        message = "Content-Length and Transfer-Encoding do not go together"
        raise HttpError(400, message, code="invalid_http", headers=[CLOSE])
    scheme, _, rest = scope["path"].partition("://")
    if scheme in ("http", "https"):
        # RFC 9112, 3.2.2.
        scope["path"] = "/" + rest.partition("/")[2]


def own_request_id(scope: Scope) -> str | None:
    """Return the client's X-Request-ID header; None if missing, or not 1 to 128 printable ASCII characters."""
    given = header(scope, b"x-request-id")
    return str(given, "ascii") if _REQUEST_ID.fullmatch(given) else None


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first value of a header; empty if missing. name: in lower case."""
    return next((value for each, value in scope["headers"] if each == name), b"")


@contextlib.asynccontextmanager
async def until_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancel the work inside the context when the client disconnects, and raise ClientGone. Read the body first."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch(), name="gateway client watch")
    try:
        yield
    except asyncio.CancelledError as error:
        if is_gone and task.uncancel() == 0:
            raise ClientGone from error
        raise
    finally:
        watching.cancel()


def _head_too_large(max_header_bytes: int) -> HttpError:
    message = f"the request's line and headers are larger than {max_header_bytes} bytes"
    return HttpError(431, message, code="headers_too_large", headers=[CLOSE])
