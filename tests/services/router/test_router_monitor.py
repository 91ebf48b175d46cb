"""One router leads the cluster monitor, whatever dies, and prefill instances place requests with or without it."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, LoadBroadcast, Phase, Role
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.v1 import cluster_pb2
from services.router import metrics, monitor
from services.router.monitor import Monitor
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.store_conformance import DECODE, PREDICTOR, PREFILL, lead

_ROUTERS = ("router-0", "router-1")
_PROMPT = tuple(range(1, 60))
_ANSWER_TOKENS = 20
_PATIENT_DECODE = InstanceRecord(
    "decode-9", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=600.0, phases=(Phase.DECODE,)
)
_PATIENT_S = 30.0
"""For things that take a second or two when the machine has time."""


class _Recorder(MonitoredMembership):
    """Hears every broadcast on a MemoryCluster."""

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
    """A monitor that sees the cluster's changes as a router's does."""
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


async def test_leader_names_decode_instances_and_predictors_and_nobody_else() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0"):
        for record in (DECODE, PREDICTOR, PREFILL):
            cluster.heartbeat(record, InstanceLoad(4, free_blocks=17))
        await eventually(lambda: recorder.last_ids() == {"decode-0", "predictor-0"})
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


async def test_blocks_that_come_free_on_a_tight_instance_are_broadcast_at_once() -> None:
    cluster, recorder = _recorded()
    cluster.heartbeat(_PATIENT_DECODE, InstanceLoad(1, free_blocks=2, total_blocks=100))
    async with _monitor(cluster, "router-0", interval_s=600.0):
        await eventually(lambda: recorder.last_ids() == {"decode-9"})
        cluster.heartbeat(_PATIENT_DECODE, InstanceLoad(2, free_blocks=9, total_blocks=100))
        await eventually(lambda: recorder.heard[-1].instances[0].load.free_blocks == 9)


async def test_leader_that_was_replaced_unawares_is_fenced_and_says_so() -> None:
    cluster, recorder = _recorded()
    async with _monitor(cluster, "router-0") as monitor:
        await eventually(lambda: monitor.leading)
        # As when its lease had run out while it stood still.
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
    # Its lease does not end by itself as long as this test lasts.
    monkeypatch.setattr(monitor, "LEADER_LEASE_S", 600.0)
    async with cluster.router(drain_timeout_s=_PATIENT_S) as under_test, MemoryStore(cluster.cluster) as other:
        router = under_test.router
        await eventually(lambda: router.monitor.leading)
        assert await other.campaign("other", 60.0) is None
        # A request that does not end as long as this test lasts: a slot in the table.
        task = asyncio.current_task()
        assert task is not None
        slot = router.table.reserve("endless", 0, b"", task)
        draining = asyncio.create_task(under_test.drain())
        await lead(other, "other")
        assert not draining.done()
        router.table.release(slot)
        await draining


@dataclass
class _BroadcastListener:
    """The broadcasts on a real Redis, with the times at which they came."""

    redis: Redis
    heard: list[tuple[float, cluster_pb2.LoadBroadcast]] = field(default_factory=list)
    has_ended: bool = False

    async def follow(self) -> None:
        while not self.has_ended:
            # A Redis that was just started may not answer yet.
            with contextlib.suppress(RedisConnectionError):
                async with self.redis.pubsub() as channel:
                    await channel.subscribe("kaveri:default:0:loads")
                    async for message in channel.listen():
                        if message["type"] == "message" and message["data"][:1] == b"=":
                            self.take_in(cluster_pb2.LoadBroadcast.FromString(message["data"][1:]))
            await asyncio.sleep(0.1)

    def take_in(self, broadcast: cluster_pb2.LoadBroadcast) -> None:
        self.heard.append((time.monotonic(), broadcast))

    def leader(self) -> str:
        """Instance id of the router heard last."""
        return self.heard[-1][1].leader_id.partition(".")[0] if self.heard else ""

    def tokens(self) -> list[int]:
        return [broadcast.fencing_token for _, broadcast in self.heard]

    async def another_than(self, leader: str) -> str:
        await _until(lambda: self.leader() not in ("", leader), f"another router than {leader} leads")
        return self.leader()


async def _until(condition: Callable[[], bool], what: str) -> None:
    give_up_at_s = time.monotonic() + _PATIENT_S
    while not condition():
        assert time.monotonic() < give_up_at_s, f"not within {_PATIENT_S} s: {what}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _listener(cluster: LocalCluster) -> AsyncIterator[_BroadcastListener]:
    redis = Redis.from_url(cluster.redis_url)
    listener = _BroadcastListener(redis)
    following = asyncio.create_task(listener.follow())
    try:
        await _until(lambda: bool(listener.heard), "a first broadcast")
        yield listener
    finally:
        # The Redis client may take a cancellation for a broken connection: then the flag ends the task.
        listener.has_ended = True
        following.cancel()
        ended, _ = await asyncio.wait({following}, timeout=_PATIENT_S)
        await redis.aclose()
        assert ended, "the listener did not end"


def _address(cluster: LocalCluster, instance_id: str) -> str:
    return cluster.view().instances[instance_id].record.address


async def _ask(client: AsyncClient) -> Completion:
    answer = await client.generate(
        prompt_token_ids=_PROMPT,
        params=SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0, ignore_eos=True),
        timeout_s=_PATIENT_S,
    )
    assert answer.token_ids == tuple(FakeModel().answer(_PROMPT, 0, _ANSWER_TOKENS))
    return answer


@pytest.mark.timeout(180)
async def test_leader_killed_another_leads_and_requests_go_on() -> None:
    async with run_cluster(router_count=2) as cluster, _listener(cluster) as listener:
        leader = listener.leader()
        heir = next(name for name in _ROUTERS if name != leader)
        async with AsyncClient(_address(cluster, heir)) as client:
            await _ask(client)
            killed_s = time.monotonic()
            await cluster.kill(leader)
            while listener.leader() != heir:
                await _ask(client)
                assert time.monotonic() - killed_s < _PATIENT_S, "no router took over"
            await _ask(client)
        first_s = next(heard_s for heard_s, broadcast in listener.heard if broadcast.leader_id.startswith(f"{heir}."))
        print(f"took over after {first_s - killed_s:.2f} s")
        assert listener.tokens() == sorted(listener.tokens())
        assert len(set(listener.tokens())) == 2
        assert "monitor_lead_taken" in cluster.log_text(heir)

        def followed() -> list[int]:
            """By the prefill instance; it may have heard a leader that the listener missed."""
            lines = [json.loads(line) for line in cluster.log_text("prefill-0").splitlines() if line.startswith("{")]
            tokens = [line["fencing_token"] for line in lines if line["event"] == "monitor_followed"]
            return [token for token in tokens if token >= min(listener.tokens())]

        await _until(lambda: max(listener.tokens()) in followed(), "prefill follows the heir too")
        assert followed() == sorted(set(listener.tokens()))


@pytest.mark.timeout(180)
async def test_without_a_leader_requests_are_placed_on_old_and_new_decode_instances() -> None:
    async with (
        run_cluster() as cluster,
        _listener(cluster) as listener,
        RedisStore(cluster.redis_url) as store,
        AsyncClient(cluster.target) as client,
    ):
        silence = "monitor_lost"
        # The leader is silent.
        noticed = cluster.log_text("prefill-0").count(silence)
        async with asyncio.timeout(_PATIENT_S):
            while await store.campaign("mute", 600.0) is None:
                await store.resign(listener.heard[-1][1].leader_id)
                # Both return at once while the store is away, and it comes back only when the loop goes on.
                await asyncio.sleep(0.02)
        await _ask(client)
        await _until(lambda: cluster.log_text("prefill-0").count(silence) > noticed, "prefill notices")
        # Whatever was said before has been heard by now.
        count = len(listener.heard)
        await _ask(client)
        former = cluster.view().instances["decode-0"].record.incarnation
        await cluster.kill("decode-0")
        await cluster.restart("decode-0")
        assert cluster.view().instances["decode-0"].record.incarnation != former
        await _ask(client)
        assert len(listener.heard) <= count + 1, "a router led after all"
        await store.resign("mute")
        await listener.another_than("mute")
        await _until(lambda: len(listener.heard) > count + 1, "the router leads again")
        await _ask(client)
