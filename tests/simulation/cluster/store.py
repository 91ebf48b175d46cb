"""The cluster's store as simulated processes reach it: a MemoryCluster in a process of its own, behind links.

Commands and events take time, wait for cut links, and fail when the store is away, frozen or refuses writes. Each
process finds out as it would with Redis: by a broken connection, or because nothing is heard.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from kaveri.cluster.membership import Membership
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.cluster.store import HeartbeatAnswer, RequestClaim, ViewSource
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, LoadBroadcast
from kaveri.errors import ConfigError
from tests.simulation.cluster.loop import SimulatedProcess, current_process
from tests.simulation.cluster.network import Network, Pipe

ResultT = TypeVar("ResultT")

STORE_NAME = "store"
_COMMAND_TIMEOUT_S = 0.9
_LOST_AFTER_S = 1.0
_TICK_S = 0.1
_RECONNECT_S = 0.25
_START_TIMEOUT_S = 3.0


class SimulatedStoreServer:
    """The store's own process. Its state outlives it, unless it is emptied."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cluster = MemoryCluster()
        self.store = MemoryStore(self.cluster)
        """Runs the commands."""
        self.process = SimulatedProcess(STORE_NAME)
        self.refuses_writes = False
        """As a Redis that has become a replica, or is out of memory."""
        self._relays: dict[_Relay, None] = {}
        self.connections: dict[SimulatedStore, None] = {}

    @property
    def away(self) -> bool:
        """Whether no process can reach it."""
        return self.process.dead

    def take_away(self) -> None:
        """The store dies; every connection to it breaks."""
        if not self.away:
            process = self.process
            self.network.end_process(process)
            for relay in list(self._relays):
                self.leave(relay)
            for store in list(self.connections):
                Pipe(self.network, process, store.process).send(store.connection_lost)
            self.connections.clear()

    def bring_back(self, *, empty: bool = False) -> None:
        """Starts it again. empty: it has lost its state."""
        self.process = SimulatedProcess(STORE_NAME, self.process.life + 1)
        self.refuses_writes = False
        if empty:
            self.cluster.bring_back(empty=True)

    def empty(self) -> None:
        """It loses its state while it runs."""
        self.cluster.bring_back(empty=True)

    def join(self, relay: "_Relay") -> None:
        """In the store's process: subscribes."""
        self._relays[relay] = None
        self.cluster.join(relay)

    def leave(self, relay: "_Relay") -> None:
        """Ends join(). Idempotent."""
        if relay in self._relays:
            del self._relays[relay]
            self.cluster.leave(relay)

    async def follow_heartbeats(self, relay: "_Relay", _: MemoryStore) -> None:
        """In the store's process: the relay hears heartbeats too, until it hears a broadcast."""
        if relay in self._relays:
            self.cluster.follow_heartbeats(relay)


class _Relay(Membership):
    """Stands for one process's membership in the store's process: passes on what the store publishes."""

    def __init__(self, store: "SimulatedStore", pipe: Pipe) -> None:
        super().__init__(time.monotonic)
        self._store = store
        self._pipe = pipe

    def learn(
        self,
        record: InstanceRecord,
        load: InstanceLoad,
        remaining_s: float | None = None,
        heartbeat_age_s: float | None = None,
    ) -> None:
        self._pipe.send(self._store.heard, self, "learn", record, load, remaining_s, heartbeat_age_s)

    def forget(self, instance_id: str, incarnation: int) -> None:
        self._pipe.send(self._store.heard, self, "forget", instance_id, incarnation)

    def store_lost(self) -> None:
        """Found out by the process itself."""

    def store_returned(self) -> None:
        """As store_lost()."""


class _MonitoredRelay(_Relay, MonitoredMembership):
    """A relay for a process that follows the monitor's broadcasts."""

    def take_in(self, broadcast: LoadBroadcast) -> bool:
        self._pipe.send(self._store.heard, self, "take_in", broadcast)
        return True


