"""Runs a service process around its own work: listens, registers, serves, drains, stops."""

import asyncio
import importlib.metadata
import secrets
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grpc import aio

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import DrainWay, InstanceLoad, InstanceRecord, InstanceState, Phase, PhaseOrder, Role
from kaveri.errors import InvalidArgument, Unavailable
from kaveri.hosting import instance_server
from kaveri.hosting.metrics import BUILD_INFO
from kaveri.hosting.orders import InstanceOrders
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import RpcServer
from kaveri.security.callers import Callers
from kaveri.security.posture import open_ports
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import check_order
from kaveri.v1.instance_pb2_grpc import add_InstanceServiceServicer_to_server

BROKEN_STATUS = 1
"""Exit status of a failed service: its engine broke, or its work failed."""
_STOP_GRACE_S = 1.0
"""Seconds for the last messages to leave once nothing is in flight."""
_LAST_WORD_S = 0.1
"""Seconds for the errors of a failed service to arrive."""


class ProcessServer(Protocol):
    """Interface of a process's server, such as RpcServer."""

    @property
    def port(self) -> int:
        """Listening port, known after start()."""

    async def start(self) -> None:
        """Bind the address. Raises ConfigError."""

    async def ready(self) -> None:
        """Accept requests. Also ends a drain."""

    async def drain(self) -> None:
        """Report to health checks that no requests are accepted, until ready(). Those in flight continue."""

    async def stop(self, grace_s: float) -> None:
        """Refuse requests, give those in flight `grace_s` seconds, then end them. Idempotent."""


class HostedService(Protocol):
    """Interface of a service's own work, which ServiceHost runs. All methods are called on the event loop."""

    async def run(self) -> None:
        """Run background work until cancelled."""

    def load(self) -> InstanceLoad:
        """Current load, for the heartbeat; its `state` is ignored."""

    def drain(self) -> None:
        """Refuse new requests from now on. Idempotent."""

    def undrain(self) -> None:
        """Accept new requests again after drain(). Idempotent."""

    async def wait_idle(self) -> None:
        """Return when no request is left."""

    def fail_all(self, reason: str) -> None:
        """End every remaining request as unavailable."""


def new_incarnation() -> int:
    """Random number that identifies one run of an instance's process."""
    return secrets.randbits(63)


def service_record(config: ServiceConfig, role: Role, model: str, incarnation: int) -> InstanceRecord:
    """Build a service's record for the cluster, with the fields common to all services; the host adds the address."""
    return InstanceRecord(
        instance_id=config.instance_id,
        incarnation=incarnation,
        role=role,
        address="",
        model=model,
        lease_ttl_s=config.lease_ttl_s,
        version=importlib.metadata.version("kaveri"),
        metrics_address=config.advertised_address(config.metrics_port) if config.metrics_port else "",
    )


