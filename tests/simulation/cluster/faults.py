"""Makes the faults of a plan happen, and ends them."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import aio

from kaveri.domain.view import Phase
from kaveri.errors import Unavailable
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.service_host import ServiceHost
from kaveri.rpc import server
from kaveri.v1.instance_pb2 import SetPhasesRequest
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.wire.messages import drain_way_to_proto, phases_to_proto
from tests.simulation.cluster.draws import InjectedError
from tests.simulation.cluster.fault_rows import FaultRows
from tests.simulation.cluster.plan import Fault, FaultKind
from tests.simulation.cluster.store import STORE_NAME
from tests.simulation.cluster.world import Life, World

_STUCK_FOR_S = 6.0
"""An engine stands still for so long, unless its process ends before."""
_FLIP_WITHIN_S = 10.0
_FLIP_CALL_S = 2.0
"""Of an operator, who asks again."""
_LOAD_TAIL_S = 0.5
"""The last request is under way for so long before the faults end."""


class Faults:
    """The faults of one schedule. Runs in the simulation's own process, which no fault touches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows = FaultRows(world)
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: dict[Fault, asyncio.Future[float | None]] = {}
        # When what faults wait for has happened; None: it will not.

    async def run(self) -> None:
        """Begins every fault at its time; returns when the load is over and all faults that have begun have ended."""
        world = self._world
        for fault in world.plan.faults:
            if fault.after:
                self._watch(fault)
            self._tasks.append(asyncio.create_task(self._happen(fault)))
        last_s = world.ready_s + max((request.at_s for request in world.plan.requests), default=0.0)
        await asyncio.sleep(max(0.0, last_s + _LOAD_TAIL_S - world.now()))
        for seen in self._seen.values():
            if not seen.done():
                seen.set_result(None)
        for task in self._tasks:
            await task

    def _watch(self, fault: Fault) -> None:
        world, count = self._world, itertools.count(1)
        seen = self._seen[fault] = world.loop.create_future()

        def happened() -> None:
            if next(count) == fault.after_count and not seen.done():
                # Of the simulation's own process, for events of every process.
                world.loop.schedule(world.loop.world, 0.0, _set, seen, world.now())

        world.trace.watch(fault.after, happened)

    async def end(self) -> None:
        """Repair everything: heal links, thaw processes, bring the store back and restart instances that have ended.
        Without a flip policy each instance then serves the phases of its command again."""
        world = self._world
        world.supervised = True
        world.network.heal_all()
        for process in (*world.clients.values(), world.store.process):
            world.loop.thaw(process)
        if world.store.away:
            world.store.bring_back()
        world.store.refuses_writes = False
        for name in world.plan.names:
            life = world.lives[name]
            world.loop.thaw(life.process)
            if life.stopping.is_set() and not life.ended:
                await self._wait_for_end(life)
            world.start_again(name)
            life = world.lives[name]
            # FLIP does not restore the phases if no router answers for long.
            phases = life.planned.phases
            if world.plan.flip_targets is None and life.host is not None and life.host.load().phases != phases:
                world.loop.spawn(life.process, _order(life.host, phases))

    async def _happen(self, fault: Fault) -> None:
        world = self._world
        if fault.after:
            since_s = await self._seen[fault]
            if since_s is None:
                return
        else:
            since_s = world.ready_s
        await asyncio.sleep(max(0.0, since_s + fault.at_s - world.now()))
        world.trace.note(f"fault:{fault.kind}", str(fault))
        for row in self._rows.rows(fault):
            world.trace.note(f"row:{row}", fault.target)
        await self._act(fault)
        if fault.lasts_s:
            world.trace.note("fault_end", str(fault))

    def _act(self, fault: Fault) -> Coroutine[Any, Any, None]:
        match fault.kind:
            case FaultKind.KILL | FaultKind.RESTART:
                return self._kill(fault)
            case FaultKind.FREEZE:
                return self._freeze(fault)
            case FaultKind.CUT | FaultKind.CUT_ONE_WAY | FaultKind.ISOLATE:
                return self._cut(fault)
            case FaultKind.SLOW:
                return self._slow(fault)
            case FaultKind.RESET:
                return self._reset(fault)
            case FaultKind.CLOCK:
                return self._jump(fault)
            case FaultKind.STORE_AWAY | FaultKind.STORE_LOST:
                return self._store_away(fault)
            case FaultKind.STORE_EMPTIED:
                return self._store_emptied()
            case FaultKind.STORE_REFUSES:
                return self._store_refuses(fault)
            case FaultKind.DRAIN:
                return self._drain(fault)
            case FaultKind.UNDRAIN:
                return self._undrain(fault)
            case FaultKind.ENGINE | FaultKind.STUCK:
                return self._engine(fault)
            case FaultKind.DAMAGE:
                return self._damage(fault)
            case FaultKind.CLIENT:
                return self._client(fault)
            case FaultKind.DEATH:
                return self._death(fault)
            case FaultKind.SWITCH:
                return self._switch(fault)
            case FaultKind.FLIP:
                return self._flip(fault)

    async def _kill(self, fault: Fault) -> None:
        world = self._world
        names = dict.fromkeys((fault.target, *((fault.other,) if fault.other else ())))
        for name in names:
            world.kill(name)
        if fault.kind is FaultKind.RESTART:
            await asyncio.sleep(fault.lasts_s)
            for name in names:
                world.start_again(name, at=fault.other if name == fault.target else "")

    async def _freeze(self, fault: Fault) -> None:
        process = self._world.process_of(fault.target)
        self._world.network.freeze(process)
        await asyncio.sleep(fault.lasts_s)
        self._world.loop.thaw(process)

    async def _cut(self, fault: Fault) -> None:
        network = self._world.network
        pairs = self._pairs(fault)
        for source, target in pairs:
            network.cut(source, target)
        await asyncio.sleep(fault.lasts_s)
        for source, target in pairs:
            network.heal(source, target)

    def _pairs(self, fault: Fault) -> list[tuple[str, str]]:
        if fault.kind is FaultKind.CUT_ONE_WAY:
            return [(fault.target, fault.other)]
        world = self._world
        others = [fault.other]
        if fault.kind is FaultKind.ISOLATE:
            others = [name for name in (*world.plan.names, *world.plan.clients, STORE_NAME) if name != fault.target]
        return [pair for other in others for pair in ((fault.target, other), (other, fault.target))]

    async def _slow(self, fault: Fault) -> None:
        link = self._world.network.link(fault.target, fault.other)
        link.extra_s = fault.amount
        await asyncio.sleep(fault.lasts_s)
        link.extra_s = 0.0

    async def _reset(self, fault: Fault) -> None:
        network = self._world.network
        ends = {fault.target, fault.other}
        standing = [each for each in network.connections if {each.client.name, each.server.name} == ends]
        if standing:
            network.rng.choice(standing).break_off("connection reset")

    async def _jump(self, fault: Fault) -> None:
        self._world.loop.jump_clock(self._world.process_of(fault.target), fault.amount)

    async def _store_away(self, fault: Fault) -> None:
        store = self._world.store
        if store.away:
            return
        store.take_away()
        await asyncio.sleep(fault.lasts_s)
        if store.away:
            store.bring_back(empty=fault.kind is FaultKind.STORE_LOST)

    async def _store_emptied(self) -> None:
        if not self._world.store.away:
            self._world.store.empty()

    async def _store_refuses(self, fault: Fault) -> None:
        self._world.store.refuses_writes = True
        await asyncio.sleep(fault.lasts_s)
        self._world.store.refuses_writes = False

    async def _drain(self, fault: Fault) -> None:
        world = self._world
        life = world.lives[fault.target]
        life.stopping.set()
        await self._wait_for_end(life)
        await asyncio.sleep(fault.lasts_s)
        world.start_again(fault.target)

    async def _undrain(self, fault: Fault) -> None:
        world = self._world
        life = world.lives[fault.target]
        if life.ended or life.serving is None or not life.serving.started.is_set():
            return
        world.loop.spawn(life.process, life.serving.drain())
        await asyncio.sleep(fault.lasts_s)
        if not life.ended and not life.stopping.is_set():
            world.loop.spawn(life.process, _put_back(life.serving))

    async def _wait_until(self, condition: Callable[[], bool], within_s: float) -> None:
        until_s = self._world.now() + within_s
        while not condition() and self._world.now() < until_s:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.05)

    async def _wait_for_end(self, life: Life) -> None:
        """SIGTERM, then SIGKILL when the drain takes too long, as a process manager does."""
        world = self._world
        until_s = world.now() + world.plan.drain_timeout_s + 8.0
        while not life.ended:
            if world.now() > until_s:
                if not life.process.frozen:
                    world.violations.append(
                        f"{life.process} has not ended {world.now() - until_s + 8.0:.1f} s after its drain"
                    )
                world.kill(life.name)
            await asyncio.sleep(0.05)

    async def _engine(self, fault: Fault) -> None:
        world = self._world
        life = world.lives[fault.target]
        if life.ended or life.engine is None or life.host is None:
            return
        world.expected_errors = True
        if fault.kind is FaultKind.STUCK:
            life.engine.stall()
            # An engine with nothing to do is not stuck, and goes on as one that has.
            await self._wait_until(lambda: life.ended, _STUCK_FOR_S)
            life.engine.go_on()
        else:
            world.loop.schedule(life.process, 0.0, life.engine.fail, "an injected fault")
            await self._wait_for_end(life)
        await asyncio.sleep(fault.lasts_s)
        world.start_again(fault.target)

    async def _death(self, fault: Fault) -> None:
        self._world.expected_errors = True
        self._world.draws.deaths[fault.target] = InjectedError(int(fault.amount), fault.other == "draw")

    async def _damage(self, fault: Fault) -> None:
        network = self._world.network
        network.damage(fault.target, fault.other)
        await self._wait_until(lambda: not network.has_to_damage(fault.target, fault.other), fault.lasts_s)
        network.damages(fault.target, fault.other)

    async def _switch(self, fault: Fault) -> None:
        host = self._world.lives[fault.target].host
        if host is None:
            return
        planned = self._world.lives[fault.target].planned
        for phases, lasts_s in (((Phase(fault.other),), fault.lasts_s), (planned.phases, 0.0)):
            life = self._world.lives[fault.target]
            if life.ended or life.host is not host:
                return
            self._world.loop.spawn(life.process, _order(host, phases))
            await asyncio.sleep(lasts_s)

    async def _flip(self, fault: Fault) -> None:
        world = self._world
        for phases, lasts_s in (
            ((Phase(fault.other),), fault.lasts_s),
            (world.lives[fault.target].planned.phases, 0.0),
        ):
            request = SetPhasesRequest(
                instance_id=fault.target, phases=phases_to_proto(phases), drain=drain_way_to_proto(fault.drain)
            )
            # A fault may end the operator's process, before or while it asks.
            operator = next(process for process in world.clients.values() if not process.dead)
            asking = world.loop.spawn(operator, _ask_for_flip(world, request))
            await asyncio.wait((asking,), timeout=_FLIP_WITHIN_S + len(world.plan.routers) * _FLIP_CALL_S)
            await asyncio.sleep(lasts_s)

    async def _client(self, fault: Fault) -> None:
        world = self._world
        process = world.clients[fault.target]
        for outcome in world.outcomes:
            if outcome.ended_s is None and world.client_of[outcome.request_id] == fault.target:
                outcome.gone = True
        world.network.end_process(process)


