"""A Redis that refuses writes, is far away, is full of foreign keys, or whose clock goes back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import structlog
import uvloop
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kaveri.cluster.metrics import REFUSED_HEARTBEATS
from kaveri.cluster.redis_batches import CommandBatches
from kaveri.cluster.redis_store import RedisStore
from kaveri.cluster.store import HeartbeatAnswer, ViewSource
from kaveri.domain.view import InstanceLoad
from kaveri.errors import ConfigError
from tests.library.cluster.slow_proxy import slow_proxy
from tests.support.redis_fixture import run_redis
from tests.support.store_conformance import DECODE, REQUEST, ROUTER, beating, has, lead, shows, view_that

_LEASE_S = 0.5
_ROUND_TRIP_S = 0.6

Act = Callable[[Redis], Awaitable[object]]
_REFUSALS: dict[str, tuple[Act, Act, str]] = {
    "replica": (
        lambda client: client.replicaof("127.0.0.1", 1),
        lambda client: client.replicaof("NO", "ONE"),
        "READONLY|read only replica",
    ),
    "memory": (
        lambda client: client.config_set("maxmemory", 1),
        lambda client: client.config_set("maxmemory", 0),
        "OOM|used memory",
    ),
    "permission": (
        lambda client: client.acl_setuser("default", commands=["-set"], enabled=True),
        lambda client: client.acl_setuser("default", commands=["+set"], enabled=True),
        "NOPERM|can't run this command",
    ),
    "replicas": (
        lambda client: client.config_set("min-replicas-to-write", 1),
        lambda client: client.config_set("min-replicas-to-write", 0),
        "NOREPLICAS|good replicas",
    ),
}


def _count() -> float:
    return next(sample.value for metric in REFUSED_HEARTBEATS.collect() for sample in metric.samples)


@pytest.mark.parametrize("kind", _REFUSALS)
async def test_refused_heartbeats_are_said_once_with_their_reason_and_counted(kind: str) -> None:
    refuse, accept, reason = _REFUSALS[kind]
    async with (
        run_redis() as redis,
        Redis.from_url(redis.url) as client,
        RedisStore(redis.url) as instance,
        RedisStore(redis.url) as router,
        beating(router, replace(ROUTER, lease_ttl_s=_LEASE_S)),
        beating(instance, replace(DECODE, lease_ttl_s=_LEASE_S)),
    ):
        await view_that(router, has("decode-0", "router-0"))
        with structlog.testing.capture_logs() as logs:
            counted = _count()
            await refuse(client)
            await view_that(router, lambda view: not view.store_connected)
            refused_at_s = time.monotonic()
            while time.monotonic() - refused_at_s < 3 * _LEASE_S:
                assert has("decode-0", "router-0")(await router.wait_for_change(0.05))
                assert await router.claim_request(REQUEST, 60.0) is None
            assert _count() > counted + 1
            await accept(client)
            await view_that(router, lambda view: view.store_connected)
            await view_that(instance, lambda view: view.store_connected)
        events = [line["event"] for line in logs]
        # One line of each of the two processes.
        assert events.count("heartbeats_refused") == 2
        assert events.count("heartbeats_accepted") == 2
        assert "redis_lost" not in events
        said = next(line for line in logs if line["event"] == "heartbeats_refused")
        assert any(word in said["error"] for word in reason.split("|")), said
        assert await router.find_request(REQUEST.request_id) is None


async def test_wrong_password_is_a_config_error_that_does_not_show_it() -> None:
    async with run_redis() as redis, Redis.from_url(redis.url) as client:
        await client.config_set("requirepass", "hunter2")
        with pytest.raises(ConfigError, match="--redis-url: Redis refuses to serve at") as caught:
            async with RedisStore(redis.url.replace("redis://", "redis://:hunter3@")):
                pass
        assert "hunter" not in str(caught.value)
        async with RedisStore(redis.url.replace("redis://", "redis://:hunter2@")) as store:
            assert await store.claim_request(REQUEST, 60.0) is None


@contextlib.asynccontextmanager
async def _far_away_redis() -> AsyncIterator[str]:
    async with run_redis() as redis:
        port = int(redis.url.rpartition(":")[2].partition("/")[0])
        async with slow_proxy(port, _ROUND_TRIP_S) as slow_port:
            yield f"redis://127.0.0.1:{slow_port}/1"


async def test_redis_far_away_locks_nobody_out() -> None:
    async with _far_away_redis() as url, AsyncExitStack() as stack:
        lease_s = 10.0
        instance, router = [await stack.enter_async_context(RedisStore(url)) for _ in range(2)]
        await stack.enter_async_context(beating(instance, replace(DECODE, lease_ttl_s=lease_s)))
        await view_that(router, has("decode-0"), within_s=20.0)
        late = await stack.enter_async_context(RedisStore(url, follow=ViewSource.BROADCASTS))
        assert has("decode-0")(late.view())
        # Several at once, each over a connection of its own that has to be opened first.
        claims = [router.claim_request(replace(REQUEST, request_id=f"request-{n}"), 60.0) for n in range(4)]
        assert await asyncio.gather(*claims) == [None] * 4
        assert all([await late.find_request(f"request-{n}") for n in range(4)])
        assert await router.campaign("one", 60.0)
        watched_until_s = time.monotonic() + 3.0
        while time.monotonic() < watched_until_s:
            view = await router.wait_for_change(0.2)
            assert view.store_connected
            assert has("decode-0")(view)


async def test_foreign_keys_cost_nothing_at_the_start() -> None:
    async with run_redis(unix_socket=True) as redis, Redis.from_url(redis.url) as client:
        # Enough keys to fill the server's memory; with SCAN the store would name all of them to find its own.
        script = "for n = 1, ARGV[1] do redis.call('SET', 'foreign:' .. n, '') end"
        for _ in range(4):
            await client.eval(script, 0, 100_000)
        async with RedisStore(redis.url) as instance:
            await instance.heartbeat(DECODE, InstanceLoad(1))
            before = (await client.info("commandstats")).get("cmdstat_scan", {"calls": 0})["calls"]
            async with RedisStore(redis.url) as late:
                assert has("decode-0")(late.view())
            stats = await client.info("commandstats")
            assert stats.get("cmdstat_scan", {"calls": 0})["calls"] == before == 0
            assert not stats.get("cmdstat_keys")


async def test_ids_whose_leases_ended_are_taken_out_of_the_set_by_the_next_process() -> None:
    async with run_redis(unix_socket=True) as redis, Redis.from_url(redis.url) as client:
        async with RedisStore(redis.url) as instance:
            brief = replace(DECODE, lease_ttl_s=0.05)
            for number in range(600):
                await instance.heartbeat(replace(brief, instance_id=f"brief-{number}"), InstanceLoad(1))
            await instance.heartbeat(replace(DECODE, lease_ttl_s=60.0), InstanceLoad(1))
            await instance.heartbeat(replace(ROUTER, lease_ttl_s=60.0), InstanceLoad(1))
            await instance.deregister(replace(ROUTER, lease_ttl_s=60.0))
        async with asyncio.timeout(5):
            while await client.dbsize() > 4:  # noqa: ASYNC110 - Redis does not tell of it
                await asyncio.sleep(0.05)
        async with RedisStore(redis.url) as late:
            assert has("decode-0")(late.view())
        assert await client.smembers("kaveri:default:0:instances") == {b"decode-0"}


async def test_dead_leader_whose_lease_redis_clock_made_long_is_replaced_within_its_lease() -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        Redis.from_url(redis.url) as client,
        RedisStore(redis.url) as one,
        RedisStore(redis.url) as other,
    ):
        first = await lead(one, "one", ttl_s=0.3)
        # What an hour back does to every expiry.
        assert await client.pexpire("kaveri:default:0:leader", 3_600_000)
        assert await lead(other, "other", ttl_s=0.3) > first
        assert await one.campaign("one", 0.3) is None


async def test_dead_instance_whose_key_redis_clock_made_long_is_seen_for_one_lease_at_most() -> None:
    async with run_redis(unix_socket=True) as redis, Redis.from_url(redis.url) as client:
        async with RedisStore(redis.url) as instance:
            await instance.heartbeat(replace(DECODE, lease_ttl_s=_LEASE_S), InstanceLoad(1))
        assert await client.pexpire("kaveri:default:0:instance:decode-0", 3_600_000)
        async with RedisStore(redis.url) as router, beating(router, replace(ROUTER, lease_ttl_s=60.0)):
            await view_that(router, has("router-0"))
            # Back at last, it is there at once.
            back = replace(DECODE, incarnation=5, lease_ttl_s=60.0)
            assert (await router.heartbeat(back, InstanceLoad(1))).holds
            assert (await view_that(router, shows("decode-0", 1))).instances["decode-0"].record == back


async def test_order_of_lives_and_leaders_does_not_come_from_redis_clock() -> None:
    async with (
        run_redis(unix_socket=True) as redis,
        Redis.from_url(redis.url) as client,
        RedisStore(redis.url) as old_life,
        RedisStore(redis.url) as new_life,
    ):
        new = replace(DECODE, incarnation=3)
        await old_life.heartbeat(DECODE, InstanceLoad(1))
        assert await new_life.heartbeat(new, InstanceLoad(1)) == HeartbeatAnswer(other=DECODE)
        await lead(new_life, "one")
        assert not (await old_life.heartbeat(DECODE, InstanceLoad(2))).holds
        assert "cmdstat_time" not in await client.info("commandstats")


def test_a_connection_that_was_closed_a_moment_ago_is_a_lost_redis_and_no_unexpected_error() -> None:
    async def write_to_a_closed_connection() -> None:
        async with run_redis() as redis, Redis.from_url(redis.url) as client:
            batches = CommandBatches(client.connection_pool, 5.0)
            assert await batches.execute("SET", "key", "1")
            connection = batches._connection
            assert connection is not None
            connection.can_read = lambda: asyncio.sleep(0)  # type: ignore[assignment]
            connection._writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(RedisError):
                await batches.execute("GET", "key")
            await batches.close()

    uvloop.run(write_to_a_closed_connection())
