"""A real Redis server for tests: on a loopback port, in a temporary directory, to be killed and started again."""

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
    """A Redis server that tests may kill."""

    __test__ = False  # pytest would collect it for its name.

    def __init__(self, server: RedisServer, process: ChildProcess) -> None:
        """Use run_redis()."""
        self._server = server
        self.process = process
        """The server's process now."""
        self.url = server.url
        """Stays the same over restarts."""

    async def kill(self) -> None:
        """SIGKILL: all state is lost."""
        await self.process.kill()

    async def restart(self) -> None:
        """Starts it again under the same URL, empty. It must have been killed."""
        assert self.process.exit_status is not None, "still running"
        self.process = await self._server.start()


@contextlib.asynccontextmanager
async def run_redis(binary: str | None = None, *, unix_socket: bool = False) -> AsyncIterator[TestRedis]:
    """Runs a server while the context lasts. binary: None finds one; when there is none, ConfigError says what to
    install: without Redis a test fails, it is not skipped."""
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
    """Make a user who has these permissions and no others. Returns the URL."""
    async with Redis.from_url(redis.url) as client:
        await client.execute_command("ACL", "SETUSER", user, "reset", "resetchannels", "on", ">word", *rules)
    return redis.url.replace("redis://", f"redis://{user}:word@")


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, below those that outgoing connections get."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
