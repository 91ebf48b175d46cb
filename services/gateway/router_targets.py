"""Selects the routers for a gateway: configured ones, or those in the cluster's view."""

import asyncio
import time

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ClusterView, InstanceState, Role
from kaveri.telemetry.logs import get_logger

_SAY_EVERY_S = 5.0
_LOOK_S = 0.25


def router_targets(view: ClusterView) -> tuple[str, ...]:
    """Addresses of the routers that accept requests, ordered by id; of all if all drain."""
    routers = [
        view.instances[name] for name in sorted(view.instances) if view.instances[name].record.role is Role.ROUTER
    ]
    ready = [router for router in routers if router.load.state is InstanceState.READY]
    return tuple(dict.fromkeys(router.record.address for router in ready or routers))


async def wait_for_routers(store: ClusterStore, stopping: asyncio.Event) -> tuple[str, ...]:
    """Wait for at least one target; returns none if `stopping` was set first."""
    say_s = time.monotonic() + _SAY_EVERY_S
    while not stopping.is_set():
        targets = router_targets(await store.wait_for_change(_LOOK_S))
        if targets:
            return targets
        if time.monotonic() >= say_s:
            say_s += _SAY_EVERY_S
            get_logger().warning("router_awaited")
    return ()
