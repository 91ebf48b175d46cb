"""The cluster monitor: of all routers one leads, and tells prefill instances how busy those are whom they choose among.

TetriInfer's (arXiv 2401.11181, section 3.2): loads come in from every instance and go out in one message for all.
Every router campaigns; the store fences whoever no longer leads. Between two leaders prefill instances go on with what
they heard last. How a leader's word is taken: kaveri/cluster/monitored_membership.py.
"""

import asyncio
import time

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import BROADCAST_ROLES, ClusterView, InstanceState, LoadBroadcast
from kaveri.telemetry.logs import get_logger
from services.router import metrics

LEADER_LEASE_S = 1.0
"""A dead leader leads for this long at most."""
_CAMPAIGN_INTERVAL_S = LEADER_LEASE_S / 10
"""Between two campaigns: most of the 2 s within which a dead leader is replaced are left to a busy machine."""
_MIN_PAUSE_S = 0.02
"""Between two broadcasts, however fast instances come and go and blocks come free."""
_TIGHT = 4
"""An instance is tight when less than one block in so many was free at the last broadcast."""


class Monitor:
    """One router's part in it. For one event loop."""

    def __init__(self, store: ClusterStore, router_id: str, interval_s: float) -> None:
        """router_id: of one life of the router. interval_s: between two broadcasts when nobody comes or goes."""
        self._store = store
        self._router_id = router_id
        self._interval_s = interval_s
        self._fencing_token: int | None = None
        self._sequence_number = 0
        self._campaign_at_s = 0.0
        self._members: set[tuple[str, int, InstanceState]] = set()
        # Free blocks as last told, of the instances that were tight then.
        self._told_tight: dict[str, int] = {}
        self._due = asyncio.Event()
        self._stopping = False

    @property
    def leading(self) -> bool:
        """Whether this router leads, as far as it knows."""
        return self._fencing_token is not None

    async def run(self) -> None:
        """Campaigns, and broadcasts while leading, until stop(); then leaves the lead to others and returns.

        Cancelled, it leaves the lead's lease to run out.
        """
        try:
            while not self._stopping:
                self._due.clear()
                if time.monotonic() >= self._campaign_at_s:
                    await self._campaign()
                if self._fencing_token is not None:
                    await self._broadcast(self._fencing_token)
                await self._pause()
            await self._store.resign(self._router_id)
        finally:
            self._set_token(None, "stopping")

    def update(self, view: ClusterView) -> None:
        """Takes in a view; while leading, broadcasts at once when somebody came, began to drain or left, and when
        blocks came free on an instance that was tight: requests may wait for just those."""
        members = {
            (status.record.instance_id, status.record.incarnation, status.load.state)
            for status in view.instances.values()
            if status.record.role in BROADCAST_ROLES
        }
        eased = any(
            instance_id in view.instances and view.instances[instance_id].load.free_blocks > told
            for instance_id, told in self._told_tight.items()
        )
        if self.leading and (eased or members != self._members):
            self._due.set()
        self._members = members

    def stop(self) -> None:
        """Asks run() to resign and return."""
        self._stopping = True
        self._due.set()

    async def _campaign(self) -> None:
        # From before the call: the lease runs from when the store takes it, not from when its answer is here.
        self._campaign_at_s = time.monotonic() + _CAMPAIGN_INTERVAL_S
        token = await self._store.campaign(self._router_id, LEADER_LEASE_S)
        self._set_token(token, "another leads, or the store is away")

    async def _broadcast(self, fencing_token: int) -> None:
        self._sequence_number += 1
        instances = self._store.view().instances.values()
        named = tuple(status for status in instances if status.record.role in BROADCAST_ROLES)
        self._told_tight = {
            status.record.instance_id: status.load.free_blocks
            for status in named
            if status.load.free_blocks * _TIGHT < status.load.total_blocks
        }
        if await self._store.broadcast(LoadBroadcast(self._router_id, fencing_token, self._sequence_number, named)):
            metrics.MONITOR_BROADCASTS.inc()
        else:
            self._set_token(None, "fenced, or the store is away")
            self._campaign_at_s = 0.0

    async def _pause(self) -> None:
        await asyncio.sleep(min(_MIN_PAUSE_S, self._interval_s))
        rest_s = self._interval_s if self.leading else self._campaign_at_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, rest_s - _MIN_PAUSE_S)):
                await self._due.wait()
        except TimeoutError:
            pass

    def _set_token(self, fencing_token: int | None, reason: str) -> None:
        if fencing_token == self._fencing_token:
            return
        if fencing_token is None:
            get_logger().info("monitor_lead_lost", fencing_token=self._fencing_token, reason=reason)
        else:
            self._sequence_number = 0
            metrics.MONITOR_TAKEOVERS.inc()
            get_logger().info("monitor_lead_taken", fencing_token=fencing_token, former_token=self._fencing_token)
        self._fencing_token = fencing_token
        metrics.MONITOR_LEADING.set(fencing_token is not None)
