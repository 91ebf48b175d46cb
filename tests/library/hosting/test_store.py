import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from structlog.testing import capture_logs

from kaveri.cluster import redis_connection
from kaveri.errors import ConfigError
from kaveri.hosting.store import open_store
from kaveri.local.redis_server import RedisServer
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import open_channel
from tests.support.redis_fixture import free_port, run_redis

WITHIN_S = 30.0
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def away(port: int, **settings: float) -> ServiceConfig:
    return ServiceConfig(redis_url=f"redis://:hunter2@127.0.0.1:{port}/0", **settings)


async def health_of(port: int) -> int:
    """Wait until a server listens; return its health status."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S, wait_for_ready=True)
        return int(answer.status)


async def test_health_says_not_serving_while_redis_is_away_and_the_store_opens_once_it_answers(tmp_path: Path) -> None:
    port, redis_port = free_port(), free_port()
    config = ServiceConfig(redis_url=f"redis://127.0.0.1:{redis_port}/0", port=port, redis_wait_s=WITHIN_S)
    server = RedisServer(tmp_path, redis_port)

    async def open_and_look() -> bool:
        async with open_store(config, asyncio.Event()) as store:
            assert store is not None
            replacement = aio.server(options=(("grpc.so_reuseport", 0),))
            assert replacement.add_insecure_port(f"127.0.0.1:{port}") == port
            return store.view().store_connected

    opening = asyncio.create_task(open_and_look())
    assert await health_of(port) == NOT_SERVING
    process = await server.start()
    try:
        assert await asyncio.wait_for(opening, WITHIN_S)
    finally:
        await process.kill()


async def test_the_wait_is_reported_again_and_again_and_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "_REPORT_EVERY_S", 0.5)
    redis_port = free_port()
    with capture_logs() as logs, pytest.raises(ConfigError) as caught:
        async with open_store(away(redis_port, redis_wait_s=2.0), asyncio.Event()):
            pass
    reason = rf"no Redis answers at redis://\*\*\*@127.0.0.1:{redis_port}/0 after \d+ s: .+"
    assert re.fullmatch(f"--redis-url: {reason}", str(caught.value))
    lines = [line for line in logs if line["event"] == "redis_awaited"]
    assert len(lines) >= 2
    assert lines[0]["wait_s"] == 2.0
    assert "hunter2" not in str(logs)


async def test_a_signal_ends_the_wait_at_once() -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stopping.set)
    async with asyncio.timeout(5), open_store(away(free_port(), redis_wait_s=600.0), stopping) as store:
        assert store is None


def test_a_service_that_waits_for_redis_ends_with_its_signal_or_with_its_time() -> None:
    command = [sys.executable, "-P", "-m", "services.instance", "decode", "--engine", "fake"]
    dead = ("--redis-url", f"redis://127.0.0.1:{free_port()}/0")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAVERI_")}
    with subprocess.Popen([*command, *dead], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert "redis_awaited" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0
    ended = subprocess.run(
        [*command, *dead, "--redis-wait-s", "0"],
        check=False, capture_output=True, text=True, timeout=WITHIN_S, env=environment,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("kaveri decode: --redis-url: no Redis answers at ")
    assert len(ended.stderr.splitlines()) == 1


async def test_a_service_whose_redis_user_lacks_permissions_ends_with_one_line_that_names_them() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAVERI_")}
    async with run_redis() as redis, Redis.from_url(redis.url) as client:
        await client.execute_command(
            "ACL", "SETUSER", "limited", "resetchannels", "on", ">word", "+@all", "-@scripting", "~*", "&kaveri:*"
        )
        url = redis.url.replace("redis://", "redis://limited:word@")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.instance", "decode", "--engine", "fake", "--redis-url", url),
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        async with asyncio.timeout(WITHIN_S):
            _, error = await process.communicate()
    assert process.returncode == 2
    (line,) = error.decode().splitlines()
    assert line.startswith("kaveri decode: --redis-url: Redis refuses to serve at redis://***@127.0.0.1")
    assert "its user lacks +eval +evalsha +script|load" in line
