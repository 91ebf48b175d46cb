"""Connects a starting service to the cluster store in Redis, and waits while Redis does not answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kaveri.cluster.redis_permissions import RedisNeeds
from kaveri.cluster.redis_store import RedisStore
from kaveri.cluster.store import ViewSource
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import RpcServer
from kaveri.security.api_keys import USAGE_COMMANDS, usage_prefix
from kaveri.security.settings import KeySettings

_STAND_BY_AFTER_S = 1.0
"""Seconds without an answer after which the service's port reports NOT_SERVING."""


@contextlib.asynccontextmanager
async def open_store(
    config: ServiceConfig, stopping: asyncio.Event, follow: ViewSource = ViewSource.HEARTBEATS
) -> AsyncIterator[RedisStore | None]:
    """Open the cluster store for the context; yields None if `stopping` is set before Redis answers. follow: source of
    the store's view of the cluster. Raises ConfigError if Redis does not answer within `redis_wait_s` seconds."""
    async with contextlib.AsyncExitStack() as stack:
        store = RedisStore(
            config.redis_url, config.cluster_name, follow, wait_s=config.redis_wait_s, also_needs=_needs_of_keys(config)
        )
        opening = asyncio.ensure_future(stack.enter_async_context(store))
        stopped = asyncio.ensure_future(stopping.wait())
        either = (opening, stopped)
        try:
            await asyncio.wait(either, timeout=_STAND_BY_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and not stopped.done():
                async with _not_serving(config):
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            found = opening.result() if opening.done() else None
        finally:
            stopped.cancel()
            opening.cancel()
            await asyncio.gather(opening, stopped, return_exceptions=True)
        yield found


def _needs_of_keys(config: ServiceConfig) -> RedisNeeds:
    """Redis permissions, beyond the store's, of a service with API keys."""
    if not isinstance(config, KeySettings) or not config.keys_file:
        return RedisNeeds(frozenset(), ())
    return RedisNeeds(frozenset(USAGE_COMMANDS), (f"{usage_prefix(config.cluster_name)}:*",))


@contextlib.asynccontextmanager
async def _not_serving(config: ServiceConfig) -> AsyncIterator[None]:
    """Report NOT_SERVING on the service's port during the context; not with port 0, which no client knows yet."""
    if config.port == 0:
        yield
        return
    server = RpcServer(config.host, config.port, [])
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