def _set(seen: "asyncio.Future[float | None]", at_s: float) -> None:
    if not seen.done():
        seen.set_result(at_s)


async def _order(host: EngineHost, phases: tuple[Phase, ...]) -> None:
    # Numbered where it is carried out: a frozen process meets several orders at once, each of its own number.
    newest = host.load().phase_order
    await host.switch(phases, newest._replace(number=newest.number + 1))


async def _put_back(serving: ServiceHost | EngineHost) -> None:
    # Its process may have been told to end meanwhile; `kaveri undrain` says so then.
    with contextlib.suppress(Unavailable):
        await serving.undrain()


async def _ask_for_flip(world: World, request: SetPhasesRequest) -> None:
    """Send the order to each router in turn until one answers. Is given up when the last has refused it for long."""
    until_s = world.now() + _FLIP_WITHIN_S
    while world.now() < until_s:
        for router in world.plan.routers:
            async with server.open_channel(world.lives[router.name].address) as channel:
                try:
                    answer = await InstanceServiceStub(channel).SetPhases(request, timeout=_FLIP_CALL_S)
                except aio.AioRpcError as error:
                    # Also one that has left the cluster, as a frozen one does: it may come back.
                    world.trace.note("flip refused", f"{request.instance_id} {error.code()} {error.details()}")
                else:
                    # It may be old: SWITCH numbers its own orders, and with two FLIPs a former leader's may be late.
                    others = [one for one in world.plan.faults if one.kind in (FaultKind.SWITCH, FaultKind.FLIP)]
                    alone = len(others) < 2 and all(one.kind is FaultKind.FLIP for one in others)
                    assert answer.accepted or not alone, "a leader's newest order is not above the instance's"
                    world.trace.note("flip accepted", f"{request.instance_id} {answer.order.number}")
                    return
        await asyncio.sleep(0.2)
