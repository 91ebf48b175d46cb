"""What every ClusterStore must do. Subclass StoreConformance in a test module and provide the `cluster` fixture.

It does not verify throughput, nor what happens when watchers disagree about which of two stores is the cluster's.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore, RequestRecord
from kaveri.cluster.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, Role
from kaveri.kv.layout import KvLayout
from kaveri.kv.ticket import KvEndpoint

_LEASE_TTL_S = 0.5
_SOON_S = 5.0
"""Long enough for a busy machine; what is tested takes a small part of it."""

DECODE = InstanceRecord(
    instance_id="decode-0",
    incarnation=2**64 - 1,
    role=Role.DECODE,
    address="127.0.0.1:4242",
    model="kaveri-tiny",
    engine="fake",
    layout=KvLayout("fingerprint", 6, 16, 4, 64, "float32", "NHD"),
    kv_endpoints=(KvEndpoint("socket", "127.0.0.1:4243"),),
    max_model_len=2048,
    lease_ttl_s=_LEASE_TTL_S,
    version="0.1.0",
)
PREFILL = InstanceRecord("prefill-0", 1, Role.PREFILL, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=_LEASE_TTL_S)
REQUEST = RequestRecord("request-1", "router-0", "prefill", 0, prefill_instance_id="prefill-0")


class ClusterUnderTest(Protocol):
    """One shared cluster state, and stores on it."""

    def open_store(self) -> ClusterStore:
        """A store that was not entered yet."""

    async def take_away(self) -> None:
        """Makes the state unreachable."""

    async def bring_back_empty(self) -> None:
        """Makes it reachable again, with nothing in it."""


async def view_that(
    store: ClusterStore, condition: Callable[[ClusterView], bool], within_s: float = _SOON_S
) -> ClusterView:
    """The first view that meets the condition. Raises AssertionError, with the last view, after `within_s` seconds."""
    give_up_at_s = time.monotonic() + within_s
    view = store.view()
    while not condition(view):
        remaining_s = give_up_at_s - time.monotonic()
        assert remaining_s > 0, f"after {within_s} s the view is still {view}"
        view = await store.wait_for_change(remaining_s)
    return view


def has(*instance_ids: str) -> Callable[[ClusterView], bool]:
    """Whether a view holds exactly these instances."""
    return lambda view: set(view.instances) == set(instance_ids)


async def _no_requests_in(store: ClusterStore) -> None:
    async with asyncio.timeout(_SOON_S):
        while await store.requests():  # noqa: ASYNC110 - the table has no waiting of its own
            await asyncio.sleep(0.02)


class StoreConformance:
    """The suite. Every test opens stores of its own on the `cluster` fixture."""

    async def test_registered_instance_is_seen_by_others_as_it_described_itself(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            load = InstanceLoad(3, InstanceState.DRAINING, 1, 2, 300, 4, 5, 600, 7, 8)
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

    async def test_loads_are_pushed_with_every_heartbeat(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            for number in range(1, 11):
                await instance.heartbeat(PREFILL, InstanceLoad(number, queued_prefill_tokens=100 * number))
            view = await view_that(
                router, lambda view: has("prefill-0")(view) and view.instances["prefill-0"].load.sequence_number == 10
            )
            assert view.instances["prefill-0"].load.queued_prefill_tokens == 1000
            assert view.instances["prefill-0"].heartbeat_age_s < _SOON_S

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
            await view_that(
                router, lambda view: view.instances["decode-0"].load.sequence_number > 3 * _LEASE_TTL_S / 0.05
            )
            heartbeat.stop()
            await running
            await view_that(router, has(), within_s=_LEASE_TTL_S)

    async def test_deregistered_instance_leaves_every_view_before_its_lease_ends(
        self, cluster: ClusterUnderTest
    ) -> None:
        patient = replace(DECODE, lease_ttl_s=60.0)
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await instance.heartbeat(patient, InstanceLoad())
            await view_that(router, has("decode-0"))
            await instance.deregister(patient)
            await instance.deregister(replace(patient, instance_id="unknown"))
            await view_that(router, has())

    async def test_newest_life_wins_the_instance_id(self, cluster: ClusterUnderTest) -> None:
        old, new = replace(DECODE, incarnation=9), replace(DECODE, incarnation=3, address="127.0.0.1:5")
        async with AsyncExitStack() as stack:
            old_life, new_life, router = [await stack.enter_async_context(cluster.open_store()) for _ in range(3)]
            await old_life.heartbeat(old, InstanceLoad(50))
            await new_life.heartbeat(new, InstanceLoad(1))
            await view_that(router, lambda view: has("decode-0")(view) and view.instances["decode-0"].record == new)
            # The old life, frozen for a while, comes back: neither its heartbeat nor its end may be seen.
            await old_life.heartbeat(old, InstanceLoad(51))
            await old_life.deregister(old)
            await new_life.heartbeat(new, InstanceLoad(2))
            view = await view_that(router, lambda view: view.instances["decode-0"].load.sequence_number == 2)
            assert view.instances["decode-0"].record == new

    async def test_wait_for_change_returns_at_its_timeout_when_nothing_changes(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as store:
            await store.wait_for_change(0.05)
            started_at_s = time.monotonic()
            view = await store.wait_for_change(0.2)
            assert time.monotonic() - started_at_s >= 0.19
            assert has()(view)

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
        async with cluster.open_store() as one, cluster.open_store() as other:
            claims = (one.claim_request(REQUEST, 60.0), other.claim_request(replace(REQUEST, router_id="router-1"), 60))
            assert sorted(await asyncio.gather(*claims)) == [False, True]
            assert not await one.claim_request(REQUEST, 60.0)

    async def test_closed_request_can_be_claimed_again_and_only_its_router_closes_it(
        self, cluster: ClusterUnderTest
    ) -> None:
        async with cluster.open_store() as store:
            assert await store.claim_request(REQUEST, 60.0)
            await store.close_request("request-1", "router-9")
            assert await store.requests() == (REQUEST,)
            await store.close_request("request-1", "router-0")
            assert await store.requests() == ()
            assert await store.claim_request(REQUEST, 60.0)

    async def test_claim_ends_with_its_time_to_live(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as store:
            assert await store.claim_request(REQUEST, 0.1)
            await _no_requests_in(store)
            assert await store.claim_request(REQUEST, 60.0)

    async def test_update_replaces_a_claimed_record_and_keeps_its_time_to_live(self, cluster: ClusterUnderTest) -> None:
        moved = replace(REQUEST, phase="decode", attempt=1, decode_instance_id="decode-0")
        async with cluster.open_store() as store:
            await store.update_request(moved)
            assert await store.requests() == ()
            assert await store.claim_request(REQUEST, 0.5)
            await store.update_request(replace(moved, router_id="router-9"))
            assert await store.requests() == (REQUEST,)
            await store.update_request(moved)
            assert await store.requests() == (moved,)
            await _no_requests_in(store)

    async def test_last_view_stays_while_the_store_is_away_and_nobody_raises(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await instance.heartbeat(DECODE, InstanceLoad(1))
            await view_that(router, has("decode-0"))
            await cluster.take_away()
            for store in (instance, router):
                await view_that(store, lambda view: not view.store_connected)
            gone_at_s = time.monotonic()
            while time.monotonic() - gone_at_s < 2 * _LEASE_TTL_S:
                await instance.heartbeat(DECODE, InstanceLoad(2))
                view = await router.wait_for_change(0.1)
                assert has("decode-0")(view)
                assert not view.store_connected
            assert await router.claim_request(REQUEST, 60.0)
            await router.update_request(REQUEST)
            assert await router.requests() == ()
            await router.close_request("request-1", "router-0")
            await instance.deregister(DECODE)

    async def test_calls_while_the_store_is_away_take_at_most_a_second(self, cluster: ClusterUnderTest) -> None:
        async with cluster.open_store() as store:
            await store.heartbeat(DECODE, InstanceLoad())
            await cluster.take_away()
            for call in (store.heartbeat(DECODE, InstanceLoad()), store.claim_request(REQUEST, 1.0), store.requests()):
                async with asyncio.timeout(1.5):
                    await call

    async def test_after_the_return_of_an_empty_store_the_living_show_up_and_the_dead_go(
        self, cluster: ClusterUnderTest
    ) -> None:
        # A lease as in production: what must happen within it includes finding the store again.
        living, dead = replace(DECODE, lease_ttl_s=1.0), replace(PREFILL, lease_ttl_s=1.0)
        async with cluster.open_store() as instance, cluster.open_store() as router:
            await instance.heartbeat(dead, InstanceLoad())
            heartbeat = Heartbeat(instance, living, InstanceLoad)
            running = asyncio.create_task(heartbeat.run())
            await view_that(router, has("decode-0", "prefill-0"))
            await cluster.take_away()
            await view_that(router, lambda view: not view.store_connected)
            await cluster.bring_back_empty()
            seen = [await view_that(router, lambda view: view.store_connected)]
            back_at_s = time.monotonic()
            while time.monotonic() - back_at_s < 2 * living.lease_ttl_s:
                seen.append(await router.wait_for_change(0.1))
            assert all("decode-0" in view.instances for view in seen), "the living instance left the view"
            assert has("decode-0")(seen[-1])
            assert seen[-1].instances["decode-0"].heartbeat_age_s < living.lease_ttl_s
            heartbeat.stop()
            await running

    async def test_newest_life_wins_again_after_the_store_lost_its_memory(self, cluster: ClusterUnderTest) -> None:
        old, new = replace(DECODE, incarnation=9), replace(DECODE, incarnation=3)
        async with AsyncExitStack() as stack:
            old_life, new_life, router = [await stack.enter_async_context(cluster.open_store()) for _ in range(3)]
            await old_life.heartbeat(old, InstanceLoad())
            await new_life.heartbeat(new, InstanceLoad())
            await cluster.take_away()
            for store in (old_life, new_life, router):
                await view_that(store, lambda view: not view.store_connected)
            await cluster.bring_back_empty()
            for store in (old_life, new_life, router):
                await view_that(store, lambda view: view.store_connected)
            await old_life.heartbeat(old, InstanceLoad(10))
            await new_life.heartbeat(new, InstanceLoad(10))
            await old_life.heartbeat(old, InstanceLoad(11))
            await new_life.heartbeat(new, InstanceLoad(11))
            view = await view_that(router, lambda view: view.instances["decode-0"].load.sequence_number == 11)
            assert view.instances["decode-0"].record.incarnation == 3
