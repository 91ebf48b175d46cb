"""Real Redis server for tests, on a loopback port in a temporary directory, which can be killed and restarted."""

import contextlib
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from redis.asyncio import Redis

from kaveri.local.process import ChildProcess
from kaveri.local.redis_server import RedisServer


class TestRedis:
    """Redis server that tests can kill and restart."""

    __test__ = False  # pytest would collect it for its name.

    def __init__(self, server: RedisServer, process: ChildProcess) -> None:
        self._server = server
        self.process = process
        """The running server process."""
        self.url = server.url
        """The same after restarts."""

    async def kill(self) -> None:
        """Kill the server with SIGKILL; its state is lost."""
        await self.process.kill()

    async def restart(self) -> None:
        """Start a killed server again, empty, at the same URL."""
        assert self.process.exit_status is not None, "still running"
        self.process = await self._server.start()


@contextlib.asynccontextmanager
async def run_redis(binary: str | None = None, *, unix_socket: bool = False) -> AsyncIterator[TestRedis]:
    """Run a Redis server. binary: path; None: any found; raises ConfigError if there is none (tests must not skip)."""
    directory = Path(tempfile.mkdtemp(prefix="kaveri-redis-"))
    try:
        server = RedisServer(directory, None if unix_socket else free_port(), binary)
        redis = TestRedis(server, await server.start())
        try:
            yield redis
        finally:
            await redis.kill()
    finally:
        shutil.rmtree(directory)


async def allow(redis: TestRedis, rules: Sequence[str], user: str = "limited") -> str:
    """Create a Redis user with only these ACL rules. Returns the URL to connect as this user."""
    async with Redis.from_url(redis.url) as client:
        await client.execute_command("ACL", "SETUSER", user, "reset", "resetchannels", "on", ">word", *rules)
    return redis.url.replace("redis://", f"redis://{user}:word@")


def free_port(further: int = 0) -> int:
    """Return a free port of 127.0.0.1, below those that outgoing connections use.

    further: the port that lies so many above it is free too."""
    while True:
        port = random.randrange(20_000, 32_000 - further)
        with socket.socket() as probe, socket.socket() as second, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if further:
                second.bind(("127.0.0.1", port + further))
            return port
