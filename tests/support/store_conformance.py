"""Conformance tests for every ClusterStore. Subclass StoreConformance in a test module and provide a `cluster` fixture.
Not verified: throughput, and processes that use two different stores."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol

import pytest

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore, HeartbeatAnswer, RequestClaim, ViewSource
from kaveri.domain.view import (
    ClusterView,
    InstanceLoad,
    InstanceRecord,
    InstanceState,
    InstanceStatus,
    LoadBroadcast,
    Phase,
    Role,
)
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.timeouts import BROADCAST_LOST_AFTER_S

_LEASE_TTL_S = 0.5
_SOON_S = 5.0
"""Timeout of waits, far above what a busy machine needs."""

DECODE = InstanceRecord(
    instance_id="decode-0",
    incarnation=2**64 - 1,
    role=Role.ENGINE,
    address="127.0.0.1:4242",
    model="kaveri-tiny",
    engine="fake",
    layout=KvLayout("fingerprint", 6, 16, 4, 64, "float32", "NHD"),
    kv_endpoints=(KvEndpoint("socket", "127.0.0.1:4243"),),
    max_model_len=2048,
    lease_ttl_s=_LEASE_TTL_S,
    version="0.1.0",
    phases=(Phase.DECODE,),
)
PREFILL = InstanceRecord(
    "prefill-0", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=_LEASE_TTL_S, phases=(Phase.PREFILL,)
)
PREDICTOR = InstanceRecord("predictor-0", 1, Role.PREDICTOR, "127.0.0.1:2", "kaveri-tiny", lease_ttl_s=_LEASE_TTL_S)
ROUTER = InstanceRecord(
    "router-0",
    2**63 + 1,
    Role.ROUTER,
    "127.0.0.1:3",
    "kaveri-tiny",
    lease_ttl_s=_LEASE_TTL_S,
    public_address="models.example.com:443",
)
REQUEST = RequestClaim("request-1", "router-0", ROUTER.incarnation)


class ClusterUnderTest(Protocol):
    """Cluster state under test, with several stores on it."""

    def open_store(self, follow: ViewSource = ViewSource.HEARTBEATS) -> ClusterStore:
        """Make a store that was not entered yet."""

    async def take_away(self) -> None:
        """Make the state unreachable."""

    async def bring_back_empty(self) -> None:
        """Make the state reachable again, without its content."""

    async def refuse_heartbeats(self) -> None:
        """Make the state refuse heartbeats, but not other changes."""

    async def take_heartbeats(self) -> None:
        """End refuse_heartbeats()."""


async def view_that(
    store: ClusterStore, condition: Callable[[ClusterView], bool], within_s: float = _SOON_S
) -> ClusterView:
    """Return the first view that meets the condition. Raises AssertionError, with the last view, after `within_s` s."""
    give_up_at_s = time.monotonic() + within_s
    view = store.view()
    while not condition(view):
        remaining_s = give_up_at_s - time.monotonic()
        assert remaining_s > 0, f"after {within_s} s the view is still {view}"
        view = await store.wait_for_change(remaining_s)
    return view


def has(*instance_ids: str) -> Callable[[ClusterView], bool]:
    """Build a condition for view_that(): the view has exactly these instances."""
    return lambda view: set(view.instances) == set(instance_ids)


def named(record: InstanceRecord, sequence_number: int) -> InstanceStatus:
    return InstanceStatus(record, InstanceLoad(sequence_number), heartbeat_age_s=0.01)


def shows(instance_id: str, sequence_number: int) -> Callable[[ClusterView], bool]:
    """Build a condition for view_that(): the view has this instance with at least this heartbeat number."""
    return lambda view: (
        instance_id in view.instances and view.instances[instance_id].load.sequence_number >= sequence_number
    )


async def lead(store: ClusterStore, candidate_id: str, ttl_s: float = 60.0) -> int:
    """Campaign until `candidate_id` leads; return its fencing token."""
    async with asyncio.timeout(_SOON_S):
        while (token := await store.campaign(candidate_id, ttl_s)) is None:  # noqa: ASYNC110 - its end sets no event
            await asyncio.sleep(0.02)
    return token


def changing_load() -> Callable[[], InstanceLoad]:
    numbers = itertools.count()
    return lambda: InstanceLoad(context_tokens=next(numbers))


@contextlib.asynccontextmanager
async def beating(store: ClusterStore, record: InstanceRecord) -> AsyncIterator[None]:
    """Send heartbeats of an instance with changing load until the context ends; then its lease expires by itself."""
    running = asyncio.create_task(Heartbeat(store, record, changing_load(), interval_s=0.05).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _lose(cluster: ClusterUnderTest, *stores: ClusterStore) -> None:
    """Make the state unreachable, and wait until these stores notice."""
    await cluster.take_away()
    for store in stores:
        await view_that(store, lambda view: not view.store_connected)


async def _regain_empty(cluster: ClusterUnderTest, *stores: ClusterStore) -> None:
    """Make the state reachable again and empty, and wait until these stores notice."""
    await cluster.bring_back_empty()
    for store in stores:
        await view_that(store, lambda view: view.store_connected)


async def _views_during(store: ClusterStore, duration_s: float) -> list[ClusterView]:
    """Return the views during `duration_s` seconds, at least 20 per second."""
    until_s, seen = time.monotonic() + duration_s, []
    while time.monotonic() < until_s:
        seen.append(await store.wait_for_change(0.05))
    return seen


async def _no_requests_in(store: ClusterStore) -> None:
    async with asyncio.timeout(_SOON_S):
        while await store.find_request(REQUEST.request_id):  # noqa: ASYNC110 - the table has no waiting of its own
            await asyncio.sleep(0.02)


class StoreConformance:
    async def test_registered_instance_is_seen_by_others_as_it_described_itself(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            load = replace(InstanceLoad(3, InstanceState.DRAINING, 1, 2, 300, 4, 5, 600, 7, 8), queue_room=0)
            await instance.heartbeat(DECODE, load)
            view = await view_that(router, has("decode-0"))
            status = view.instances["decode-0"]
            assert status.record == DECODE
            assert status.load == load
            assert view.store_connected

    async def test_store_opened_later_sees_what_was_registered_before(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance:
            await instance.heartbeat(DECODE, InstanceLoad(free_blocks=7))
            async with cluster.open_store() as router:
                assert router.view().instances["decode-0"].load.free_blocks == 7

    async def test_instance_without_heartbeats_leaves_every_view(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            started_at_s = time.monotonic()
            await instance.heartbeat(DECODE, InstanceLoad())
            await view_that(router, has("decode-0"))
            for store in (instance, router):
                await view_that(store, has())
            assert time.monotonic() - started_at_s >= _LEASE_TTL_S * 0.9
            async with cluster.open_store() as late:
                assert has()(late.view())

    async def test_heartbeats_keep_an_instance_longer_than_one_lease(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            heartbeat = Heartbeat(instance, DECODE, InstanceLoad, interval_s=0.05)
            running = asyncio.create_task(heartbeat.run())
            await view_that(router, has("decode-0"))
            # Most of these heartbeats renew the lease and change nothing.
            assert all(map(has("decode-0"), await _views_during(router, 3 * _LEASE_TTL_S)))
            heartbeat.stop()
            await running
            await view_that(router, has())

    async def test_deregistered_instance_leaves_every_view_before_its_lease_ends(
        self, cluster: ClusterUnderTest
    ) -> None:
        patient = replace(DECODE, lease_ttl_s=60.0)
        async with cluster.open_store() as instance, cluster.open_store() as router:
            heartbeat = Heartbeat(instance, patient, InstanceLoad)
            running = asyncio.create_task(heartbeat.run())
            await view_that(router, has("decode-0"))
            heartbeat.stop()
            await running
            await view_that(router, has())
            await instance.heartbeat(patient, InstanceLoad())
            await view_that(router, has("decode-0"))
            await instance.deregister(patient)
            await instance.deregister(replace(patient, instance_id="unknown"))
            await view_that(router, has())

    async def test_newest_life_wins_the_instance_id(self, cluster: ClusterUnderTest) -> None:
        old = replace(DECODE, incarnation=9, lease_ttl_s=60.0)
        new = replace(old, incarnation=3, address="127.0.0.1:5")
        async with AsyncExitStack() as stack:
            old_life, new_life, router = [await stack.enter_async_context(cluster.open_store()) for _ in range(3)]
            assert await old_life.heartbeat(old, InstanceLoad(50)) == HeartbeatAnswer()
            assert await new_life.heartbeat(new, InstanceLoad(1)) == HeartbeatAnswer(other=old)
            await view_that(router, lambda view: has("decode-0")(view) and view.instances["decode-0"].record == new)
            # The old incarnation, frozen for a while, comes back: neither its heartbeat nor its end may be seen.
            assert await old_life.heartbeat(old, InstanceLoad(51)) == HeartbeatAnswer(holds=False, other=new)
            await old_life.deregister(old)
            assert await new_life.heartbeat(new, InstanceLoad(2)) == HeartbeatAnswer()
            view = await view_that(router, lambda view: view.instances["decode-0"].load.sequence_number == 2)
            assert view.instances["decode-0"].record == new

    @pytest.mark.parametrize("follow", ViewSource)
    async def test_instance_back_at_the_same_address_within_its_lease_is_a_new_one_at_once(
        self, cluster: ClusterUnderTest, follow: ViewSource
    ) -> None:
        old = replace(DECODE, incarnation=9, lease_ttl_s=60.0)
        new = replace(old, incarnation=3)
        async with cluster.open_store() as instance, cluster.open_store(follow) as other:
            await instance.heartbeat(old, InstanceLoad(50, free_blocks=7))
            await view_that(other, shows("decode-0", 50))
        # It has died silently, and its successor knows nothing of it.
        async with cluster.open_store() as instance, cluster.open_store(follow) as other:
            assert other.view().instances["decode-0"].record.incarnation == 9
            await instance.heartbeat(new, InstanceLoad(1, free_blocks=8))
            view = await view_that(other, lambda view: view.instances["decode-0"].record.incarnation == 3)
            assert view.instances["decode-0"].load == InstanceLoad(1, free_blocks=8)
            async with cluster.open_store(follow) as late:
                assert late.view().instances["decode-0"].record == new
            # The last messages of the old incarnation come too late to end the new one.
            await instance.deregister(old)
            async with cluster.open_store(follow) as late:
                assert late.view().instances["decode-0"].record == new
            await instance.heartbeat(new, InstanceLoad(2, free_blocks=8))
            view = await view_that(other, shows("decode-0", 2))
            assert view.instances["decode-0"].record == new

    async def test_of_two_processes_with_one_id_the_older_ends_and_the_newer_stays(
        self, cluster: ClusterUnderTest
    ) -> None:
        old, new = replace(DECODE, incarnation=9), replace(DECODE, incarnation=3, address="127.0.0.1:5")
        async with cluster.open_store() as old_life, cluster.open_store() as new_life:
            running = asyncio.create_task(Heartbeat(old_life, old, InstanceLoad, interval_s=0.05).run())
            await view_that(new_life, has("decode-0"))
            async with beating(new_life, new):
                with pytest.raises(ConfigError, match=r"'decode-0', at 127\.0\.0\.1:5; this one ends") as caught:
                    await asyncio.wait_for(running, _SOON_S)
                assert caught.value.field == "--instance-id"
                view = await view_that(new_life, shows("decode-0", 10))
                assert view.instances["decode-0"].record == new

    async def test_wait_for_change_does_not_miss_what_happened_between_two_calls(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await router.wait_for_change(0.05)
            await instance.heartbeat(DECODE, InstanceLoad())
            async with asyncio.timeout(_SOON_S):
                while not router.view().instances:  # noqa: ASYNC110 - the waiting is what is tested, so not used here
                    await asyncio.sleep(0.01)
            started_at_s = time.monotonic()
            await router.wait_for_change(60.0)
            assert time.monotonic() - started_at_s < _SOON_S

    async def test_request_id_in_flight_is_claimed_once(self, cluster: ClusterUnderTest) -> None:
        second = replace(ROUTER, instance_id="router-1")
        theirs = replace(REQUEST, router_id="router-1")
        async with cluster.open_store() as one, cluster.open_store() as other:
            await one.heartbeat(replace(ROUTER, lease_ttl_s=60.0), InstanceLoad())
            await other.heartbeat(replace(second, lease_ttl_s=60.0), InstanceLoad())
            holders = await asyncio.gather(one.claim_request(REQUEST, 60.0), other.claim_request(theirs, 60))
            assert [holder for holder in holders if holder is not None] in ([REQUEST], [theirs])
            assert await one.claim_request(REQUEST, 60.0) is not None
            assert await other.claim_request(theirs, 60.0) is not None

    async def test_claim_of_a_router_life_that_has_ended_is_taken_over(self, cluster: ClusterUnderTest) -> None:
        theirs = replace(REQUEST, router_id="router-1")
        # So near to the former one that a number of 53 bits does not distinguish them.
        again = replace(ROUTER, incarnation=ROUTER.incarnation + 1)
        async with cluster.open_store() as one, cluster.open_store() as other:
            await one.heartbeat(replace(ROUTER, lease_ttl_s=60.0), InstanceLoad())
            assert await one.claim_request(REQUEST, 60.0) is None
            assert await other.claim_request(theirs, 60.0) == REQUEST
            await one.heartbeat(replace(again, lease_ttl_s=60.0), InstanceLoad())
            assert await other.claim_request(theirs, 60.0) is None
            assert await other.find_request(REQUEST.request_id) == theirs
            await one.close_requests([REQUEST])
            assert await other.find_request(REQUEST.request_id) == theirs

    async def test_claim_outlives_its_routers_lease_only_until_another_router_asks(
        self, cluster: ClusterUnderTest
    ) -> None:
        theirs = replace(REQUEST, router_id="router-1")
        async with cluster.open_store() as one, cluster.open_store() as other:
            await one.heartbeat(ROUTER, InstanceLoad())
            assert await one.claim_request(REQUEST, 60.0) is None
            await one.deregister(ROUTER)
            assert await other.find_request(REQUEST.request_id) == REQUEST
            assert await other.claim_request(theirs, 60.0) is None

    async def test_closed_request_can_be_claimed_again_and_only_its_router_closes_it(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as store:
            assert await store.claim_request(REQUEST, 60.0) is None
            assert await store.close_requests([replace(REQUEST, router_id="router-9")])
            await store.close_requests([replace(REQUEST, router_incarnation=ROUTER.incarnation + 1)])
            assert await store.find_request(REQUEST.request_id) == REQUEST
            assert await store.close_requests([REQUEST])
            assert await store.find_request(REQUEST.request_id) is None
            assert await store.close_requests([REQUEST])
            assert await store.claim_request(REQUEST, 60.0) is None

    async def test_claim_ends_with_its_time_to_live(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as store:
            await store.heartbeat(replace(ROUTER, lease_ttl_s=60.0), InstanceLoad())
            assert await store.claim_request(REQUEST, 0.1) is None
            await _no_requests_in(store)
            assert await store.claim_request(REQUEST, 60.0) is None

    async def test_last_view_stays_while_the_store_is_away_and_nobody_raises(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await instance.heartbeat(DECODE, InstanceLoad(1))
            await view_that(router, has("decode-0"))
            await _lose(cluster, instance, router)
            gone_at_s = time.monotonic()
            while time.monotonic() - gone_at_s < 2 * _LEASE_TTL_S:
                await instance.heartbeat(DECODE, InstanceLoad(2))
                view = await router.wait_for_change(0.1)
                assert has("decode-0")(view)
                assert not view.store_connected
            assert await router.claim_request(REQUEST, 60.0) is None
            assert await router.find_request(REQUEST.request_id) is None
            assert not await router.close_requests([REQUEST])
            await instance.deregister(DECODE)

    async def test_calls_while_the_store_is_away_take_at_most_a_second(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as store:
            await store.heartbeat(DECODE, InstanceLoad())
            await cluster.take_away()
            for call in (
                store.heartbeat(DECODE, InstanceLoad()),
                store.claim_request(REQUEST, 1.0),
                store.find_request("r"),
            ):
                async with asyncio.timeout(1.5):
                    await call

    async def test_after_the_return_of_an_empty_store_the_living_show_up_and_the_dead_go(
        self, cluster: ClusterUnderTest
    ) -> None:
        # A lease as in production: it must suffice to find the store again.
        living, dead = replace(DECODE, lease_ttl_s=1.0), replace(PREFILL, lease_ttl_s=1.0)
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await instance.heartbeat(dead, InstanceLoad())
            heartbeat = Heartbeat(instance, living, InstanceLoad)
            running = asyncio.create_task(heartbeat.run())
            await view_that(router, has("decode-0", "prefill-0"))
            await _lose(cluster, router)
            await cluster.bring_back_empty()
            seen = [await view_that(router, lambda view: view.store_connected)]
            seen += await _views_during(router, 2 * living.lease_ttl_s)
            assert all("decode-0" in view.instances for view in seen), "the living instance left the view"
            assert has("decode-0")(seen[-1])
            assert seen[-1].instances["decode-0"].heartbeat_age_s < living.lease_ttl_s
            heartbeat.stop()
            await running

    async def test_newest_life_wins_again_after_the_store_lost_its_memory(self, cluster: ClusterUnderTest) -> None:
        old = replace(DECODE, incarnation=9, lease_ttl_s=60.0)
        new = replace(old, incarnation=3)
        async with AsyncExitStack() as stack:
            old_life, new_life, router = [await stack.enter_async_context(cluster.open_store()) for _ in range(3)]
            await old_life.heartbeat(old, InstanceLoad())
            await new_life.heartbeat(new, InstanceLoad())
            await _lose(cluster, old_life, new_life, router)
            await _regain_empty(cluster, old_life, new_life, router)
            await old_life.heartbeat(old, InstanceLoad(10))
            await new_life.heartbeat(new, InstanceLoad(10))
            await old_life.heartbeat(old, InstanceLoad(11))
            await new_life.heartbeat(new, InstanceLoad(11))
            view = await view_that(router, lambda view: view.instances["decode-0"].load.sequence_number == 11)
            assert view.instances["decode-0"].record.incarnation == 3

    async def test_life_that_registers_after_the_store_lost_its_memory_is_newer_than_those_before(
        self, cluster: ClusterUnderTest
    ) -> None:
        old = replace(DECODE, incarnation=9, lease_ttl_s=60.0)
        new = replace(old, incarnation=3)
        async with AsyncExitStack() as stack:
            old_life, router = [await stack.enter_async_context(cluster.open_store()) for _ in range(2)]
            for number in range(5):
                await old_life.heartbeat(replace(PREFILL, instance_id=f"prefill-{number}"), InstanceLoad())
            await old_life.heartbeat(old, InstanceLoad())
            await _lose(cluster, old_life, router)
            await _regain_empty(cluster, old_life, router)
            new_life = await stack.enter_async_context(cluster.open_store())
            await new_life.heartbeat(new, InstanceLoad(1))
            # The old incarnation was frozen all the time.
            assert await old_life.heartbeat(old, InstanceLoad(9)) == HeartbeatAnswer(holds=False, other=new)
            assert await new_life.heartbeat(new, InstanceLoad(2)) == HeartbeatAnswer()
            view = await view_that(router, shows("decode-0", 2))
            assert view.instances["decode-0"].record == new

    async def test_refused_heartbeats_end_no_lease(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router, beating(router, ROUTER):
            seen = []
            async with beating(instance, DECODE):
                await view_that(router, has("decode-0", "router-0"))
                await cluster.refuse_heartbeats()
                seen.append(await view_that(router, lambda view: not view.store_connected))
                seen += await _views_during(router, 3 * _LEASE_TTL_S)
                assert not any(view.store_connected for view in seen)
                assert await router.claim_request(REQUEST, 60.0) is None
                assert await router.campaign("one", 60.0) is None
                await cluster.take_heartbeats()
                seen.append(await view_that(router, lambda view: view.store_connected))
                seen += await _views_during(router, 2 * _LEASE_TTL_S)
                assert all(has("decode-0", "router-0")(view) for view in seen)
                assert await router.find_request(REQUEST.request_id) is None, (
                    "what was granted meanwhile is entered nowhere"
                )
            await view_that(router, has("router-0"))

    async def test_lead_can_be_resigned_by_its_leader_only_and_the_next_token_is_greater(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as one, cluster.open_store() as other:
            first = await lead(one, "one")
            await other.resign("other")
            assert await other.campaign("other", 60.0) is None
            await one.resign("one")
            second = await other.campaign("other", 60.0)
            assert second is not None
            assert second > first
            await other.resign("other")
            third = await other.campaign("other", 60.0)
            assert third is not None
            assert third > second, "the same leader again, but others may have led in between"

    async def test_lead_ends_with_its_lease_and_campaigning_renews_it(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as one, cluster.open_store() as other:
            first = await lead(one, "one", ttl_s=1.0)
            over_s = time.monotonic() + 1.2
            while time.monotonic() < over_s:
                assert await one.campaign("one", 60.0) == first
                assert await other.campaign("other", 60.0) is None
                await asyncio.sleep(0.05)
            assert await one.campaign("one", 0.1) == first
            assert await lead(other, "other") > first
            assert await one.campaign("one", 60.0) is None

    async def test_broadcast_is_what_its_followers_see(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as leader, cluster.open_store(ViewSource.BROADCASTS) as prefill:
            token = await lead(leader, "one")
            load = InstanceLoad(7, InstanceState.DRAINING, 1, 2, 300, 4, 5, 600, 7, 8)
            names = InstanceStatus(DECODE, load, heartbeat_age_s=0.25), named(PREDICTOR, 3)
            assert await leader.broadcast(LoadBroadcast("one", token, 1, names))
            view = await view_that(prefill, has("decode-0", "predictor-0"))
            assert view.instances["decode-0"].record == DECODE
            assert view.instances["decode-0"].load == load
            assert 0.25 <= view.instances["decode-0"].heartbeat_age_s < _SOON_S
            assert view.instances["predictor-0"].record == PREDICTOR
            assert has()(leader.view()), "the others do not follow broadcasts"

    async def test_leader_that_was_replaced_is_not_heard(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as leader, cluster.open_store(ViewSource.BROADCASTS) as prefill:
            old = await lead(leader, "one")
            assert await leader.broadcast(LoadBroadcast("one", old, 1, (named(DECODE, 1),)))
            assert await leader.campaign("one", 0.1) == old
            new = await lead(leader, "other")
            assert not await leader.broadcast(LoadBroadcast("one", old, 2, (named(DECODE, 2), named(PREDICTOR, 9))))
            assert await leader.broadcast(LoadBroadcast("other", new, 1, (named(DECODE, 3),)))
            view = await view_that(prefill, lambda view: shows("decode-0", 2)(view) or "predictor-0" in view.instances)
            assert has("decode-0")(view)

    async def test_leader_whose_lease_ran_out_is_not_heard_although_nobody_else_leads(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as leader:
            token = await lead(leader, "one", ttl_s=0.1)
            number = 1
            async with asyncio.timeout(_SOON_S):
                while await leader.broadcast(LoadBroadcast("one", token, number, ())):
                    number += 1
                    await asyncio.sleep(0.02)
            assert await lead(leader, "one") > token

    async def test_follower_sees_what_was_registered_before_and_hears_heartbeats_until_a_leader_speaks(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as instance:
            await instance.heartbeat(replace(DECODE, lease_ttl_s=60.0), InstanceLoad(1))
            router = replace(PREFILL, role=Role.ROUTER, lease_ttl_s=60.0)
            await instance.heartbeat(router, InstanceLoad(1))
            async with cluster.open_store(ViewSource.BROADCASTS) as prefill:
                assert has("decode-0")(prefill.view())
                await instance.heartbeat(replace(DECODE, lease_ttl_s=60.0), InstanceLoad(2, free_blocks=5))
                view = await view_that(prefill, shows("decode-0", 2))
                assert view.instances["decode-0"].load.free_blocks == 5

    async def test_deregistered_instance_leaves_followers_views_without_a_word_of_the_leader(
        self, cluster: ClusterUnderTest
    ) -> None:
        patient = replace(DECODE, lease_ttl_s=60.0)
        async with cluster.open_store() as leader, cluster.open_store(ViewSource.BROADCASTS) as prefill:
            await leader.heartbeat(patient, InstanceLoad(1))
            token = await lead(leader, "one")
            assert await leader.broadcast(LoadBroadcast("one", token, 1, (named(patient, 1),)))
            await view_that(prefill, has("decode-0"))
            await leader.deregister(patient)
            await view_that(prefill, has())

    async def test_follower_loses_nobody_without_a_leader_and_then_hears_heartbeats_again(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as leader, cluster.open_store(ViewSource.BROADCASTS) as prefill:
            token = await lead(leader, "one")
            assert await leader.broadcast(LoadBroadcast("one", token, 1, (named(DECODE, 1), named(PREDICTOR, 1))))
            await view_that(prefill, has("decode-0", "predictor-0"))
            heartbeat = Heartbeat(leader, DECODE, changing_load(), interval_s=0.05)
            running = asyncio.create_task(heartbeat.run())
            seen = [await view_that(prefill, shows("decode-0", 5), within_s=BROADCAST_LOST_AFTER_S + _SOON_S)]
            # Without a leader, its facts must come from the instances; the predictor never was one.
            while "predictor-0" in seen[-1].instances:
                seen.append(await prefill.wait_for_change(0.1))
            assert all("decode-0" in view.instances for view in seen)
            heartbeat.stop()
            await running

    async def test_nobody_leads_while_the_store_is_away_and_afterwards_tokens_still_grow(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as leader, cluster.open_store(ViewSource.BROADCASTS) as prefill:
            tokens = [await lead(leader, "one")]
            assert await leader.broadcast(LoadBroadcast("one", tokens[0], 1, (named(DECODE, 1),)))
            await view_that(prefill, has("decode-0"))
            await _lose(cluster, leader, prefill)
            assert await leader.campaign("one", 60.0) is None
            assert not await leader.broadcast(LoadBroadcast("one", tokens[0], 2, ()))
            await leader.resign("one")
            assert has("decode-0")(prefill.view())
            await _regain_empty(cluster, leader, prefill)
            tokens.append(await lead(leader, "other"))
            assert tokens[1] > tokens[0]
            assert not await leader.broadcast(LoadBroadcast("one", tokens[0], 3, (named(PREDICTOR, 1),)))
            assert await leader.broadcast(LoadBroadcast("other", tokens[1], 1, (named(DECODE, 2),)))
            view = await view_that(prefill, shows("decode-0", 2))
            assert has("decode-0")(view)

    async def test_leader_that_starts_in_an_empty_store_is_heard_by_who_knows_greater_tokens(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store(ViewSource.BROADCASTS) as prefill:
            async with cluster.open_store() as former:
                for number in range(5):
                    token = await lead(former, f"former-{number}")
                    await former.resign(f"former-{number}")
                token = await lead(former, "former")
                assert await former.broadcast(LoadBroadcast("former", token, 1, (named(DECODE, 1),)))
                await view_that(prefill, has("decode-0"))
            await _lose(cluster, prefill)
            await _regain_empty(cluster, prefill)
            async with cluster.open_store() as leader, beating(prefill, PREFILL):
                number = 0
                async with asyncio.timeout(_SOON_S):
                    while "predictor-0" not in prefill.view().instances:
                        number += 1
                        token = await lead(leader, "new")
                        assert await leader.broadcast(LoadBroadcast("new", token, number, (named(PREDICTOR, number),)))
                        await prefill.wait_for_change(0.05)
