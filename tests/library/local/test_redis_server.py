import os
import shutil
import stat
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kaveri.errors import ConfigError
from kaveri.local import redis_server
from kaveri.local.redis_server import RedisServer, bundled_server, find_redis_server
from tests.support.redis_fixture import run_redis


async def test_socket_is_for_this_user_only_and_memory_is_bounded(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    process = await server.start()
    try:
        assert stat.S_IMODE((tmp_path / "redis.sock").stat().st_mode) == 0o700
        async with Redis.from_url(server.url) as client:
            settings = await client.config_get("maxmemory")
            assert int(settings["maxmemory"]) == 256 * 2**20
            await client.set("key", "value")
    finally:
        await process.stop(5.0)
    assert set(os.listdir(tmp_path)) <= {"redis.log", "redis.sock"}


def test_bundled_server_is_taken_when_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = bundled_server()
    assert bundled is not None, "the development environment has one"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert find_redis_server() == bundled


def test_no_server_at_all_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(redis_server, "bundled_server", lambda: None)
    with pytest.raises(ConfigError, match="install it"):
        find_redis_server()


async def test_port_in_use_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    async with run_redis() as redis:
        port = int(redis.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match="Address already in use"):
            await RedisServer(tmp_path, port).start()


def test_path_too_long_for_a_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        RedisServer(tmp_path / ("x" * 100))
