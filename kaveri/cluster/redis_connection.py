"""Opens the connections to Redis, with their limits."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from kaveri.cluster.redis_url import shown
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

_CONNECT_TIMEOUT_S = 0.7
ANSWER_TIMEOUT_S = 0.9
"""Of each answer: what takes several may take longer, so that a distant Redis is slow and not lost."""
FIRST_ANSWER_TIMEOUT_S = 3.0
_REPORT_EVERY_S = 5.0
_MAX_CONNECTIONS = 16
_PAUSE_S = 0.25


async def connect(url: str, probe_key: str, wait_s: float = FIRST_ANSWER_TIMEOUT_S) -> Redis:
    """A client that has been answered once. Raises ConfigError when Redis does not answer within `wait_s` seconds, and
    within FIRST_ANSWER_TIMEOUT_S when it answers and refuses. Writes a line to the log every 5 s meanwhile.

    probe_key: written to, for a moment: a process that cannot write must not start.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise bad_url(url, error) from None
    client = Redis(connection_pool=pool)
    started_at_s = time.monotonic()
    report_at_s = started_at_s
    while True:
        try:
            await cast(Awaitable[Any], client.set(probe_key, "", px=1000))
            return client
        except (RedisError, OSError) as error:
            waited_s = time.monotonic() - started_at_s
            refuses = isinstance(error, ResponseError | AuthenticationError)
            hopeless = isinstance(error, AuthenticationError | NoPermissionError)
            if hopeless or waited_s > (min(wait_s, FIRST_ANSWER_TIMEOUT_S) if refuses else wait_s):
                await client.aclose(close_connection_pool=True)
                reason = f"no Redis answers at {shown(url)} after {waited_s:.0f} s: {why(error)}"
                if refuses:
                    reason = f"Redis refuses to serve at {shown(url)}: {why(error)}"
                raise ConfigError("--redis-url", reason) from error
            if time.monotonic() >= report_at_s:
                report_at_s += _REPORT_EVERY_S
                get_logger().warning(
                    "redis_awaited", url=shown(url), error=why(error), waited_s=round(waited_s, 1), wait_s=wait_s
                )
        except BaseException:
            await client.aclose(close_connection_pool=True)
            raise
        await asyncio.sleep(_PAUSE_S)


def bad_url(url: str, error: ValueError) -> ConfigError:
    """The error for a URL that cannot be read."""
    # The reason may quote a part of a password that is not percent-encoded.
    hint = "its database must be a number, and special characters of its password percent-encoded"
    return ConfigError("--redis-url", f"{shown(url)!r} is no Redis URL: {hint if '@' in url else error}")


def why(error: BaseException) -> str:
    """What an error says; its type when it says nothing."""
    return str(error) or type(error).__name__
