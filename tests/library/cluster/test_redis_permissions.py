import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
from redis.asyncio import Redis

from kaveri.cluster.redis_permissions import RedisNeeds, store_needs
from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.view import InstanceLoad
from kaveri.errors import ConfigError
from kaveri.hosting.store import open_store
from kaveri.local.process import ChildProcess
from kaveri.local.redis_server import find_redis_server
from kaveri.security.api_keys import USAGE_COMMANDS, ApiKey, KeyLimits, usage_prefix
from kaveri.security.key_usage import KeyUsage
from services.router.config import RouterConfig
from tests.support.certificates import Authority
from tests.support.redis_fixture import allow, free_port, run_redis
from tests.support.store_conformance import DECODE, REQUEST, has, view_that

WITHIN_S = 60.0
_NEEDS = store_needs("kaveri:default:0")
_CLUSTER_BUS = 10_000
"""Offset of the cluster bus from the port of a Redis in cluster mode."""
_USAGE = RedisNeeds(frozenset(USAGE_COMMANDS), (f"{usage_prefix('default')}:*",))


def test_the_docs_list_all_of_them() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    blocks = [set(block.split()) for block in re.findall(r"```\n([+~&].*?)```", text, re.DOTALL)]
    assert blocks == [set(_NEEDS.rules()), set(_USAGE.rules()) - set(_NEEDS.rules())]


async def test_each_permission_that_is_missing_is_named_at_start_and_once() -> None:
    rules = _NEEDS.rules()
    assert {"+eval", "+hincrby", "+publish", "~kaveri:default:0:request:*", "&kaveri:default:0:events"} <= set(rules)
    async with run_redis() as redis:
        for missing in rules:
            url = await allow(redis, [rule for rule in rules if rule != missing])
            with structlog.testing.capture_logs() as logged, pytest.raises(ConfigError) as refused:
                async with RedisStore(url):
                    pass
            assert f"Redis refuses to serve at redis://***@{redis.url[8:]}: its user lacks" in str(refused.value)
            named = str(refused.value).partition("lacks ")[2].partition(" (")[0].split()
            assert named == [missing]
            assert logged == []
        async with RedisStore(await allow(redis, rules)):
            pass


async def test_the_permissions_of_a_fresh_user_of_redis_7_lack_the_channels() -> None:
    async with run_redis() as redis:
        url = await allow(redis, ["+@all", "-@dangerous", "~kaveri:*"])
        with pytest.raises(ConfigError, match="its user lacks &kaveri:default:0:events &kaveri:default:0:loads "):
            async with RedisStore(url):
                pass
        async with RedisStore(await allow(redis, ["+@all", "-@dangerous", "~kaveri:*", "&kaveri:*"])):
            pass


async def test_the_check_writes_nothing() -> None:
    async with run_redis() as redis, Redis.from_url(redis.url) as client:
        await client.config_set("notify-keyspace-events", "KEA")
        async with client.pubsub() as events:
            await events.psubscribe("__key*__:*")
            await events.get_message(timeout=WITHIN_S)
            async with RedisStore(redis.url):
                await client.set("last", "")
                message = await events.get_message(timeout=WITHIN_S)
            assert message is not None
            assert message["channel"] == b"__keyspace@0__:last"


async def test_what_counting_api_keys_needs_is_asked_for_by_services_that_count(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.touch()
    async with run_redis() as redis:
        for missing in _USAGE.keys:
            rules = [rule for rule in (_NEEDS | _USAGE).rules() if rule != f"~{missing}"]
            config = RouterConfig(redis_url=await allow(redis, rules), keys_file=str(keys_file))
            with pytest.raises(ConfigError, match="its user lacks ~kaveri:default:limits"):
                async with open_store(config, asyncio.Event()):
                    pass
            async with open_store(replace(config, keys_file=""), asyncio.Event()) as store:
                assert store is not None


async def test_api_keys_are_counted_with_the_listed_permissions_alone() -> None:
    key = ApiKey("alice", b"", KeyLimits(requests_per_s=1000, tokens_per_min=100))
    async with run_redis() as redis:
        usage = KeyUsage(await allow(redis, _USAGE.rules()), "default")
        with structlog.testing.capture_logs() as logged:
            await usage.take_request(key)
            await usage.add_tokens(key, 100)
            with contextlib.suppress(Exception):
                await usage.take_request(key)
        await usage.close()
        assert logged == []


@contextlib.asynccontextmanager
async def _redis_with(folder: Path, *options: str) -> AsyncIterator[None]:
    """Run a redis-server with these options in addition to the usual ones."""
    log = folder / "redis.log"
    command = [find_redis_server(), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = ChildProcess.start("redis", command, log)
    try:
        async with asyncio.timeout(WITHIN_S):
            while "Ready to accept connections" not in await asyncio.to_thread(log.read_text):
                assert process.exit_status is None, process.last_lines(5)
                await asyncio.sleep(0.02)
        yield
    finally:
        await process.kill()


@pytest.mark.parametrize("database", [0, 1])
async def test_cluster_mode_is_refused_by_name(tmp_path: Path, database: int) -> None:
    port = free_port(_CLUSTER_BUS)
    async with _redis_with(tmp_path, "--port", str(port), "--cluster-enabled", "yes"):
        with pytest.raises(ConfigError, match="it is in cluster mode, which Kaveri does not support"):
            async with RedisStore(f"redis://127.0.0.1:{port}/{database}"):
                pass


async def test_cluster_mode_is_refused_by_name_to_a_user_who_may_not_ask_for_it(tmp_path: Path) -> None:
    port = free_port(_CLUSTER_BUS)
    user = ["--user", "limited", "on", ">word", *_NEEDS.rules()]
    async with _redis_with(tmp_path, "--port", str(port), "--cluster-enabled", "yes", *user):
        with pytest.raises(ConfigError, match="it is in cluster mode, which Kaveri does not support"):
            async with RedisStore(f"redis://limited:word@127.0.0.1:{port}/0"):
                pass


async def test_a_command_that_is_renamed_is_named(tmp_path: Path) -> None:
    port = free_port()
    async with _redis_with(tmp_path, "--port", str(port), "--rename-command", "EVALSHA", ""):
        with pytest.raises(ConfigError, match=r"lacks \+evalsha \(.* a command may also be disabled\)"):
            async with RedisStore(f"redis://127.0.0.1:{port}/0"):
                pass


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("replicaof", "127.0.0.1 1", "read only replica"),
        ("maxmemory", "1", "maxmemory"),
        ("min-replicas-to-write", "1", "NOREPLICAS|replicas to write"),
    ],
)
async def test_what_may_pass_is_waited_for_and_then_named(tmp_path: Path, option: str, value: str, reason: str) -> None:
    port = free_port()
    started_at_s = time.monotonic()
    async with _redis_with(tmp_path, "--port", str(port), f"--{option}", *value.split()):
        with pytest.raises(ConfigError, match=f"Redis refuses to serve at .*({reason})"):
            async with RedisStore(f"redis://127.0.0.1:{port}/0", wait_s=WITHIN_S):
                pass
    assert time.monotonic() - started_at_s < WITHIN_S


