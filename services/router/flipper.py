"""Changes the phases of instances while this router leads: kaveri/policy/flipping.py decides, this sends the orders."""

import asyncio
import time

from kaveri.cluster.store import ClusterStore
from kaveri.errors import KaveriError
from kaveri.hosting.orders import InstanceOrders
from kaveri.policy.flipping import FlipOrder, FlipPolicy, FlipRules, FlipState, observe
from kaveri.telemetry.logs import get_logger
from services.router import metrics
from services.router.monitor import Monitor


class Flipper:
    """Observes the cluster at each interval while this router leads, and orders changes of phase. Not thread-safe."""

    def __init__(
        self,
        rules: FlipRules,
        is_dry_run: bool,
        model: str,
        store: ClusterStore,
        orders: InstanceOrders,
        monitor: Monitor,
    ) -> None:
        """is_dry_run: log the decisions only."""
        self._rules = rules
        self._is_dry_run = is_dry_run
        self._model = model
        self._store = store
        self._orders = orders
        self._monitor = monitor
        self._state = FlipState()

    async def run(self, interval_s: float) -> None:
        """Observe every `interval_s` seconds until cancelled. Returns at once without a policy."""
        while self._rules.policy is not FlipPolicy.NONE:
            await asyncio.sleep(interval_s)
            if not self._monitor.leading:
                self._state = FlipState()
                continue
            decided, self._state = observe(
                self._store.view(), self._model, self._rules, self._orders.under_way, time.monotonic(), self._state
            )
            for order in decided:
                await self._give(order)

    async def _give(self, order: FlipOrder) -> None:
        shown = {"instance_id": order.instance_id, "phases": sorted(order.phases), "figures": order.reason}
        get_logger().info("flip_decided", **shown, dry_run=self._is_dry_run)
        metrics.FLIPS_DECIDED.labels("+".join(sorted(order.phases))).inc()
        instance = self._store.view().instances.get(order.instance_id)
        if self._is_dry_run or instance is None or instance.record.incarnation != order.incarnation:
            return
        try:
            answer = await self._orders.set_phases(instance.record, order.phases)
        except KaveriError as error:
            # The next decision is made from what the instance then shows.
            metrics.FLIPS_FAILED.inc()
            get_logger().warning("flip_failed", instance_id=order.instance_id, error=str(error))
            return
        if answer is None or not answer.accepted:
            reason = "this router no longer leads" if answer is None else "a newer order is known"
            metrics.FLIPS_FAILED.inc()
            get_logger().warning("flip_failed", instance_id=order.instance_id, error=reason)
