import pytest

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.store import ViewSource
from tests.support.store_conformance import StoreConformance


class _MemoryStores:
    def __init__(self) -> None:
        self._state = MemoryCluster()

    def open_store(self, follow: ViewSource = ViewSource.HEARTBEATS) -> MemoryStore:
        return MemoryStore(self._state, follow)

    async def take_away(self) -> None:
        self._state.take_away()

    async def bring_back_empty(self) -> None:
        self._state.bring_back(empty=True)

    async def refuse_heartbeats(self) -> None:
        self._state.refuses_heartbeats = True

    async def take_heartbeats(self) -> None:
        self._state.refuses_heartbeats = False


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def cluster(self) -> _MemoryStores:
        return _MemoryStores()
