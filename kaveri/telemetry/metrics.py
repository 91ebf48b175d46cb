"""Serves metrics and health over HTTP. Each service declares its own metrics in its metrics.py.

/metrics   for Prometheus
/sd        of a router: where the whole cluster's metrics are, for Prometheus' HTTP service discovery
/livez     200 as long as the event loop runs
/readyz    200 while the process accepts requests, else 503
"""

import asyncio
import contextlib
import json
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from kaveri.addresses import bind_socket, join_address
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
)
"""Histogram buckets for the time of one token or step: from 1 to 500 ms."""
ANSWER_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Histogram buckets for the time of a whole answer."""

MAX_CONNECTIONS = 32
"""Max connections. One more closes the oldest that has sent no request; if all have sent one, the new one."""
MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
"""Max time for a request to arrive."""
RESPONSE_TIMEOUT_S = 10.0
"""Max time for a response to be read."""
_PLAIN_TEXT = "text/plain; charset=utf-8"

_Response = tuple[HTTPStatus, str, bytes]
TargetGroups = Sequence[dict[str, Any]]
"""Prometheus' HTTP service discovery format: {"targets": ["host:port"], "labels": {...}}."""

_find_targets: weakref.WeakMethod[Callable[[], TargetGroups]] | None = None


def set_discovery(find: Callable[[], TargetGroups]) -> None:
    """Set the function that answers /sd in this process. find: a bound method, called on the event loop for each
    request; held weakly."""
    global _find_targets  # noqa: PLW0603 - of the process, as metrics are
    _find_targets = weakref.WeakMethod(find)


@contextlib.asynccontextmanager
async def serve_metrics(
    host: str,
    port: int,
    is_ready: Callable[[], bool],
    registry: CollectorRegistry | None = REGISTRY,
    *,
    tls: ssl.SSLContext | None = None,
    is_welcome: Callable[[Mapping[str, Any] | None], bool] = lambda _: True,
) -> AsyncIterator[None]:
    """Serve metrics and health at http://host:port during the context; port 0 serves nothing. is_ready: result of
    /readyz. registry: metrics to serve; None: only /livez and /readyz. tls: serve https. is_welcome: returns False to
    disconnect a client with this certificate. Raises ConfigError if the address cannot be bound."""
    if port == 0:
        yield
        return
    # prometheus_client would add a series with the creation time of each series.
    disable_created_metrics()
    site = _Site(is_ready, registry, is_welcome)
    handshake_s = None if tls is None else REQUEST_TIMEOUT_S
    try:
        server = await asyncio.start_server(
            site.connect,
            sock=bind_socket(host, port),
            limit=MAX_REQUEST_BYTES,
            ssl=tls,
            ssl_handshake_timeout=handshake_s,
        )
    except OSError as error:
        flag = "--metrics-port" if registry is not None else "--health-port"
        raise ConfigError(flag, f"cannot listen on {join_address(host, port)}: {error.strerror}") from error
    try:
        yield
    finally:
        server.close()
        await site.close()


class _Site:
    """HTTP connection handler of metrics and health. Not thread-safe."""

    def __init__(
        self,
        is_ready: Callable[[], bool],
        registry: CollectorRegistry | None,
        is_welcome: Callable[[Mapping[str, Any] | None], bool],
    ) -> None:
        self._is_welcome = is_welcome
        self._is_ready = is_ready
        self._registry = registry
        self._connections: set[asyncio.Task[None]] = set()
        # Connections that have not sent a request yet, oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._rendering = asyncio.Lock()

    def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_welcome(writer.get_extra_info("peercert")):
            writer.transport.abort()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            if not self._silent:
                writer.transport.abort()
                return
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer), name="metrics connection")
        self._connections.add(task)
        self._silent[task] = None
        task.add_done_callback(self._forget)
        # Not in the task: a task cancelled before its start never runs.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def close(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._silent.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                try:
                    head: bytes | None = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = None
            task = asyncio.current_task()
            assert task is not None
            self._silent.pop(task, None)
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                writer.write(await self._respond(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            # The peer closed the connection or is too slow.
            pass
        except Exception as error:
            get_logger().exception("metrics_request_failed", error=repr(error))

    async def _respond(self, head: bytes | None) -> bytes:
        """Build the whole HTTP response. head: None if the request's head was too long."""
        if head is None:
            return _encode((HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _PLAIN_TEXT, b""), with_body=True)
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode((HTTPStatus.BAD_REQUEST, _PLAIN_TEXT, b""), with_body=True)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _encode((HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN_TEXT, b""), with_body=True)
        headers = (line.partition(":") for line in lines)
        accepted = ",".join(value.strip() for name, _, value in headers if name.lower() == "accept")
        return _encode(await self._page(target.partition("?")[0], accepted), with_body=method == "GET")

    async def _page(self, path: str, accepted: str) -> _Response:
        match path:
            case "/metrics" if self._registry is not None:
                encode, content_type = choose_encoder(accepted)
                # One at a time and on a thread: many concurrent scrapes must not delay requests.
                async with self._rendering:
                    return HTTPStatus.OK, content_type, await asyncio.to_thread(encode, self._registry)
            case "/sd" if self._registry is not None and _find_targets is not None and (find := _find_targets()):
                return HTTPStatus.OK, "application/json", json.dumps(find()).encode()
            case "/livez":
                return HTTPStatus.OK, _PLAIN_TEXT, b"ok\n"
            case "/readyz":
                if self._is_ready():
                    return HTTPStatus.OK, _PLAIN_TEXT, b"ok\n"
                return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN_TEXT, b"not ready\n"
            case _:
                pages = b"/livez or /readyz\n" if self._registry is None else b"/metrics, /livez or /readyz\n"
                return HTTPStatus.NOT_FOUND, _PLAIN_TEXT, pages


def _encode(response: _Response, with_body: bool) -> bytes:
    status, content_type, body = response
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n{allow}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