class SimulatedStore:
    """A ClusterStore whose state is in another process."""

    def __init__(self, server: SimulatedStoreServer, follow: ViewSource = ViewSource.HEARTBEATS) -> None:
        self._server = server
        self._network = server.network
        kind = MonitoredMembership if follow is ViewSource.BROADCASTS else Membership
        self._membership = kind(time.monotonic)
        self.process = current_process()
        self._relay: _Relay | None = None
        self._pipes: dict[int, tuple[Pipe, Pipe]] = {}
        self._heard_at_s = 0.0
        self._refused = False
        # Whether the store has refused a write and taken none since.
        self._lost = False
        self._unanswered: dict[Callable[[], None], None] = {}
        """Fail the commands that wait for an answer."""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _START_TIMEOUT_S
        while not await self._subscribe():
            if loop.time() > until_s:
                raise ConfigError("--redis-url", "no store answers")
            await asyncio.sleep(_RECONNECT_S)
        self._watching = asyncio.create_task(self._watch(), name="store")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watching is not None, "left without being entered"
        self._watching.cancel()
        await asyncio.wait([self._watching])
        self._unsubscribe()

    # ---- ClusterStore ----

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        return await self._command(lambda store: store.heartbeat(record, load), HeartbeatAnswer())

    async def deregister(self, record: InstanceRecord) -> None:
        await self._command(lambda store: store.deregister(record), None)

    def view(self) -> ClusterView:
        return self._membership.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        return await self._membership.wait_for_change(timeout_s)

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        return await self._command(lambda store: store.campaign(candidate_id, ttl_s), None)

    async def resign(self, candidate_id: str) -> None:
        await self._command(lambda store: store.resign(candidate_id), None)

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        return await self._command(lambda store: store.broadcast(broadcast), False)

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        return await self._command(lambda store: store.claim_request(claim, ttl_s), None)

    async def find_request(self, request_id: str) -> RequestClaim | None:
        return await self._command(lambda store: store.find_request(request_id), None, writes=False)

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        await self._command(lambda store: store.update_requests(claims), None)

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        return await self._command(lambda store: store.close_requests(claims), False)

    # ---- what the store's process sends ----

    def heard(self, relay: _Relay, event: str, *args: Any) -> None:
        """An event has arrived. Those of a connection that was given up are ignored."""
        if relay is not self._relay:
            return
        self._heard_at_s = asyncio.get_running_loop().time()
        self._tick()
        getattr(self._membership, event)(*args)

    def connection_lost(self) -> None:
        """The store's machine has closed the connection: commands that it has not answered fail."""
        self._lost = True
        for unanswered in tuple(self._unanswered):
            unanswered()

    # ---- inside ----

    async def _command(
        self, command: Callable[[MemoryStore], Coroutine[Any, Any, ResultT]], otherwise: ResultT, writes: bool = True
    ) -> ResultT:
        """Has the store run it. otherwise: the result when the store is away, or refuses."""
        answer: asyncio.Future[tuple[ResultT, bool | None]] = asyncio.get_running_loop().create_future()
        server = self._server
        if server.away:
            # Refused: there is a machine, and nothing listens there.
            await asyncio.sleep(0.001)
            return otherwise
        up, down = self._pipes_to(server.process)

        def at_the_store() -> None:
            refused = writes and server.refuses_writes
            down.send(_set, answer, (otherwise if refused else _result(command(server.store)), refused))

        up.send(at_the_store)
        fail = partial(_set, answer, (otherwise, None))
        self._unanswered[fail] = None
        giving_up = asyncio.get_running_loop().call_later(_COMMAND_TIMEOUT_S, fail)
        try:
            result, refused = await answer
        finally:
            giving_up.cancel()
            del self._unanswered[fail]
        if refused:
            # A store that takes no heartbeats is a lost one: leases would end everywhere.
            self._refused = True
            self._membership.store_lost()
        elif writes and self._refused and refused is not None:
            self._refused = False
            self._membership.store_returned()
        return result

    def _tick(self) -> None:
        membership = self._membership
        if self._refused or (isinstance(membership, MonitoredMembership) and not membership.is_silent()):
            return
        membership.tick()

    def _pipes_to(self, process: SimulatedProcess) -> tuple[Pipe, Pipe]:
        pipes = self._pipes.get(process.life)
        if pipes is None:
            pipes = (Pipe(self._network, self.process, process), Pipe(self._network, process, self.process))
            self._pipes[process.life] = pipes
        return pipes

    async def _subscribe(self) -> bool:
        """Connects, and loads the state. False: the store does not answer."""
        server = self._server
        if server.away:
            return False
        _, down = self._pipes_to(server.process)
        kind = _MonitoredRelay if isinstance(self._membership, MonitoredMembership) else _Relay
        relay = self._relay = kind(self, down)

        async def join(_: MemoryStore) -> bool:
            server.join(relay)
            server.connections[self] = None
            return True

        self._lost = False
        if not await self._command(join, False, writes=False):
            self._unsubscribe()
            return False
        self._heard_at_s = asyncio.get_running_loop().time()
        return True

    def _unsubscribe(self) -> None:
        relay, self._relay = self._relay, None
        server = self._server
        server.connections.pop(self, None)
        if relay is not None and not server.away:
            self._pipes_to(server.process)[0].send(server.leave, relay)

    async def _watch(self) -> None:
        while True:
            await self._follow()
            self._membership.store_lost()
            self._unsubscribe()
            await self._reconnect()
            self._membership.store_returned()

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(_RECONNECT_S)
            if await self._subscribe():
                return

    async def _follow(self) -> None:
        """Returns when the store is lost."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            if self._lost:
                return
            if loop.time() - self._heard_at_s > _TICK_S:
                # Answered within a command's time limit, or the store is lost.
                if not await self._command(_ping, False, writes=False):
                    return
                self._heard_at_s = loop.time()
            self._tick()
            if isinstance(self._membership, MonitoredMembership) and self._membership.is_silent():
                assert self._relay is not None
                await self._command(partial(self._server.follow_heartbeats, self._relay), None, writes=False)


async def _ping(_: MemoryStore) -> bool:
    return True


def _result(command: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Of a call that does not wait."""
    try:
        command.send(None)
    except StopIteration as end:
        return cast(ResultT, end.value)
    raise AssertionError("a memory store waits")


def _set(future: "asyncio.Future[ResultT]", value: ResultT) -> None:
    if not future.done():
        future.set_result(value)