@pytest.mark.parametrize(
    ("policy", "maxmemory", "events"),
    [
        ("allkeys-lru", "100mb", ["redis_evicts_keys"]),
        ("volatile-ttl", "100mb", ["redis_evicts_keys"]),
        ("noeviction", "100mb", []),
        ("allkeys-lru", "0", []),
    ],
)
async def test_a_policy_that_evicts_is_warned_of(policy: str, maxmemory: str, events: list[str]) -> None:
    async with run_redis() as redis, Redis.from_url(redis.url) as client:
        await client.config_set("maxmemory", maxmemory)
        await client.config_set("maxmemory-policy", policy)
        with structlog.testing.capture_logs() as logged:
            async with RedisStore(redis.url):
                pass
        assert [line["event"] for line in logged] == events


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_redis_over_tls_is_spoken_to_with_certificates_on_both_ends(tmp_path: Path, scheme: str) -> None:
    files = Authority(tmp_path).certify("redis", dns="localhost")
    port = free_port()
    shown = ["--tls-cert-file", files.certificate, "--tls-key-file", files.key, "--tls-ca-cert-file", files.authority]
    url = f"{scheme}://localhost:{port}/0?ssl_ca_certs={files.authority}"
    own = f"&ssl_certfile={files.certificate}&ssl_keyfile={files.key}"
    async with _redis_with(tmp_path, "--port", "0", "--tls-port", str(port), *shown):
        async with RedisStore(url + own) as one, RedisStore(url + own) as other:
            await one.heartbeat(DECODE, InstanceLoad())
            await view_that(other, has("decode-0"))
            assert await other.claim_request(REQUEST, 60.0) is None
        with pytest.raises(ConfigError, match=f"no Redis answers at {scheme}://localhost:{port}/0 "):
            async with RedisStore(url, wait_s=1.0):
                pass


async def test_redis_at_an_ipv6_address_is_reached_by_either_scheme(tmp_path: Path) -> None:
    port = free_port()
    address = f"[::1]:{port}/0"
    server = _redis_with(tmp_path, "--port", str(port), "--bind", "::1")
    async with server, RedisStore(f"redis://{address}") as one, RedisStore(f"valkey://{address}") as other:
        await one.heartbeat(DECODE, InstanceLoad())
        await view_that(other, has("decode-0"))


async def test_channels_that_are_taken_away_are_said_once_and_come_back() -> None:
    rules = _NEEDS.rules()
    async with (
        run_redis() as redis,
        Redis.from_url(redis.url) as client,
        RedisStore(await allow(redis, rules)) as store,
    ):
        with structlog.testing.capture_logs() as logged:
            await allow(redis, [rule for rule in rules if not rule.startswith("&")])
            await view_that(store, lambda view: not view.store_connected)
            async with asyncio.timeout(WITHIN_S):
                while await _rejected(client, "subscribe") < 10:  # noqa: ASYNC110 - Redis does not tell of it
                    await asyncio.sleep(0.05)
            assert [line["event"] for line in logged if line["event"] != "redis_lost"] == []
            assert 1 <= len(logged) <= 2, "closed, then refused"
            assert "channel" in logged[-1]["error"]
            await allow(redis, rules)
            await view_that(store, lambda view: view.store_connected)
        assert [line["event"] for line in logged].count("redis_returned") == 1


async def test_keys_that_are_taken_away_are_said_once_whatever_is_asked() -> None:
    rules = _NEEDS.rules()
    async with run_redis() as redis, RedisStore(await allow(redis, rules)) as store:
        await allow(redis, [rule for rule in rules if "request" not in rule])
        with structlog.testing.capture_logs() as logged:
            for number in range(100):
                assert await store.claim_request(replace(REQUEST, request_id=f"r{number}"), 60.0) is None
        assert [line["event"] for line in logged] == ["redis_command_failed"]


async def _rejected(client: Redis, command: str) -> int:
    stats = await client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("rejected_calls", 0))
