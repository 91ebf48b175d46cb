"""The cluster monitor of TetriInfer (arXiv 2401.11181, section 3.2): one router broadcasts the loads of all instances.

Every router campaigns; the store fences routers that no longer lead. Without a leader prefill instances use the last
broadcast. kaveri/cluster/broadcasts.py decides what is broadcast and when, monitored_membership.py receives it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kaveri.cluster.broadcasts import Told, broadcast_statuses, has_new_loads, is_news, told_by
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ClusterView, LoadBroadcast, PhaseOrder
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import LEADER_LEASE_S
from services.router import metrics

_CAMPAIGN_INTERVAL_S = LEADER_LEASE_S / 3
"""Seconds between two campaigns (lease renewals or bids): a leader may miss two, and a dead one is replaced within 3 s.
Also between broadcasts while no instance reports a load."""
_MIN_PAUSE_S = 0.02


@dataclass(slots=True)
class _Lead:
    fencing_token: int
    until_s: float = 0.0
    """time.monotonic() at which its lease ends unless it is renewed."""
    sequence_number: int = 0
    order_count: int = 0


class Monitor:
    """Campaigns to be the router that broadcasts all instances' loads; broadcasts while it leads. Not thread-safe."""

    def __init__(self, store: ClusterStore, router_id: str, interval_s: float) -> None:
        """router_id: unique per process run. interval_s: seconds between two broadcasts of changed loads."""
        self._store = store
        self._router_id = router_id
        self._interval_s = interval_s
        self._lead: _Lead | None = None
        self._last = _Lead(0)
        """The newest lead. One that is lost and regained within its lease has the same token: its counts go on."""
        self._campaign_at_s = 0.0
        self._told = Told()
        self._told_at_s = 0.0
        self._has_new_loads = False
        """True from the first load reported since the last broadcast."""
        self._due = asyncio.Event()
        self._stopping = False
        self.on_lead: Callable[[], object] = lambda: None
        """Called when this router begins or ceases to lead."""

    @property
    def leading(self) -> bool:
        """True if this router leads the cluster monitor, as of its last contact with the store."""
        return self._lead is not None

    @property
    def fencing_token(self) -> int:
        """Token of this router's lead; 0: it does not lead."""
        return self._lead.fencing_token if self._lead is not None else 0

    def next_order(self) -> PhaseOrder | None:
        """Number an order to an instance; None unless this router leads, by its own clock."""
        if self._lead is None or self._stopping or time.monotonic() >= self._lead.until_s:
            return None
        self._lead.order_count += 1
        return PhaseOrder(self._lead.fencing_token, self._lead.order_count)

    async def run(self) -> None:
        """Campaign for the lead, and broadcast loads while leading, until stop(); then resign. If cancelled, the lease
        of the lead expires by itself."""
        try:
            while not self._stopping:
                self._due.clear()
                if time.monotonic() >= self._campaign_at_s:
                    await self._campaign()
                if self._lead is not None and self._is_due(self._lead, self._store.view()):
                    await self._broadcast(self._lead)
                await self._pause()
            await self._store.resign(self._router_id)
        finally:
            self._set_token(None, "stopping")

    def update(self, view: ClusterView) -> None:
        """Apply a cluster view. While leading, broadcast new members at once, and loads at the next interval."""
        if not self.leading:
            return
        new_loads = not self._has_new_loads and has_new_loads(self._told, view)
        self._has_new_loads |= new_loads
        if new_loads or is_news(self._told, view):
            self._due.set()

    def stop(self) -> None:
        """Make run() resign and return."""
        self._stopping = True
        self._due.set()

    def go_on(self) -> None:
        """Undo stop(): run() continues, or may be called again."""
        self._stopping = False

    async def _campaign(self) -> None:
        # Measured before the call: the lease may run before its answer arrives.
        begun_s = time.monotonic()
        self._campaign_at_s = begun_s + _CAMPAIGN_INTERVAL_S
        token = await self._store.campaign(self._router_id, LEADER_LEASE_S)
        self._set_token(token, "another leads, or the store is away")
        if self._lead is not None:
            self._lead.until_s = begun_s + LEADER_LEASE_S

    def _is_due(self, lead: _Lead, view: ClusterView) -> bool:
        return not lead.sequence_number or is_news(self._told, view) or self._rest_s() <= 0

    def _rest_s(self) -> float:
        pause_s = self._interval_s if self._has_new_loads else max(self._interval_s, _CAMPAIGN_INTERVAL_S)
        return self._told_at_s + pause_s - time.monotonic()

    async def _broadcast(self, lead: _Lead) -> None:
        lead.sequence_number += 1
        self._told_at_s = time.monotonic()
        view = self._store.view()
        statuses = broadcast_statuses(view)
        self._told = told_by(view, statuses)
        self._has_new_loads = False
        loads = LoadBroadcast(self._router_id, lead.fencing_token, lead.sequence_number, statuses)
        if await self._store.broadcast(loads):
            metrics.MONITOR_BROADCASTS.inc()
        else:
            self._set_token(None, "fenced, or the store is away")
            self._campaign_at_s = 0.0

    async def _pause(self) -> None:
        await asyncio.sleep(min(_MIN_PAUSE_S, self._interval_s))
        rest_s = self._campaign_at_s - time.monotonic()
        if self.leading:
            rest_s = min(rest_s, self._rest_s())
        try:
            async with asyncio.timeout(max(0.0, rest_s - _MIN_PAUSE_S)):
                await self._due.wait()
        except TimeoutError:
            pass

    def _set_token(self, fencing_token: int | None, reason: str) -> None:
        former_token = None if self._lead is None else self._lead.fencing_token
        if fencing_token == former_token:
            return
        if fencing_token is None:
            self._lead = None
            get_logger().info("monitor_lead_lost", fencing_token=former_token, reason=reason)
        else:
            if self._last.fencing_token != fencing_token:
                self._last = _Lead(fencing_token)
            self._lead = self._last
            metrics.MONITOR_TAKEOVERS.inc()
            get_logger().info("monitor_lead_taken", fencing_token=fencing_token, former_token=former_token)
        metrics.MONITOR_LEADING.set(fencing_token is not None)
        self.on_lead()
