"""Instances of the cluster as known to one process, and their leases on a local clock. That clock advances only while
the store (Redis) is reachable and this process runs, because otherwise heartbeats wait unread. Wall clocks of machines
are never compared. Time comes from the caller's clock. Not thread-safe."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from kaveri.domain.running_clock import RunningClock
from kaveri.domain.view import WIRE, ClusterView, InstanceLoad, InstanceRecord, Role, ViewedInstance

MAX_TICK_S = 0.5
"""Max seconds by which one tick advances the leases' clock; a later tick means that this process did not run."""


@dataclass(eq=False, slots=True)
class Member:
    """Instance with a valid lease (one incarnation), as views show it. Mutated only by its Membership."""

    record: InstanceRecord
    clock: Callable[[], float]
    load: InstanceLoad
    sequence_number: int
    heard_at_s: float
    """Time of the last heartbeat, on the caller's clock."""
    lease_end_s: float
    """End of the lease, on the leases' clock."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat."""
        return self.clock() - self.heard_at_s


class Membership:
    """Instances with a valid lease, as the store's heartbeats report them to this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases = RunningClock(clock(), MAX_TICK_S)
        self._members: dict[str, Member] = {}
        self._connected = True
        self._view = ClusterView()
        self._is_view_current = True
        self.changed = asyncio.Event()
        """Set when an instance or a load may have changed; cleared by wait_for_change()."""

    def record_of(self, instance_id: str, incarnation: int) -> InstanceRecord | None:
        """Return the immutable record of a member; None if this incarnation of the instance is no member."""
        member = self._members.get(instance_id)
        return member.record if member is not None and member.record.incarnation == incarnation else None

    def learn(
        self,
        record: InstanceRecord,
        load: InstanceLoad,
        remaining_s: float | None = None,
        heartbeat_age_s: float | None = None,
    ) -> None:
        """Process a heartbeat of an instance. remaining_s: seconds left of its lease; None: all. heartbeat_age_s: age
        of the heartbeat in seconds; None: the elapsed part of the lease."""
        remaining_s = record.lease_ttl_s if remaining_s is None else min(remaining_s, record.lease_ttl_s)
        if heartbeat_age_s is None:
            heartbeat_age_s = record.lease_ttl_s - remaining_s
        heard_at_s, lease_end_s = self._clock() - heartbeat_age_s, self._leases.elapsed_s + remaining_s
        member = self._members.get(record.instance_id)
        if member is None or member.record.incarnation != record.incarnation:
            self._members[record.instance_id] = Member(
                record, self._clock, load, load.sequence_number, heard_at_s, lease_end_s
            )
            self._is_view_current = False
        elif load.sequence_number < member.sequence_number:
            return
        else:
            member.heard_at_s, member.lease_end_s = heard_at_s, lease_end_s
            shown = self._shown(load, member)
            if shown == member.load and record.role is not Role.ROUTER:
                return  # Only a renewal. A router's counts as a change: other routers wait for it.
            if _fixed(load) != _fixed(member.load):
                self._is_view_current = False
            member.load = shown
            member.sequence_number = load.sequence_number
        self.changed.set()

    def forget(self, instance_id: str, incarnation: int) -> None:
        """Remove an instance if this incarnation of it is a member; a newer incarnation stays."""
        if self.record_of(instance_id, incarnation) is not None:
            self._remove([instance_id])

    def tick(self) -> None:
        """Advance the leases' clock, which runs while the store is reachable, and remove expired members."""
        if not self._connected:
            return
        self._leases.tick(self._clock())
        self._end_leases()

    def store_lost(self) -> None:
        """Stop the leases' clock: no lease expires while the store is unreachable or refuses heartbeats."""
        if self._connected:
            self._set_connected(False)

    def store_returned(self) -> None:
        """Restart the leases' clock; each member has one lease time to renew, as the store may have lost its state."""
        if self._connected:
            return
        self._leases.skip(self._clock())
        for member in self._members.values():
            member.lease_end_s = self._leases.elapsed_s + member.record.lease_ttl_s
        self._set_connected(True)

    def view(self) -> ClusterView:
        """Return the current members. The same object as long as no instance joins, leaves, drains, or changes its
        phases or pool size, and the store is neither lost nor returns; loads inside it follow the heartbeats."""
        if not self._is_view_current:
            instances: dict[str, ViewedInstance] = {}
            incompatible: dict[str, ViewedInstance] = {}
            for instance_id, member in self._members.items():
                (instances if member.record.wire == WIRE else incompatible)[instance_id] = member
            self._view = ClusterView(instances, self._connected, incompatible)
            self._is_view_current = True
        return self._view

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        """Wait up to `timeout_s` seconds for a change since the last call; return the view. One waiter at a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        self.changed.clear()
        return self.view()

    def _set_connected(self, connected: bool) -> None:
        self._view = replace(self.view(), store_connected=connected)
        self._connected = connected
        self.changed.set()

    def _end_leases(self) -> None:
        ended = [name for name, member in self._members.items() if member.lease_end_s <= self._leases.elapsed_s]
        if ended:
            self._remove(ended)

    def _remove(self, instance_ids: list[str]) -> None:
        for instance_id in instance_ids:
            del self._members[instance_id]
        self._is_view_current = False
        self.changed.set()

    def _shown(self, load: InstanceLoad, former: Member) -> InstanceLoad:
        """Return the load to show in views for a new heartbeat. former: the member before it."""
        return load


def _fixed(load: InstanceLoad) -> tuple[object, ...]:
    """Return the part of a load that is constant within one view: state, pool sizes, phases and partner."""
    phases = load.phases, load.ending_phases, load.phase_order, load.partner_id
    return load.state, load.total_blocks, load.replica_total_bytes, *phases
