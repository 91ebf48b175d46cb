"""Builds a gateway from its settings and runs it: finds routers, registers in the cluster, serves, drains."""

import asyncio
import sys
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kaveri.client.api_key import VARIABLE, find_api_key
from kaveri.client.async_client import AsyncClient
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceState, Role
from kaveri.errors import ConfigError
from kaveri.hosting.service_host import ServiceHost, new_incarnation, service_record
from kaveri.hosting.store import open_store
from kaveri.security.callers import make_callers
from kaveri.security.settings import PUBLIC_PREFIX
from kaveri.security.tls_files import WatchedTlsFiles
from kaveri.telemetry.logs import get_logger
from services.gateway import metrics
from services.gateway.app import App
from services.gateway.config import GatewayConfig
from services.gateway.http_server import HttpServer

_WATCH_TIMEOUT_S = 1.0
_LOG_EVERY_S = 5.0
_POLL_S = 0.25
_SWITCH_S = 0.001


async def serve(config: GatewayConfig, stopping: asyncio.Event) -> int:
    """Serve until `stopping` is set, then drain. Returns the process's exit status. Raises ConfigError."""
    # Max wait of the event loop for the GIL after each turn, while a thread parses bodies.
    sys.setswitchinterval(_SWITCH_S)
    has_key = bool(config.routers and find_api_key(None))
    if config.direct == "on" and has_key:
        reason = f"on does not go with {VARIABLE}: the public ports that ask for it send all tokens themselves"
        raise ConfigError("--direct", reason)
    is_direct = config.direct != "off" and not has_key
    # With configured routers a private in-memory cluster replaces Redis.
    opened = MemoryStore(MemoryCluster()) if config.routers else open_store(config, stopping)
    async with opened as store:
        if store is None:
            return 0
        targets = config.routers or await _wait_for_routers(store, stopping)
        if not targets:
            return 0
        async with AsyncClient(targets, timeout_s=config.request_timeout_s, direct=is_direct) as client:
            return await gateway_host(Gateway(config, client, store)).serve(stopping)
    return 0


class Gateway:
    def __init__(self, config: GatewayConfig, client: AsyncClient, store: ClusterStore) -> None:
        """Raises ConfigError for an invalid file of API keys or certificate."""
        self.config = config
        self.client = client
        self.store = store
        self.callers = make_callers(config.keys_file, "" if config.routers else config.redis_url, config.cluster_name)
        self.app = App(config, client, self.callers)
        files = config.public_tls
        tls = None if files is None else WatchedTlsFiles(files, PUBLIC_PREFIX).server_context(("http/1.1",))
        self.server = HttpServer(config, _with_cors(self.app, config.cors_origin), tls)

    async def run(self) -> None:
        """Watch the cluster's routers and the file of API keys for changes, until cancelled."""
        metrics.CONNECTIONS.set_function(lambda: len(self.server.state.connections))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_routers())
            if self.callers is not None:
                tasks.create_task(self.callers.run())

    async def _follow_routers(self) -> None:
        targets: tuple[str, ...] = ()
        while True:
            view = await self.store.wait_for_change(_WATCH_TIMEOUT_S)
            found = _router_targets(view)
            # The last known routers are better than none.
            if not self.config.routers and found and found != targets:
                targets = found
                self.client.use_targets(targets)
                get_logger().info("routers_changed", routers=", ".join(targets))

    def load(self) -> InstanceLoad:
        return InstanceLoad(running_requests=self.app.in_flight)

    def drain(self) -> None:
        self.app.draining = True

    def undrain(self) -> None:
        self.app.draining = False

    async def wait_idle(self) -> None:
        await self.app.idle.wait()

    def fail_all(self, reason: str) -> None:
        for answers in tuple(self.app.answering):
            answers.fail(f"this gateway is ending: {reason}")


def _with_cors(app: App, origins: tuple[str, ...]) -> ASGIApp:
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # Browsers ask for the permitted requests without a key.
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", "retry-after-ms"),
    )


def gateway_host(gateway: Gateway) -> ServiceHost:
    record = service_record(gateway.config, Role.GATEWAY, "", new_incarnation())
    return ServiceHost(gateway.config, gateway.store, record, gateway, server=gateway.server)


def _router_targets(view: ClusterView) -> tuple[str, ...]:
    """Return the addresses of the routers that accept requests, ordered by id; those of all routers if all drain."""
    routers = [one for _, one in sorted(view.instances.items()) if one.record.role is Role.ROUTER]
    ready = [router for router in routers if router.load.state is InstanceState.READY]
    return tuple(dict.fromkeys(router.record.address for router in ready or routers))


async def _wait_for_routers(store: ClusterStore, stopping: asyncio.Event) -> tuple[str, ...]:
    log_s = time.monotonic() + _LOG_EVERY_S
    while not stopping.is_set():
        targets = _router_targets(await store.wait_for_change(_POLL_S))
        if targets:
            return targets
        if time.monotonic() >= log_s:
            log_s += _LOG_EVERY_S
            get_logger().warning("router_awaited")
    return ()
