"""Connects to Redis, with timeouts and checks."""

import asyncio
import time
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from kaveri.cluster.redis_batches import closed_as_lost
from kaveri.cluster.redis_permissions import CLUSTER_MODE, NotPermitted, RedisNeeds, check_permissions
from kaveri.config.redis_url import client_url, shown
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

_CONNECT_TIMEOUT_S = 0.7
ANSWER_TIMEOUT_S = 0.9
"""Timeout of each answer, not of a whole batch: a distant Redis is slow but not lost."""
FIRST_ANSWER_TIMEOUT_S = 3.0
_REPORT_EVERY_S = 5.0
_MAX_CONNECTIONS = 16
_PAUSE_S = 0.25


async def connect(url: str, needs: RedisNeeds, wait_s: float = FIRST_ANSWER_TIMEOUT_S) -> Redis:
    """Connect, and check that the user has the permissions `needs`. Raises ConfigError when Redis does not answer
    within `wait_s` seconds, refuses temporarily for longer than FIRST_ANSWER_TIMEOUT_S, lacks a permission, or is in
    cluster mode. Logs a line every 5 s while waiting."""
    try:
        pool = BlockingConnectionPool.from_url(
            client_url(url),
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
            with closed_as_lost():
                await _check_kind(client, url)
                await check_permissions(pool, needs)
            return client
        except (RedisError, OSError, NotPermitted) as error:
            waited_s = time.monotonic() - started_at_s
            refuses = isinstance(error, ResponseError | AuthenticationError | NotPermitted)
            hopeless = isinstance(error, AuthenticationError | NoPermissionError | NotPermitted)
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


async def _check_kind(client: Redis, url: str) -> None:
    """Raise NotPermitted for a Redis in cluster mode; warn of one that evicts keys. No-op if INFO is forbidden."""
    try:
        facts: dict[str, Any] = await client.info()
    except NoPermissionError:
        return
    except ResponseError as error:
        # For SELECT, needed for any database but 0.
        raise NotPermitted(CLUSTER_MODE) if "cluster mode" in str(error) else error from error
    if facts.get("cluster_enabled"):
        raise NotPermitted(CLUSTER_MODE)
    policy = facts.get("maxmemory_policy", "noeviction")
    if facts.get("maxmemory") and policy != "noeviction":
        get_logger().warning(
            "redis_evicts_keys",
            url=shown(url),
            policy=policy,
            advice="set maxmemory-policy noeviction: claims of request ids and registrations may be lost",
        )


def bad_url(url: str, error: ValueError) -> ConfigError:
    # The reason may quote part of a password that is not percent-encoded.
    hint = "its database must be a number, and special characters of its password percent-encoded"
    return ConfigError("--redis-url", f"{shown(url)!r} is no Redis URL: {hint if '@' in url else error}")


def why(error: BaseException) -> str:
    return str(error) or type(error).__name__
