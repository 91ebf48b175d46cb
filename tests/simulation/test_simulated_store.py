"""The simulated store does what every store must, on the simulation's loop and clock."""

import asyncio
import functools
import inspect
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kaveri.cluster.store import ViewSource
from tests.simulation.cluster.entropy import DrawnIds, replaced_world
from tests.simulation.cluster.loop import SimulatedLoop, SimulatedProcess
from tests.simulation.cluster.network import LinkQuality, Network
from tests.simulation.cluster.store import SimulatedStore, SimulatedStoreServer
from tests.simulation.cluster.trace import Trace
from tests.support.store_conformance import StoreConformance

_QUICK = LinkQuality(delay_s=0.0005, jitter_s=0.001)


class _SimulatedStores:
    """A simulated store's process, and a process that opens stores on it."""

    def __init__(self, loop: SimulatedLoop, network: Network) -> None:
        self.loop = loop
        self._server = SimulatedStoreServer(network)
        self._process = SimulatedProcess("stores")

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """The test, in virtual time."""
        self.loop.run_until_complete(self.loop.spawn(self._process, test))
        assert not self.loop.unhandled

    def open_store(self, follow: ViewSource = ViewSource.HEARTBEATS) -> SimulatedStore:
        return SimulatedStore(self._server, follow)

    async def take_away(self) -> None:
        self._server.take_away()

    async def bring_back_empty(self) -> None:
        self._server.bring_back(empty=True)

    async def refuse_heartbeats(self) -> None:
        self._server.refuses_writes = True

    async def take_heartbeats(self) -> None:
        self._server.refuses_writes = False


@pytest.fixture
def cluster() -> Iterator[_SimulatedStores]:
    loop = SimulatedLoop(random.Random(1))
    network = Network(loop, random.Random(2), Trace(loop, lines=False), _QUICK)
    with replaced_world(loop, network, random.Random(3), DrawnIds()):
        yield _SimulatedStores(loop, network)
        loop.close()


def _in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(self: object, cluster: _SimulatedStores, **arguments: object) -> None:
        cluster.run(test(self, cluster=cluster, **arguments))

    return run


class TestSimulatedStore(StoreConformance):
    """The suite's tests are coroutines for a real loop: each runs on the simulated one."""


for _name, _test in inspect.getmembers(StoreConformance, inspect.iscoroutinefunction):
    if _name.startswith("test_"):
        setattr(TestSimulatedStore, _name, _in_virtual_time(_test))


def test_commands_that_wait_for_an_answer_fail_when_the_store_dies(cluster: _SimulatedStores) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with cluster.open_store() as store:
            closing = asyncio.create_task(store.close_requests([]))
            await asyncio.sleep(0)
            await cluster.take_away()
            lost_s = loop.time()
            assert not await closing
            assert loop.time() - lost_s < 0.1

    cluster.run(test())
