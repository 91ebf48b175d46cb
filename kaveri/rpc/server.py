"""Starts and stops gRPC servers with health and reflection, and opens channels."""

import errno
from collections.abc import Callable, Sequence

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kaveri.addresses import bind_socket, join_address
from kaveri.errors import ConfigError
from kaveri.rpc.public_port import KeyCheck, PublicPort
from kaveri.rpc.tls import RpcTls, process_tls
from kaveri.telemetry.readiness import set_ready

MAX_MESSAGE_BYTES = 4 * 2**20
"""Max message size in both directions: a prompt of a million token ids or four million characters."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detects a hanging peer within about 15 s, also on an idle stream.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Call peers at the address they registered, never through a proxy from the environment.
    ("grpc.enable_http_proxy", 0),
)
_CHANNEL_OPTIONS = (
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name this option limits one connection attempt; a busy peer needs some time.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Instances that share one address over time must not share a channel's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class RpcServer:
    """gRPC server with grpc.health.v1 and reflection. NOT_SERVING before ready() and after drain()."""

    def __init__(self, host: str, port: int, service_names: Sequence[str], public: PublicPort | None = None) -> None:
        """service_names: full names, such as "kaveri.v1.DecodeService". port: 0: any free one. public: for
        --public-port, with its own TLS and no reflection; None: the process's TLS, see use_tls()."""
        self._host = host
        self._port = port
        self._flag = "--port" if public is None else "--public-port"
        self._names = (*service_names, "")
        self._tls = process_tls() if public is None else public.tls
        interceptors: tuple[aio.ServerInterceptor, ...] = () if self._tls is None else self._tls.interceptors()
        if public is not None:
            interceptors = (KeyCheck(public.callers), *interceptors)
        self._server = aio.server(interceptors=interceptors, options=(*_OPTIONS, ("grpc.so_reuseport", 0)))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if public is None:
            reflected = (
                *service_names,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            )
            reflection.enable_server_reflection(reflected, self._server)
        self.port = 0
        """The port it listens on, known after start()."""

    def add(self, register: Callable[[aio.Server], None]) -> None:
        """Register a servicer, before start(): `server.add(partial(add_FooServicer_to_server, servicer))`."""
        register(self._server)

    async def start(self) -> None:
        """Start listening. Raises ConfigError when the address cannot be bound."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        # Try a plain socket first: gRPC's error says less, and prints a line of its own.
        check_address(self._host, self._port, self._flag)
        address = join_address(self._host, self._port)
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(self._flag, f"cannot listen on {address}: {error}") from error
        await self._server.start()

    async def ready(self) -> None:
        """Report SERVING in the gRPC health service, and the process as ready at /readyz."""
        set_ready(True)
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Report NOT_SERVING in the gRPC health service, and the process as not ready. RPCs continue."""
        set_ready(False)
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Reject new RPCs, give those in flight `grace_s` seconds, then cancel them."""
        set_ready(False)
        await self._server.stop(grace_s)


def open_channel(address: str, tls: RpcTls | None = None) -> aio.Channel:
    """Open a gRPC channel to "host:port", which connects on first use. tls: None: the process's, see use_tls()."""
    tls = tls or process_tls()
    if tls is None:
        return aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return tls.open_channel(address, _CHANNEL_OPTIONS)


async def check_health(address: str, timeout_s: float) -> bool:
    """Return True if the server at `address` reports SERVING within `timeout_s` seconds."""
    async with open_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s, wait_for_ready=True)
        except aio.AioRpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def check_address(host: str, port: int, port_flag: str = "--port") -> None:
    """Raise ConfigError, naming --host or `port_flag`, if the address cannot be bound now. port: 0: any free one."""
    try:
        bind_socket(host, port).close()
    except OSError as error:
        flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(flag, f"cannot listen on {join_address(host, port)}: {error.strerror}") from error
