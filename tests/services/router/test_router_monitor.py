import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, LoadBroadcast, Phase, Role
from services.router import metrics, monitor
from services.router.monitor import Monitor
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually
from tests.support.store_conformance import DECODE, PREDICTOR, PREFILL, lead

_PATIENT_DECODE = InstanceRecord(
    "decode-9", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=600.0, phases=(Phase.DECODE,)
)
_PATIENT_S = 30.0


class _Recorder(MonitoredMembership):
    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.heard: list[LoadBroadcast] = []

    def take_in(self, broadcast: LoadBroadcast) -> bool:
        self.heard.append(broadcast)
        return super().take_in(broadcast)

    def last_ids(self) -> set[str]:
        return {status.record.instance_id for status in self.heard[-1].instances} if self.heard else set()


def _recorded() -> tuple[MemoryCluster, _Recorder]:
    cluster, recorder = MemoryCluster(), _Recorder()
    cluster.join(recorder)
    return cluster, recorder


@contextlib.asynccontextmanager
async def _monitor(cluster: MemoryCluster, router_id: str, interval_s: float = 0.02) -> AsyncIterator[Monitor]:
    async with MemoryStore(cluster) as store, asyncio.TaskGroup() as group:
        monitor = Monitor(store, router_id, interval_s)

        async def watch() -> None:
            while True:
                monitor.update(await store.wait_for_change(0.5))

        watching = group.create_task(watch())
        group.create_task(monitor.run())
        yield monitor
        monitor.stop()
        watching.cancel()


async def test_leader_names_engines_and_predictors_and_nobody_else() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0"):
        router = replace(PREFILL, instance_id="router-9", role=Role.ROUTER)
        for record in (DECODE, PREDICTOR, PREFILL, router):
            cluster.heartbeat(record, InstanceLoad(4, free_blocks=17))
        await eventually(lambda: recorder.last_ids() == {"decode-0", "predictor-0", "prefill-0"})
        last = recorder.heard[-1]
        assert last.leader_id == "router-0"
        assert {status.load.free_blocks for status in last.instances} == {17}
        assert [heard.sequence_number for heard in recorder.heard] == list(range(1, len(recorder.heard) + 1))


async def test_one_of_two_leads_and_the_other_takes_over_when_it_stops() -> None:
    cluster, recorder = _recorded()
    takeovers = metrics.MONITOR_TAKEOVERS._value.get()
    async with _monitor(cluster, "router-0") as first:
        await eventually(lambda: first.leading)
        async with _monitor(cluster, "router-1") as second:
            await eventually(lambda: len(recorder.heard) > 5)
            assert not second.leading
            first.stop()
            await eventually(lambda: second.leading)
            await eventually(lambda: recorder.heard[-1].leader_id == "router-1")
            assert not first.leading
            assert metrics.MONITOR_LEADING._value.get() == 1
    assert metrics.MONITOR_TAKEOVERS._value.get() == takeovers + 2
    assert metrics.MONITOR_LEADING._value.get() == 0
    tokens = [heard.fencing_token for heard in recorder.heard]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 2


async def test_arrival_draining_and_end_of_an_instance_are_broadcast_at_once() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0", interval_s=600.0):
        await eventually(lambda: len(recorder.heard) == 1)
        cluster.heartbeat(_PATIENT_DECODE, InstanceLoad(1))
        await eventually(lambda: recorder.last_ids() == {"decode-9"})
        cluster.heartbeat(_PATIENT_DECODE, InstanceLoad(2, state=InstanceState.DRAINING))
        await eventually(lambda: recorder.heard[-1].instances[0].load.state is InstanceState.DRAINING)
        cluster.deregister(_PATIENT_DECODE)
        await eventually(lambda: recorder.last_ids() == set())


async def test_leader_that_was_replaced_unawares_is_fenced_and_says_so() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0") as monitor:
        await eventually(lambda: monitor.leading)
        cluster.resign("router-0")
        usurper = cluster.campaign("usurper", 600.0)
        assert usurper is not None
        await eventually(lambda: not monitor.leading)
        assert all(heard.fencing_token < usurper for heard in recorder.heard)
        cluster.resign("usurper")
        await eventually(lambda: recorder.heard[-1].fencing_token > usurper)


async def test_store_that_goes_away_takes_the_lead_and_gives_it_back_with_a_greater_token() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0") as monitor:
        await eventually(lambda: len(recorder.heard) > 0)
        before = recorder.heard[-1].fencing_token
        cluster.take_away()
        await eventually(lambda: not monitor.leading)
        cluster.bring_back(empty=True)
        await eventually(lambda: recorder.heard[-1].fencing_token > before)


async def test_draining_router_resigns_while_its_requests_go_on(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "LEADER_LEASE_S", 600.0)
    async with cluster.router(drain_timeout_s=_PATIENT_S) as under_test, MemoryStore(cluster.cluster) as other:
        router = under_test.router
        await eventually(lambda: router.monitor.leading)
        assert await other.campaign("other", 60.0) is None
        task = asyncio.current_task()
        assert task is not None
        slot = router.table.reserve("endless", 0, b"", task)
        draining = asyncio.create_task(under_test.drain())
        await lead(other, "other")
        assert not draining.done()
        router.table.release(slot)
        await draining


async def test_a_lead_that_is_regained_within_its_lease_goes_on_counting_orders_and_broadcasts() -> None:
    cluster, recorder = _recorded()
    cluster.heartbeat(DECODE, InstanceLoad(4, free_blocks=17))
    async with _monitor(cluster, "router-0") as leader:
        await eventually(lambda: len(recorder.heard) >= 2)
        first = leader.next_order()
        assert first is not None
        # As when a call to the store is lost.
        leader._set_token(None, "the store was away")
        assert leader.next_order() is None
        leader._campaign_at_s = 0.0
        leader._due.set()
        await eventually(lambda: leader.leading)
        assert leader.next_order() == (first.fencing_token, first.number + 1)
        heard = len(recorder.heard)
        await eventually(lambda: len(recorder.heard) > heard)
        numbers = [each.sequence_number for each in recorder.heard]
        assert numbers == sorted(set(numbers))


async def test_a_router_gives_no_order_once_its_lease_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = _recorded()
    async with _monitor(cluster, "router-0") as leader:
        await eventually(lambda: leader.next_order() is not None)
        later_s = time.monotonic() + monitor.LEADER_LEASE_S
        with monkeypatch.context() as frozen:
            frozen.setattr(monitor.time, "monotonic", lambda: later_s)
            assert leader.leading
            assert leader.next_order() is None
