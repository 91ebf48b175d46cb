"""The Redis store on every Redis of this machine, as a user with only the listed permissions."""

import asyncio
import math
import shutil
import signal
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from kaveri.cluster import monitored_membership
from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.redis_permissions import store_needs
from kaveri.cluster.redis_store import RedisStore
from kaveri.cluster.store import HeartbeatAnswer, ViewSource
from kaveri.domain.view import WIRE, InstanceLoad, InstanceStatus, LoadBroadcast
from kaveri.errors import ConfigError
from kaveri.local.redis_server import bundled_server, find_redis_server
from kaveri.wire.messages import broadcast_to_proto, status_to_proto
from tests.support.redis_fixture import TestRedis, allow, free_port, run_redis
from tests.support.store_conformance import (
    DECODE,
    PREDICTOR,
    REQUEST,
    StoreConformance,
    has,
    lead,
    named,
    shows,
    view_that,
)


def _binaries() -> list[str]:
    """Return every redis-server of this machine; fails with a hint on what to install if there is none."""
    return [path for path in (shutil.which("redis-server"), bundled_server()) if path] or [find_redis_server()]


_LOAD = InstanceLoad(1)
_NAMES = "kaveri:default:0"
_EVENTS = f"{_NAMES}:events"
_LOADS = f"{_NAMES}:loads"


_RULES = store_needs(_NAMES).rules()
"""ACL rules listed in docs/operations.md."""


class _RedisStores:
    """Factory of stores whose Redis user has only the permissions in docs/operations.md."""

    def __init__(self, redis: TestRedis, url: str) -> None:
        self._redis = redis
        self._url = url

    def open_store(self, follow: ViewSource = ViewSource.HEARTBEATS) -> RedisStore:
        return RedisStore(self._url, follow=follow)

    async def take_away(self) -> None:
        await self._redis.kill()

    async def bring_back_empty(self) -> None:
        await self._redis.restart()
        await allow(self._redis, _RULES)

    async def refuse_heartbeats(self) -> None:
        await self._set_memory(1)

    async def take_heartbeats(self) -> None:
        await self._set_memory(0)

    async def _set_memory(self, most_bytes: int) -> None:
        async with Redis.from_url(self._redis.url) as client:
            await client.config_set("maxmemory", most_bytes)


class TestRedisStore(StoreConformance):
    @pytest.fixture(params=_binaries())
    async def cluster(self, request: pytest.FixtureRequest) -> AsyncIterator[_RedisStores]:
        async with run_redis(request.param) as redis:
            yield _RedisStores(redis, await allow(redis, _RULES))


async def test_frozen_redis_counts_as_away_and_expires_nobody() -> None:
    async with run_redis() as redis, RedisStore(redis.url) as instance, RedisStore(redis.url) as router:
        record = replace(DECODE, lease_ttl_s=1.0)
        heartbeat = Heartbeat(instance, record, InstanceLoad)
        running = asyncio.create_task(heartbeat.run())
        await view_that(router, has("decode-0"))
        redis.process.send_signal(signal.SIGSTOP)
        view = await view_that(router, lambda view: not view.store_connected)
        assert has("decode-0")(view), "the lease ran out before the store was known to be away"
        await asyncio.wait_for(router.claim_request(REQUEST, 1.0), 0.1)
        redis.process.send_signal(signal.SIGCONT)
        await view_that(router, lambda view: view.store_connected)
        back_at_s = time.monotonic()
        while time.monotonic() - back_at_s < 1.5:
            assert has("decode-0")(await router.wait_for_change(0.1))
        heartbeat.stop()
        await running


@pytest.mark.parametrize("garbage", [b"", b"+", b"-", b"+\xff\xff\xff", b"-\xff\xff\xff", b"?what"])
async def test_garbage_on_the_channel_is_ignored(garbage: bytes) -> None:
    async with run_redis(unix_socket=True) as redis, RedisStore(redis.url) as store:
        await store._opened.client.publish(_EVENTS, garbage)
        await store.heartbeat(DECODE, InstanceLoad(1))
        await view_that(store, lambda view: "decode-0" in view.instances)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
