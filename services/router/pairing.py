"""Pairs instances while this router leads: kaveri/policy/pairs.py decides, this sends the orders."""

import asyncio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ViewedInstance
from kaveri.errors import KaveriError
from kaveri.hosting.orders import InstanceOrders
from kaveri.policy.pairs import PartnerOrder, partner_orders
from kaveri.telemetry.logs import get_logger
from services.router import metrics
from services.router.monitor import Monitor


class Pairing:
    """Gives instances that are to be in pairs a partner each, while this router leads. Not thread-safe."""

    def __init__(self, store: ClusterStore, orders: InstanceOrders, monitor: Monitor) -> None:
        self._store = store
        self._orders = orders
        self._monitor = monitor

    async def run(self, interval_s: float) -> None:
        """Look at the cluster every `interval_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            if not self._monitor.leading:
                # Another router's orders may follow.
                self._orders.partners.clear()
                continue
            view = self._store.view()
            for ordered in partner_orders(view, self._orders.partners):
                await self._give(view.instances[ordered.instance_id], ordered)

    async def _give(self, instance: ViewedInstance, ordered: PartnerOrder) -> None:
        reason = "this router no longer leads, or a newer order is known"
        try:
            accepted = await self._orders.set_partner(instance.record, ordered)
        except KaveriError as error:
            # The next decision is made from what the instance then shows.
            accepted, reason = False, str(error)
        if not accepted:
            metrics.FLIPS_FAILED.inc()
            get_logger().warning("partner_order_failed", instance_id=ordered.instance_id, error=reason)
