"""Rate limits of API keys per second and per minute, by the library `limits`: in this process, or in Redis for the
whole cluster. Fixed windows: one begins with the first use after the end of the last."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from limits import RateLimitItem, RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.exceptions import RedisError

from kaveri.config.redis_url import client_url
from kaveri.errors import NoCapacity
from kaveri.security.api_keys import ApiKey, limit_reached, usage_prefix
from kaveri.telemetry.logs import get_logger

_REDIS_TIMEOUT_S = 0.5
_REDIS_CONNECTIONS = 16
_REDIS_REST_S = 5.0
"""Pause after a failure of Redis."""
_MIN_RETRY_S = 0.05
ResultT = TypeVar("ResultT")


class KeyUsage:
    """Counts requests and tokens per API key. Not thread-safe. Without a reachable Redis each process counts alone."""

    def __init__(self, redis_url: str = "", cluster_name: str = "") -> None:
        """redis_url: empty: count in this process only."""
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._shared: FixedWindowRateLimiter | None = None
        self._pool: BlockingConnectionPool | None = None
        self._rests_until_s = 0.0
        self._failure = ""
        if redis_url:
            self._pool = BlockingConnectionPool.from_url(
                client_url(redis_url),
                max_connections=_REDIS_CONNECTIONS,
                timeout=_REDIS_TIMEOUT_S,
                socket_connect_timeout=_REDIS_TIMEOUT_S,
                socket_timeout=_REDIS_TIMEOUT_S,
                protocol=2,
            )
            # The pool has the address; only the scheme of the first argument is read.
            storage = RedisStorage(
                "async+redis://",
                implementation="redispy",
                key_prefix=usage_prefix(cluster_name),
                connection_pool=self._pool,  # type: ignore[arg-type]
            )
            self._shared = FixedWindowRateLimiter(storage)

    async def take_request(self, key: ApiKey) -> None:
        """Count a request. Raises NoCapacity when the key has no requests or tokens left in its current window."""
        limits = key.limits
        if limits.requests_per_s:
            per_s = RateLimitItemPerSecond(limits.requests_per_s)
            if not await self._ask(lambda limiter: limiter.hit(per_s, key.name)):
                raise await self._refusal(key, per_s, f"{limits.requests_per_s} requests a second")
        if limits.tokens_per_min:
            per_min = RateLimitItemPerMinute(limits.tokens_per_min)
            if not await self._ask(lambda limiter: limiter.test(per_min, key.name)):
                raise await self._refusal(key, per_min, f"{limits.tokens_per_min} tokens a minute")

    async def add_tokens(self, key: ApiKey, tokens: int) -> None:
        """Count the tokens of a finished request. They may exceed the limit: later requests are then refused."""
        if key.limits.tokens_per_min and tokens:
            per_min = RateLimitItemPerMinute(key.limits.tokens_per_min)
            await self._ask(lambda limiter: limiter.hit(per_min, key.name, cost=tokens))

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.disconnect()

    async def _refusal(self, key: ApiKey, item: RateLimitItem, limit: str) -> NoCapacity:
        window = await self._ask(lambda limiter: limiter.get_window_stats(item, key.name))
        retry_after_s = max(_MIN_RETRY_S, window.reset_time - time.time())
        return limit_reached(key, limit, min(retry_after_s, item.get_expiry()))

    async def _ask(self, ask: Callable[[FixedWindowRateLimiter], Awaitable[ResultT]]) -> ResultT:
        if self._shared is not None and time.monotonic() >= self._rests_until_s:
            try:
                async with asyncio.timeout(_REDIS_TIMEOUT_S):
                    answer = await ask(self._shared)
            except (TimeoutError, RedisError, OSError) as error:
                self._rests_until_s = time.monotonic() + _REDIS_REST_S
                self._take_in(str(error) or type(error).__name__)
            else:
                self._take_in("")
                return answer
        return await ask(self._own)

    def _take_in(self, failure: str) -> None:
        if failure and failure != self._failure:
            get_logger().warning(
                "key_usage_not_shared",
                error=failure,
                effect=f"limits of API keys hold for this process alone; Redis is asked every {_REDIS_REST_S:g} s",
            )
        elif self._failure and not failure:
            get_logger().info("key_usage_shared")
        self._failure = failure