async def test_lease_or_age_that_is_no_time_is_ignored(seconds: float) -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        RedisStore(redis.url) as store,
        RedisStore(redis.url, follow=ViewSource.BROADCASTS) as prefill,
    ):
        endless = status_to_proto(InstanceStatus(replace(DECODE, instance_id="endless", lease_ttl_s=seconds), _LOAD))
        ageless = InstanceStatus(replace(PREDICTOR, instance_id="ageless"), _LOAD, heartbeat_age_s=seconds)
        token = await lead(store, "one")
        await store._opened.client.publish(_EVENTS, b"+" + endless.SerializeToString())
        await store.heartbeat(DECODE, InstanceLoad(1))
        await view_that(store, has("decode-0"))
        await store.broadcast(LoadBroadcast("one", token, 1, (ageless, named(DECODE, 2))))
        await view_that(prefill, shows("decode-0", 2))
        assert has("decode-0")(prefill.view())


class _SlowlyLoadingStore(RedisStore):
    """Store during whose load another instance registers."""

    def __init__(self, url: str, other: RedisStore) -> None:
        super().__init__(url)
        self._other = other

    async def _load_instances(self) -> None:
        await super()._load_instances()
        await self._other.heartbeat(replace(DECODE, lease_ttl_s=60.0), InstanceLoad(1))


async def test_instance_that_registers_while_others_are_loaded_is_seen() -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        RedisStore(redis.url) as instance,
        _SlowlyLoadingStore(redis.url, instance) as late,
    ):
        await view_that(late, has("decode-0"))


class _CountingStore(RedisStore):
    """Store that counts the messages that Redis pushes to it."""

    message_count = 0

    def _take_in(self, event: bytes) -> None:
        self.message_count += 1
        super()._take_in(event)


async def _subscribers(store: RedisStore, channel: str) -> int:
    [(_, count)] = await store._opened.client.pubsub_numsub(channel)
    return int(count)


@pytest.mark.parametrize("instance_count", [2, 32])
async def test_follower_of_broadcasts_gets_one_message_whatever_the_number_of_instances(
    instance_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stalls must not make it follow the heartbeats.
    monkeypatch.setattr(monitored_membership, "BROADCAST_LOST_AFTER_S", 60.0)
    rounds = 10
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(run_redis(unix_socket=True))
        router = await stack.enter_async_context(RedisStore(redis.url))
        listener = await stack.enter_async_context(_CountingStore(redis.url))
        prefill = await stack.enter_async_context(_CountingStore(redis.url, follow=ViewSource.BROADCASTS))
        records = [replace(DECODE, instance_id=f"decode-{number}", lease_ttl_s=60) for number in range(instance_count)]
        token = await lead(router, "router-0.1")

        async def tell(round_number: int) -> None:
            for record in records:
                await router.heartbeat(record, InstanceLoad(round_number))
            view = await view_that(router, lambda view: all(shows(r.instance_id, round_number)(view) for r in records))
            broadcast = LoadBroadcast("router-0.1", token, round_number, tuple(view.instances.values()))
            assert await router.broadcast(broadcast)
            await view_that(prefill, lambda view: all(shows(r.instance_id, round_number)(view) for r in records))

        await tell(1)
        async with asyncio.timeout(5):
            while await _subscribers(router, _EVENTS) > 2:  # noqa: ASYNC110 - Redis does not tell of it
                await asyncio.sleep(0.01)
        # What was on its way to prefill before it left the channel.
        await tell(2)
        before = prefill.message_count, listener.message_count
        for round_number in range(3, 3 + rounds):
            await tell(round_number)
        assert prefill.message_count - before[0] == rounds
        await view_that(listener, lambda view: all(shows(r.instance_id, 2 + rounds)(view) for r in records))
        assert listener.message_count - before[1] == rounds * instance_count, "the others hear every heartbeat"


@pytest.mark.parametrize("garbage", [b"", b"=", b"=\xff\xff\xff", b"-\xff", b"?what"])
async def test_garbage_among_the_broadcasts_is_ignored(garbage: bytes) -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        RedisStore(redis.url) as leader,
        RedisStore(redis.url, follow=ViewSource.BROADCASTS) as prefill,
    ):
        await leader._opened.client.publish(_LOADS, garbage)
        token = await lead(leader, "one")
        assert await leader.broadcast(LoadBroadcast("one", token, 1, (named(DECODE, 1),)))
        await view_that(prefill, has("decode-0"))


