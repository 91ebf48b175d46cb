"""Runs a whole cluster as processes of this machine: Redis, routers, gateways, engine instances and predictors."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from kaveri.cluster.redis_store import RedisStore
from kaveri.config.services import ServiceKind
from kaveri.domain.view import ClusterView, InstanceState
from kaveri.errors import ConfigError, Unavailable
from kaveri.local.config import PUBLIC_ROLES, StackConfig, service_command, service_environment, stack_flag
from kaveri.local.folder import stack_folder
from kaveri.local.process import ChildProcess
from kaveri.local.redis_server import RedisServer
from kaveri.local.service_flags import ROLES
from kaveri.local.supervisor import Supervisor, describe_exit
from kaveri.rpc.process import CONFIG_ERROR_STATUS
from kaveri.rpc.server import check_address, check_health, open_channel
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc

REDIS = "redis"
_POLL_S = 0.25
_RPC_TIMEOUT_S = 2.0
_AFTER_DRAIN_S = 5.0
"""Seconds in which a service must exit after its drain timeout; then it is killed."""
_REDIS_GRACE_S = 2.0
_SHOWN_LINES = 8


class LocalStack:
    """Cluster of processes on this machine, for the duration of an async context. They cannot outlive this process.

    Entering returns once a request would succeed, or raises ConfigError with nothing left running. Leaving drains and
    stops everything in order. Not thread-safe; use it on a long-lived thread.
    """

    def __init__(self, config: StackConfig, report: Callable[[str], None] = lambda _: None) -> None:
        """report: called with a line of text for users at each event."""
        self.config = config
        self.log_dir = Path()
        self._report = report
        self._started = False
        self._supervisors: dict[str, Supervisor] = {}
        self._addresses: dict[str, str] = {}
        """Addresses of routers and gateways ("host:port") once registered; their ports are kept over restarts."""
        self._former_lives: dict[str, int] = {}
        self._resources = contextlib.AsyncExitStack()
        self._redis: RedisServer | None = None
        self._store: RedisStore | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            await self._end()

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses of the routers ("host:port") once registered; unchanged over restarts."""
        return self._addresses_of(ServiceKind.ROUTER)

    @property
    def http_targets(self) -> tuple[str, ...]:
        """Addresses of the gateways ("host:port") once registered; unchanged over restarts."""
        return self._addresses_of(ServiceKind.GATEWAY)

    @property
    def target(self) -> str:
        """Address of the first router; empty before it has registered."""
        return self.targets[0] if self.targets else ""

    @property
    def redis_url(self) -> str:
        """URL of the Redis in use; empty before a private one has started."""
        return self._redis.url if self._redis is not None else self.config.redis_url

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(self.config.roles)

    def process(self, name: str) -> ChildProcess:
        return self._supervisors[name].process

    def pids(self) -> dict[str, int]:
        """Process ids of all running children, by instance id and "redis"."""
        processes = {name: supervisor.process for name, supervisor in self._supervisors.items()}
        return {name: process.pid for name, process in processes.items() if process.exit_status is None}

    def view(self) -> ClusterView:
        assert self._store is not None, "not started"
        return self._store.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        assert self._store is not None, "not started"
        return await self._store.wait_for_change(timeout_s)

    async def stop(self) -> None:
        """Drain and stop all services, senders of work first. If cancelled, leaving the context kills the rest."""
        grace_s = self.config.supervision.drain_timeout_s + _AFTER_DRAIN_S
        for role in ROLES:
            names = [name for name in self.config.instance_ids(role) if name in self._supervisors]
            if names:
                self._report(f"stopping {', '.join(names)}")
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._supervisors[name].stop(grace_s))

    async def restart(self, name: str) -> None:
        """Restart a killed child process when automatic restarts are off. Waits only for Redis, until it answers."""
        life = self.view().instances.get(name)
        if life is not None:
            self._former_lives[name] = life.record.incarnation
        await self._supervisors[name].restart()
        if name == REDIS:
            assert self._redis is not None
            # Ask Redis itself: the instances may not have noticed its absence.
            await self._redis.wait_until_it_answers(self.process(REDIS))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until a request would succeed: every instance is ready and known to the routers. Raises Unavailable
        after `timeout_s` seconds, or at once if a missing child has ended and is not restarted automatically."""
        give_up_at_s = time.monotonic() + timeout_s
        missing: Iterable[str] = self.instance_ids
        while time.monotonic() < give_up_at_s:
            view = await self.wait_for_change(_POLL_S)
            still_missing = [name for name in self.instance_ids if not self._is_ready(name, view)]
            for name in missing:
                if name not in still_missing:
                    self._report(f"{name} is ready")
            missing = still_missing
            self._check_for_dead(missing)
            if not missing:
                # Public instances keep their ports over restarts.
                self._addresses = {name: view.instances[name].record.address for name in self.config.ports}
                if all([await self._knows_everybody(address) for address in self.targets]):
                    return
        raise Unavailable(f"not ready after {timeout_s:g} s: {', '.join(missing) or 'the router'}")

    def _check_for_dead(self, missing: Iterable[str]) -> None:
        if self.config.supervision.restart or not self._started:
            return  # The supervisor restarts the child, or ends the start.
        for name in missing:
            child = self.process(name)
            if child.exit_status is not None:
                said = " ".join(child.last_lines(1))
                raise Unavailable(f"{name} {describe_exit(child.exit_status)} before it was ready: {said}")

    async def _start(self) -> None:
        self._check_at_once()
        directory = self._resources.enter_context(stack_folder())
        self.log_dir = self.config.supervision.log_dir or directory
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            # Children without a writable log could not report why they end.
            with tempfile.TemporaryFile(dir=self.log_dir) as trial:
                trial.write(b"kaveri" * 1024)
        except OSError as error:
            raise ConfigError("--log-dir", f"cannot write in {self.log_dir}: {error.strerror}") from error
        if not self.config.redis_url:
            self._redis = RedisServer(directory)
            self._report("starting a private Redis")
            self._watch(REDIS, self._redis.launch, await self._redis.start())
            self._resources.push_async_callback(self._supervisors[REDIS].stop, _REDIS_GRACE_S)
        self._store = await self._resources.enter_async_context(RedisStore(self.redis_url, self.config.cluster_name))
        self._report(f"starting {', '.join(self.instance_ids)} on {self.config.model}; logs are in {self.log_dir}")
        for name, role in self.config.roles.items():
            self._supervise(name, role, directory)
        await self._wait_for_first_readiness()
        self._started = True

    def _check_at_once(self) -> None:
        """Raise ConfigError for a missing model or an unusable port, which services would report only after seconds."""
        model = self.config.model
        if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
            raise ConfigError("--model", f"there is no {model}")
        for name, port in self.config.ports.items():
            try:
                check_address(self.config.listening.host, port)
            except ConfigError as error:
                flag = "--gateway-port" if self.config.roles[name] is ServiceKind.GATEWAY else error.field
                raise ConfigError(flag if error.field == "--port" else error.field, error.reason) from error

    async def _end(self) -> None:
        services = (supervisor for name, supervisor in self._supervisors.items() if name != REDIS)
        try:
            await asyncio.gather(*(supervisor.kill_for_good() for supervisor in services))
        finally:
            await self._resources.aclose()

    def _watch(self, name: str, launch: Callable[[], ChildProcess], first: ChildProcess) -> None:
        restart = self.config.supervision.restart
        self._supervisors[name] = Supervisor(name, launch, first, self._report_restart, restart=restart)

    def _supervise(self, name: str, role: ServiceKind, directory: Path) -> None:
        def launch() -> ChildProcess:
            port = (
                int(self._addresses[name].rpartition(":")[2])
                if name in self._addresses
                else self.config.ports.get(name, 0)
            )
            command = service_command(self.config, role, name, port)
            environment = service_environment(self.config, role, self.redis_url, os.environ)
            # Files that a killed child leaves in its temporary folder, such as sockets, are removed with the stack's.
            environment["TMPDIR"] = str(directory)
            if role not in PUBLIC_ROLES:
                # Several engines share this machine's cores; one thread per core in each engine slows all of them down.
                environment.setdefault("OMP_NUM_THREADS", "1")
            return ChildProcess.start(name, command, self.log_dir / f"{name}.log", environment)

        try:
            first = launch()
        except OSError as error:
            raise ConfigError(name, f"cannot be started: {error}") from error
        self._watch(name, launch, first)

    async def _wait_for_first_readiness(self) -> None:
        """Wait until the stack is ready; raise ConfigError as soon as any child ends."""
        readiness: asyncio.Future[Any] = asyncio.create_task(
            self.wait_until_ready(self.config.supervision.start_timeout_s)
        )
        supervisors = tuple(self._supervisors.values())
        try:
            first_exits = [supervisor.first_exit for supervisor in supervisors]
            await asyncio.wait([readiness, *first_exits], return_when=asyncio.FIRST_COMPLETED)
            for supervisor in supervisors:
                if supervisor.first_exit.done():
                    raise self._failure(supervisor, supervisor.first_exit.result())
            try:
                await readiness
            except Unavailable as error:
                raise ConfigError("start", str(error)) from error
        finally:
            readiness.cancel()
            await asyncio.gather(readiness, return_exceptions=True)

    def _failure(self, supervisor: Supervisor, status: int) -> ConfigError:
        lines = supervisor.process.last_lines(_SHOWN_LINES)
        prefix = f"kaveri {self.config.roles.get(supervisor.name)}: "
        if status == CONFIG_ERROR_STATUS and lines and lines[-1].startswith(prefix):
            # The service has reported the invalid setting in one line.
            field, _, reason = lines[-1].removeprefix(prefix).partition(": ")
            return ConfigError(stack_flag(field), reason)
        for line in lines:
            self._report(f"{supervisor.name}: {line}")
        reasons = [*lines[-1:], *filter(None, [supervisor.process.log_problem()])]
        return ConfigError(supervisor.name, ": ".join([f"{describe_exit(status)} while starting", *reasons]))

    def _report_restart(self, line: str) -> None:
        # A child that cannot even start ends the whole stack, which reports the reason.
        if self._started:
            self._report(line)

    def _is_ready(self, name: str, view: ClusterView) -> bool:
        status = view.instances.get(name)
        return (
            status is not None
            and status.load.state is InstanceState.READY
            and status.record.incarnation != self._former_lives.get(name)
        )

    def _addresses_of(self, role: ServiceKind) -> tuple[str, ...]:
        return tuple(self._addresses[name] for name in self.config.instance_ids(role) if name in self._addresses)

    async def _knows_everybody(self, address: str) -> bool:
        """Return True if the router at `address` accepts requests and lists all instances of the stack. One with API
        keys lists them to operators only, so its list is not checked."""
        if not await check_health(address, _RPC_TIMEOUT_S):
            return False
        async with open_channel(address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            try:
                shown = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), timeout=_RPC_TIMEOUT_S)
            except aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
        lives = {status.record.instance_id: status.record.incarnation for status in shown.instances}
        here = self.view().instances
        return all(name in here and lives.get(name) == here[name].record.incarnation for name in self.instance_ids)
