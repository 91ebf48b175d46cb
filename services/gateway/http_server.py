"""HTTP listener with the same lifecycle as RpcServer (start, ready, drain, stop), running one ASGI application."""

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
import time

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from kaveri.addresses import bind_socket, join_address
from kaveri.errors import ConfigError
from kaveri.rpc.server import check_address
from kaveri.telemetry.readiness import set_ready
from services.gateway.config import GatewayConfig
from services.gateway.connection import HttpConnection

_SEND_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer per connection: with the transport's 64 KiB, the max memory for a client that does not read."""
_BACKLOG = 2048
_OTHER_FILES = 512
_POLL_S = 0.02


class HttpServer:
    """HTTP listener: binds in start(), accepts connections from ready() until drain(). Not thread-safe."""

    def __init__(self, config: GatewayConfig, app: ASGIApp, tls: ssl.SSLContext | None) -> None:
        """config: address and limits; port 0 selects a free port. tls: None serves plain HTTP."""
        self.port = 0
        """Bound port, known after start()."""
        self.state = ServerState()
        self._config = config
        self._tls = tls
        self._uvicorn = Config(
            app,
            http=functools.partial(HttpConnection, config),  # type: ignore[arg-type]
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=config.idle_s,  # type: ignore[arg-type]
            h11_max_incomplete_event_size=config.max_header_bytes,
        )
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind the address, without accepting connections. Raises ConfigError on failure."""
        # uvicorn logs clients' mistakes on stderr: they would fill our logs.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        _allow_files(self._config.max_connections)
        self._uvicorn.load()
        self._bind()

    async def ready(self) -> None:
        if self._server is not None:
            return
        if self._socket is None:
            self._bind()
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        # A handshake has the same timeout as the head of a request.
        handshake_s = None if self._tls is None else self._config.slow_sender_s
        self._server = await loop.create_server(
            self._connection, sock=self._socket, backlog=_BACKLOG, ssl=self._tls, ssl_handshake_timeout=handshake_s
        )
        set_ready(True)

    async def drain(self) -> None:
        """Stop accepting connections and close idle ones; each other connection closes after its current answer."""
        set_ready(False)
        if self._server is not None:
            self._server.close()
            self._server = self._socket = None
        for connection in tuple(self.state.connections):
            connection.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Drain, wait up to `grace_s` seconds for connections to end, then abort the rest."""
        await self.drain()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        give_up_s = time.monotonic() + grace_s
        while self.state.connections and time.monotonic() < give_up_s:  # noqa: ASYNC110 - uvicorn's own set
            await asyncio.sleep(_POLL_S)
        for connection in tuple(self.state.connections):
            connection.transport.abort()
        tasks = tuple(self.state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connection(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self._uvicorn.http_protocol_class(
            config=self._uvicorn, server_state=self.state, app_state={}
        )  # type: ignore[call-arg]
        return made

    def _bind(self) -> None:
        host, port = self._config.host, self._config.port
        check_address(host, port)
        try:
            listening = bind_socket(host, self.port or port)
            # Accepted connections inherit these. The event loop adds TCP_NODELAY.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            listening.setblocking(False)
        except OSError as error:
            reason = f"cannot listen on {join_address(host, port)}: {error.strerror}"
            raise ConfigError("--port", reason) from error
        self._socket = listening
        self.port = listening.getsockname()[1]


def _allow_files(connection_count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connection_count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