async def test_broadcasts_of_a_leader_of_another_wire_number_are_ignored() -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        RedisStore(redis.url) as leader,
        RedisStore(redis.url, follow=ViewSource.BROADCASTS) as prefill,
    ):
        token = await lead(leader, "one")
        foreign = broadcast_to_proto(LoadBroadcast("one", token, 2, (named(PREDICTOR, 1),)))
        foreign.wire = WIRE + 1
        await leader._opened.client.publish(_LOADS, b"=" + foreign.SerializeToString())
        # Older than the foreign one, and taken in all the same.
        assert await leader.broadcast(LoadBroadcast("one", token, 1, (named(DECODE, 1),)))
        view = await view_that(prefill, has("decode-0"))
        assert set(view.instances) == {"decode-0"}


async def test_a_bug_in_the_watch_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_redis(unix_socket=True) as redis, RedisStore(redis.url) as instance, RedisStore(redis.url) as router:
        take_in = router._take_in

        def breaks_once(event: bytes) -> None:
            monkeypatch.setattr(router, "_take_in", take_in)
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(router, "_take_in", breaks_once)
        await instance.heartbeat(DECODE, InstanceLoad(1))
        await view_that(router, lambda view: not view.store_connected)
        await view_that(router, lambda view: has("decode-0")(view) and view.store_connected)
        await instance.heartbeat(DECODE, InstanceLoad(2))
        await view_that(router, lambda view: view.instances["decode-0"].load.sequence_number == 2)


@pytest.mark.parametrize("garbage", [b"", b"1.1:2", b"1.1:2:\xff\xff\xff", b"no registration"])
async def test_a_strangers_value_among_the_instances_is_ignored(garbage: bytes) -> None:
    async with run_redis(unix_socket=True) as redis, RedisStore(redis.url) as instance:
        for name in ("stranger", "decode-0"):
            await instance._opened.client.set(f"{_NAMES}:instance:{name}", garbage, px=60_000)
            await instance._opened.client.sadd(f"{_NAMES}:instances", name)
        await instance.heartbeat(DECODE, InstanceLoad(1))
        async with RedisStore(redis.url) as late:
            assert has("decode-0")(late.view())


@pytest.mark.parametrize("lease_ttl_s", [math.nan, math.inf, 1e12])
async def test_an_instance_whose_lease_would_never_end_is_ignored(lease_ttl_s: float) -> None:
    broken = replace(DECODE, instance_id="broken", lease_ttl_s=lease_ttl_s)
    status = status_to_proto(InstanceStatus(broken, InstanceLoad())).SerializeToString()
    async with run_redis(unix_socket=True) as redis, RedisStore(redis.url) as instance:
        await instance._opened.client.set(f"{_NAMES}:instance:broken", b"1.1:1:" + status, px=60_000)
        await instance._opened.client.sadd(f"{_NAMES}:instances", "broken")
        await instance._opened.client.publish(_EVENTS, b"+" + status)
        await instance.heartbeat(DECODE, InstanceLoad(1))
        async with RedisStore(redis.url) as late:
            for store in (instance, late):
                assert has("decode-0")(store.view())
                assert not has("broken")(store.view())


@pytest.mark.parametrize(("names", "databases"), [(("blue", "green"), (0, 0)), (("blue", "blue"), (0, 1))])
async def test_clusters_of_another_name_or_database_do_not_meet(
    names: tuple[str, str], databases: tuple[int, int]
) -> None:
    async with run_redis() as redis:
        urls = [f"{redis.url.rpartition('/')[0]}/{database}" for database in databases]
        async with RedisStore(urls[0], names[0]) as blue, RedisStore(urls[1], names[1]) as green:
            other = replace(DECODE, incarnation=7, address="127.0.0.1:9", lease_ttl_s=60.0)
            await green.heartbeat(other, InstanceLoad(9))
            await view_that(green, has("decode-0"))
            assert await blue.heartbeat(DECODE, InstanceLoad(1)) == HeartbeatAnswer()
            view = await view_that(blue, has("decode-0"))
            assert view.instances["decode-0"].record == DECODE
            assert await blue.claim_request(REQUEST, 60.0) is None
            assert await green.claim_request(REQUEST, 60.0) is None
            assert await lead(blue, "one")
            assert await lead(green, "other")
            await blue.deregister(DECODE)
            await view_that(blue, has())
            # Every message on the way to green has arrived when its own next one has.
            await green.heartbeat(other, InstanceLoad(10))
            view = await view_that(green, shows("decode-0", 10))
            assert view.instances["decode-0"].record == other


