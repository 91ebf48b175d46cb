"""The life of one engine instance as a service: start, register, serve, drain or fail, close. Knows no role.

The role (prefill, decode) is given as a HostedRole. The engine's events come to it on the event loop, each batch by
one call, so that neither the loop nor the engine waits for the other.
"""

import asyncio
import importlib.metadata
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grpc import aio

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, Role
from kaveri.engine.contract import Engine, EngineEvent, EngineStopped
from kaveri.errors import ConfigError
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.trial import Trial
from kaveri.rpc.server import RpcServer
from kaveri.telemetry.logs import get_logger

BROKEN_STATUS = 1
"""Exit status of an instance that could not go on: its engine broke, or its role lost what the engine said."""
_STOP_GRACE_S = 1.0
"""Seconds for last messages to leave once nothing is in flight."""


class HostedRole(Protocol):
    """What an instance does with its engine. Everything is called on the event loop."""

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Takes one batch of the engine's events. Does not block."""

    def load(self) -> InstanceLoad:
        """How busy the instance is; state and sequence number are filled in by the host."""

    def drain(self) -> None:
        """Refuses new requests from now on."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""

    def fail_all(self, reason: str) -> None:
        """Ends every request as unavailable, and every stream."""

    async def run(self) -> None:
        """Works in the background until cancelled."""


class InstanceHost:
    """Runs one role around one engine. Owns the engine, the server, the lease and the role's background work."""

    def __init__(
        self,
        config: InstanceConfig,
        role: Role,
        engine: Engine,
        store: ClusterStore,
        hosted: HostedRole,
        service_names: Sequence[str],
        register: Callable[[aio.Server], None],
        incarnation: int,
    ) -> None:
        """service_names: full names of the role's gRPC services; register adds their servicers.

        store: connected already.
        """
        self._config = config
        self._role = role
        self._engine = engine
        self._store = store
        self._hosted = hosted
        self._incarnation = incarnation
        self._server = RpcServer(config.host, config.port, service_names)
        self._server.add(register)
        self.state = InstanceState.READY
        """What the heartbeats say."""
        self._broken = asyncio.Event()
        self._stop_reason = ""
        self._trial: Trial | None = None
        """Takes the engine's events until it has shown that it can run its model."""
        self.started = asyncio.Event()
        """Set once requests are taken."""
        self.address = ""
        """Where others reach it, known once started."""

    async def serve(self, stopping: asyncio.Event) -> int:
        """Serves until `stopping` is set, then drains; or until it breaks. Returns the exit status.

        Raises ConfigError when the engine cannot run its model, which is tried before the instance registers, and when
        the address cannot be had. The engine is closed when this returns, however it ends.
        """
        loop = asyncio.get_running_loop()
        self._trial = Trial(self._engine, self._role is not Role.PREFILL)
        self._engine.start(lambda events: _forward(loop, self._handle, events))
        try:
            if not await self._engine_works(stopping):
                return 0
            return await self._serve_beside_work(stopping)
        finally:
            await self._server.stop(0)
            await asyncio.to_thread(self._engine.close)

    async def _engine_works(self, stopping: asyncio.Event) -> bool:
        """Tries the engine; False when `stopping` was set first. Raises ConfigError."""
        assert self._trial is not None
        trying = asyncio.ensure_future(self._trial.run())
        await _first_of(stopping.wait(), _ended(trying), timeout_s=None)
        if not trying.done():
            trying.cancel()
            return False
        trying.result()
        self._trial = None
        return not stopping.is_set()

    async def _serve_beside_work(self, stopping: asyncio.Event) -> int:
        cannot_listen: ConfigError | None = None
        status = 0
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._hosted.run())
            try:
                await self._server.start()
                status = await self._serve_requests(stopping)
            except ConfigError as error:
                # Raised in here it would come out wrapped in a group.
                cannot_listen = error
            finally:
                working.cancel()
        if cannot_listen is not None:
            raise cannot_listen
        return status

    async def _serve_requests(self, stopping: asyncio.Event) -> int:
        self.address = self._config.advertised_address(self._server.port)
        record = self._record()
        heartbeat = Heartbeat(self._store, record, self.load, self._config.heartbeat_interval_s)
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(heartbeat.run())
            try:
                await self._server.ready()
                self.started.set()
                get_logger().info("serving", address=self.address, engine=record.engine, model=record.model)
                status = await self._until_stopped(stopping, heartbeat)
                await self._server.stop(_STOP_GRACE_S)
                heartbeat.stop()
                await beating
                return status
            finally:
                heartbeat.stop()
                beating.cancel()

    async def _until_stopped(self, stopping: asyncio.Event, heartbeat: Heartbeat) -> int:
        await _first_of(stopping.wait(), self._broken.wait(), timeout_s=None)
        self.state = InstanceState.DRAINING
        self._hosted.drain()
        if not self._broken.is_set():
            heartbeat.beat_now()
            await self._server.drain()
            await _first_of(self._hosted.wait_idle(), self._broken.wait(), timeout_s=self._config.drain_timeout_s)
        self._hosted.fail_all(self._stop_reason or "the instance is stopping")
        return BROKEN_STATUS if self._broken.is_set() else 0

    def _handle(self, events: Sequence[EngineEvent]) -> None:
        try:
            if self._trial is not None:
                self._trial.handle(events)
            else:
                self._hosted.handle(events)
        except Exception as error:
            # Whose events were lost is unknown, and a request without them would wait for ever.
            self._break(f"the instance lost its engine's events: {error!r}")
            get_logger().exception("an engine's events were lost", error=repr(error))
        # By contract the last event that an engine ever sends.
        if events and isinstance(last := events[-1], EngineStopped):
            self._break(f"the engine stopped: {last.reason}")
            get_logger().error("engine stopped", reason=last.reason)

    def _break(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._broken.set()

    def load(self) -> InstanceLoad:
        """What a heartbeat says now."""
        return replace(self._hosted.load(), state=self.state)

    def _record(self) -> InstanceRecord:
        info = self._engine.info
        return InstanceRecord(
            instance_id=self._config.instance_id,
            incarnation=self._incarnation,
            role=self._role,
            address=self.address,
            model=self._config.model_name,
            engine=info.engine,
            layout=info.layout,
            kv_endpoints=info.kv_endpoints,
            max_model_len=info.max_model_len,
            lease_ttl_s=self._config.lease_ttl_s,
            version=importlib.metadata.version("kaveri"),
        )


async def _ended(task: asyncio.Future[None]) -> None:
    await asyncio.wait((task,))


def new_incarnation() -> int:
    """A random number that names one life of an instance."""
    return secrets.randbits(63)


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _forward(
    loop: asyncio.AbstractEventLoop, handle: Callable[[Sequence[EngineEvent]], None], events: Sequence[EngineEvent]
) -> None:
    """From the engine's thread to the loop."""
    loop.call_soon_threadsafe(handle, events)