class ServiceHost:
    """Runs one service process: owns its server, its lease in the cluster and its background work."""

    def __init__(
        self,
        config: ServiceConfig,
        store: ClusterStore,
        record: InstanceRecord,
        hosted: HostedService,
        service_names: Sequence[str] = (),
        register: Callable[[aio.Server], None] | None = None,
        server: ProcessServer | None = None,
        public: ProcessServer | None = None,
        operators: Callers | None = None,
        orders: InstanceOrders | None = None,
    ) -> None:
        """service_names: full names of the gRPC services, whose servicers `register` adds. store: already connected.
        server: replaces the gRPC server, and with it InstanceService. public: an additional server. operators: checks
        that callers of InstanceService present an admin key; None: every caller that the port admits. orders: of a
        router, which forwards them to other processes."""
        check_order()
        self.orders = orders
        """Sends orders to other processes; None: this process is no router."""
        self.record = record
        """Registration in the cluster. Has an address once `started` is set."""
        self.state = InstanceState.READY
        """State for the heartbeats."""
        self.started = asyncio.Event()
        """Set once requests are accepted."""
        self._config = config
        self._store = store
        self._hosted = hosted
        self._stopping = False
        """True once a signal or a failure has begun the shutdown."""
        server = server or self._rpc_server(service_names, register, operators, orders)
        self._servers = (server,) if public is None else (server, public)
        self._broken: asyncio.Future[str] | None = None
        self._heartbeat: Heartbeat | None = None

    @property
    def address(self) -> str:
        """Address at which other processes reach this one; empty before it listens."""
        return self.record.address

    async def serve(self, stopping: asyncio.Event) -> int:
        """Serve until `stopping` is set, then drain; or until break_off(). Returns the exit status.

        Raises ConfigError if the address cannot be bound."""
        BUILD_INFO.labels(self.record.version, self.record.role, self.record.model).set(1)
        self._broken = self._broken or asyncio.get_running_loop().create_future()
        try:
            for server in self._servers:
                await server.start()
            self.record = replace(self.record, address=self._config.advertised_address(self._servers[0].port))
            interval_s = self._config.heartbeat_interval_s
            heartbeat = Heartbeat(self._store, self.record, self.load, interval_s)
            self._heartbeat = heartbeat
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(self._hosted.run())
                beating = tasks.create_task(heartbeat.run())
                try:
                    await self._accept()
                    self.started.set()
                    get_logger().info(
                        "service_started",
                        address=self.address,
                        model=self.record.model,
                        engine=self.record.engine,
                        incarnation=self.record.incarnation,
                    )
                    _log_posture(self._config)
                    status = await self._until_stopped(stopping, heartbeat)
                    await self._stop_servers(_STOP_GRACE_S)
                    if status:
                        # Send callers the reason before they see this instance leave.
                        await asyncio.sleep(_LAST_WORD_S)
                    heartbeat.stop()
                    await beating
                    return status
                finally:
                    heartbeat.stop()
                    beating.cancel()
                    # Calls end first: they use resources of the work.
                    await self._stop_servers(0)
                    working.cancel()
        finally:
            await self._stop_servers(0)

    async def drain(self) -> bool:
        """Refuse new requests until undrain(). Returns False if it was draining already."""
        if self.state is InstanceState.DRAINING:
            return False
        self.state = InstanceState.DRAINING
        self._hosted.drain()
        self.beat_now()
        get_logger().info("drain_started")
        await self._report_draining()
        return True

    async def undrain(self) -> bool:
        """Accept requests again. Returns False if it was not draining. Raises Unavailable if the process is ending."""
        self.require_going_on()
        if self.state is InstanceState.READY:
            return False
        self.state = InstanceState.READY
        self._hosted.undrain()
        self.beat_now()
        get_logger().info("drain_ended")
        await self._accept()
        return True

    def require_going_on(self) -> None:
        """Raise Unavailable if a signal or a failure has begun the shutdown."""
        if self._stopping:
            raise Unavailable(f"{self.record.instance_id} is ending: it cannot take requests again")

    def order_phases(self, phases: Collection[Phase], order: PhaseOrder, deadline_s: float, way: DrainWay) -> bool:
        """Serve exactly these phases from now on; only instances with an engine can. See ServedPhases.order()."""
        raise InvalidArgument("instance_id", self.record.instance_id, f"of an engine, not of a {self.record.role}")

    def set_partner(self, partner_id: str, order: PhaseOrder) -> bool:
        """Pair this instance with another; only instances with an engine can be. See ServedPhases.set_partner()."""
        raise InvalidArgument("instance_id", self.record.instance_id, f"of an engine, not of a {self.record.role}")

    def break_off(self, reason: str) -> None:
        """End the service without a drain, with exit status BROKEN_STATUS. The first reason is kept."""
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        if not self._broken.done():
            self._broken.set_result(reason)

    def beat_now(self) -> None:
        """Send a heartbeat at once."""
        if self._heartbeat is not None:
            self._heartbeat.beat_now()

    def _rpc_server(
        self,
        service_names: Sequence[str],
        register: Callable[[aio.Server], None] | None,
        operators: Callers | None,
        orders: InstanceOrders | None,
    ) -> ProcessServer:
        server = RpcServer(self._config.host, self._config.port, (*service_names, instance_server.SERVICE_NAME))
        if register is not None:
            server.add(register)
        servicer = instance_server.InstanceServer(self, self._store, operators, orders)
        server.add(lambda added_to: add_InstanceServiceServicer_to_server(servicer, added_to))
        return server

    async def _accept(self) -> None:
        for server in self._servers:
            await server.ready()

    async def _report_draining(self) -> None:
        for server in reversed(self._servers):
            await server.drain()

    async def _stop_servers(self, grace_s: float) -> None:
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def load(self) -> InstanceLoad:
        """Load for the next heartbeat."""
        return replace(self._hosted.load(), state=self.state)

    async def _until_stopped(self, stopping: asyncio.Event, heartbeat: Heartbeat) -> int:
        assert self._broken is not None
        broken = self._broken
        await first_of(stopping.wait(), asyncio.wait((broken,)), timeout_s=None)
        self._stopping = True
        self.state = InstanceState.DRAINING
        self._hosted.drain()
        if not broken.done():
            heartbeat.beat_now()
            await self._report_draining()
            await first_of(self._hosted.wait_idle(), asyncio.wait((broken,)), timeout_s=self._config.drain_timeout_s)
        self._hosted.fail_all(broken.result() if broken.done() else "the instance is stopping")
        return BROKEN_STATUS if broken.done() else 0


def _log_posture(config: ServiceConfig) -> None:
    found = open_ports(config.ports)
    if found:
        advice = "let only trusted machines reach them, or see docs/security.md"
        get_logger().warning("security_posture", open_ports="; ".join(found), advice=advice)
    else:
        get_logger().info("security_posture", open_ports="none beyond loopback")


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None) -> None:
    """Return when one of the waits does, or after `timeout_s` seconds (None: no limit); cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