@pytest.mark.parametrize(
    "url", ["redis", "http://127.0.0.1:1", "redis://127.0.0.1:port/0", "unix:///nowhere/redis.sock"]
)
async def test_bad_url_is_a_config_error_that_names_the_flag(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        async with RedisStore(url):
            pass


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hun/ter2@127.0.0.1:1/0",
        "redis://:hun#ter2@127.0.0.1:1/0",
        "redis://:hun?ter2@127.0.0.1:1/0",
        "redis://:hun[ter2@127.0.0.1:1/0",
        "redis://:hun\u2100ter2@127.0.0.1:1/0",
        "redis://:hunter2@127.0.0.1:1/blue",
        "redis://:hunter2@127.0.0.1:port/0",
    ],
)
async def test_bad_url_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--redis-url: .* is no Redis URL") as caught:
        async with RedisStore(url):
            pass
    for part in ("hun", "ter2"):
        assert part not in "".join(traceback.format_exception(caught.value)).replace(__file__, "")


async def test_nothing_there_is_a_config_error_within_seconds_that_keeps_the_password() -> None:
    started_at_s = time.monotonic()
    with pytest.raises(ConfigError, match="no Redis answers") as caught:
        async with RedisStore(f"redis://user:hunter2@127.0.0.1:{free_port()}/0"):
            pass
    assert time.monotonic() - started_at_s < 6.0
    assert "hunter2" not in str(caught.value)


async def test_leaving_the_store_at_any_moment_ends_its_watch() -> None:
    # Leaving while a ping is being sent used to lose the cancellation: 5 of 100 such stores then hung forever.
    async with run_redis() as redis:

        async def enter_and_leave(pause_s: float) -> None:
            async with RedisStore(redis.url):
                await asyncio.sleep(pause_s)

        pauses_s = [0.1 + 0.004 * number / 300 for number in range(300)]
        async with asyncio.timeout(60):
            for start in range(0, len(pauses_s), 20):
                await asyncio.gather(*map(enter_and_leave, pauses_s[start : start + 20]))


async def test_a_later_session_takes_a_claim_whose_hint_changes_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the router of the earlier session had been stopped and stored its hint when it continued."""
    first = replace(REQUEST, session=0, secret_hash="5ec2e7")
    later = replace(first, router_id="router-9", router_incarnation=9, session=3)
    async with run_redis() as redis, RedisStore(redis.url) as former, RedisStore(redis.url) as store:
        assert await former.claim_request(first, 30.0) is None
        read, hints = store._opened.client.get, [b"decode-0", b"decode-1"]

        async def get(key: str) -> object:
            held = await read(key)
            if hints:
                await former.update_requests([replace(first, hint=hints.pop())])
            return held

        monkeypatch.setattr(store._opened.client, "get", get)
        assert await store.claim_request(later, 30.0) is None
        assert not hints, "the hint did not change meanwhile: the test has shown nothing"
        found = await former.find_request(first.request_id)
        assert found is not None
        assert (found, found.hint) == (later, b"decode-0")


async def test_a_heartbeat_over_a_connection_that_was_closed_a_moment_ago_is_lost_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_redis(unix_socket=True) as redis, RedisStore(redis.url) as store:

        async def closed(*_: object, **__: object) -> None:
            raise RuntimeError("unable to perform operation on <UnixTransport>; the handler is closed")

        with monkeypatch.context() as patched:
            patched.setattr(store, "_run", closed)
            assert await store.heartbeat(DECODE, _LOAD) == HeartbeatAnswer()
        assert (await store.heartbeat(DECODE, _LOAD)).holds
