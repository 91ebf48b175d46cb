"""Pairs instances while this router leads: kaveri/policy/pairs.py decides, this sends the orders."""

import asyncio
import time

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ViewedInstance
from kaveri.errors import KaveriError
from kaveri.hosting.orders import InstanceOrders
from kaveri.policy.pairs import PartnerOrder, partner_orders
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from services.router import metrics
from services.router.monitor import Monitor


class Pairing:
    """Gives instances that are to be in pairs a partner each, while this router leads. Not thread-safe."""

    def __init__(self, store: ClusterStore, orders: InstanceOrders, monitor: Monitor) -> None:
        self._store = store
        self._orders = orders
        self._monitor = monitor
        self._fencing_token = 0
        self._retry_at_s: dict[str, float] = {}

    async def run(self, interval_s: float) -> None:
        """Pair instances every `interval_s` seconds while this router leads, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            token = self._monitor.fencing_token
            if token != self._fencing_token:
                # Another router may have led in between and sent newer orders; the loads show the present partners.
                self._fencing_token = token
                self._orders.partners.clear()
            if token:
                view, now_s = self._store.view(), time.monotonic()
                self._retry_at_s = {name: at_s for name, at_s in self._retry_at_s.items() if at_s > now_s}
                decided = partner_orders(view, self._orders.partners)
                due = [one for one in decided if one.instance_id not in self._retry_at_s]
                # Concurrently: an instance that does not answer delays only the next decision.
                await asyncio.gather(*(self._give(view.instances[one.instance_id], one) for one in due))

    async def _give(self, instance: ViewedInstance, ordered: PartnerOrder) -> None:
        try:
            if await self._orders.set_partner(instance.record, ordered) is not False:
                return
            reason = "a newer order is known"
        except KaveriError as error:
            reason = str(error)
        self._retry_at_s[ordered.instance_id] = time.monotonic() + CALL_TIMEOUT_S
        metrics.FLIPS_FAILED.inc()
        get_logger().warning("partner_order_failed", instance_id=ordered.instance_id, error=reason)
