import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.store import HeartbeatAnswer
from kaveri.domain.view import InstanceLoad, InstanceRecord, Phase, Role

_RECORD = InstanceRecord(
    "decode-0", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=60.0, phases=(Phase.DECODE,)
)
_LONG_S = 60.0


class _RecordingStore(MemoryStore):
    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.sent_at_s: list[float] = []
        self.loads: list[InstanceLoad] = []

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        self.sent_at_s.append(time.monotonic())
        self.loads.append(load)
        return await super().heartbeat(record, load)


@pytest.fixture
async def store() -> AsyncIterator[_RecordingStore]:
    async with _RecordingStore(MemoryCluster()) as store:
        yield store


@asynccontextmanager
async def _running(heartbeat: Heartbeat) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(heartbeat.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - any condition at all
            await asyncio.sleep(0.001)


async def test_numbers_rise_by_one_and_each_heartbeat_asks_for_the_load_anew(store: _RecordingStore) -> None:
    free_blocks = iter(range(100, 0, -1))
    heartbeat = Heartbeat(store, _RECORD, lambda: InstanceLoad(free_blocks=next(free_blocks)), interval_s=0.02)
    async with _running(heartbeat):
        await _until(lambda: len(store.loads) >= 3)
    assert [(load.sequence_number, load.free_blocks) for load in store.loads[:3]] == [(1, 100), (2, 99), (3, 98)]


async def test_beat_now_does_not_wait_for_the_interval(store: _RecordingStore) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=_LONG_S)
    async with _running(heartbeat):
        await _until(lambda: len(store.loads) == 1)
        heartbeat.beat_now()
        await _until(lambda: len(store.loads) == 2)


async def test_beat_now_called_all_the_time_sends_at_most_a_hundred_a_second(store: _RecordingStore) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=_LONG_S)

    def nudge_until_four_were_sent() -> bool:
        heartbeat.beat_now()
        return len(store.loads) >= 4

    async with _running(heartbeat):
        await _until(nudge_until_four_were_sent)
    pauses = [later - earlier for earlier, later in zip(store.sent_at_s, store.sent_at_s[1:], strict=False)]
    assert min(pauses) >= 0.009


async def test_stop_deregisters_and_ends_without_waiting_for_the_interval(store: _RecordingStore) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=_LONG_S)
    async with _running(heartbeat) as task:
        await _until(lambda: "decode-0" in store.view().instances)
        heartbeat.stop()
        await asyncio.wait_for(task, 10)
    assert store.view().instances == {}


async def test_cancelled_heartbeat_leaves_its_lease_to_run_out(store: _RecordingStore) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=_LONG_S)
    async with _running(heartbeat):
        await _until(lambda: "decode-0" in store.view().instances)
    assert "decode-0" in store.view().instances


async def test_a_load_that_does_not_change_is_looked_at_only_to_renew_the_lease_until_there_is_work(
    store: _RecordingStore,
) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=0.001)
    async with _running(heartbeat):
        await _until(lambda: heartbeat._pause_s > 100 * 0.001)
        assert not heartbeat._due.is_set()
        heartbeat.note_work()
        assert heartbeat._due.is_set()
        await _until(lambda: heartbeat._pause_s == 0.001)


async def test_an_unchanged_load_is_reported_twice_and_then_only_renews_the_lease(store: _RecordingStore) -> None:
    looks: list[int] = []

    def load() -> InstanceLoad:
        looks.append(1)
        return InstanceLoad(free_blocks=7)

    heartbeat = Heartbeat(store, _RECORD, load, interval_s=0.001)
    async with _running(heartbeat):
        await _until(lambda: len(looks) >= 10)
    assert len(store.loads) < len(looks)
    assert [load.sequence_number for load in store.loads[:2]] == [1, 2]
    assert {load.sequence_number for load in store.loads[2:]} <= {2}


async def test_a_lease_is_renewed_three_times_with_the_number_of_the_last_report(store: _RecordingStore) -> None:
    record = replace(_RECORD, lease_ttl_s=0.3)
    heartbeat = Heartbeat(store, record, InstanceLoad, interval_s=0.001)
    async with _running(heartbeat):
        await _until(lambda: len(store.loads) >= 4)
    assert [load.sequence_number for load in store.loads[:4]] == [1, 2, 2, 2]
    assert store.sent_at_s[3] - store.sent_at_s[2] >= 0.08


async def test_work_that_comes_and_goes_between_two_heartbeats_is_reported_twice(store: _RecordingStore) -> None:
    heartbeat = Heartbeat(store, _RECORD, InstanceLoad, interval_s=0.001)
    async with _running(heartbeat):
        await _until(lambda: len(store.loads) == 2)
        heartbeat.note_work()
        await _until(lambda: len(store.loads) == 4)
    assert [load.sequence_number for load in store.loads[:4]] == [1, 2, 3, 4]
