"""What one process knows of the cluster: the instances it has heard of, and their leases on a clock of its own.

That clock counts only time in which the store was heard: it stands still while the store is away, and while this
process does not run (a stalled event loop, a stopped process), because heartbeats then wait unread. Wall clocks of
different machines are never compared.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus

MAX_TICK_S = 0.25
"""Most seconds that one tick adds to the leases' clock: stores tick more often than this when all is well."""


@dataclass(slots=True)
class Member:
    """One instance that is known."""

    record: InstanceRecord
    load: InstanceLoad
    """As the view shows it."""
    sequence_number: int
    """Of its last heartbeat."""
    heard_at_s: float
    """On the process's clock."""
    lease_end_s: float
    """On the leases' clock."""


class Membership:
    """The members whose leases hold. For one event loop; its store feeds it."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: None for time.monotonic."""
        self._clock = time.monotonic if clock is None else clock
        self._ticked_at_s = self._clock()
        self._leases_s = 0.0
        self._members: dict[str, Member] = {}
        self._connected = True
        self._changed = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the store can be reached and takes heartbeats, as far as known."""
        return self._connected

    def record_of(self, instance_id: str, incarnation: int) -> InstanceRecord | None:
        """The record of that life, when it is a member: records do not change, so they are read once."""
        member = self._members.get(instance_id)
        return member.record if member is not None and member.record.incarnation == incarnation else None

    def learn(
        self,
        record: InstanceRecord,
        load: InstanceLoad,
        remaining_s: float | None = None,
        heartbeat_age_s: float | None = None,
    ) -> None:
        """Takes in a heartbeat. remaining_s: what is left of its lease; None: all of it.

        heartbeat_age_s: seconds since it was made; None: what its lease has lost.
        """
        member = self._members.get(record.instance_id)
        if member is not None and member.record.incarnation == record.incarnation:
            if load.sequence_number < member.sequence_number:
                return
            shown = self._shown(load, member)
        else:
            shown = load
        remaining_s = record.lease_ttl_s if remaining_s is None else min(remaining_s, record.lease_ttl_s)
        if heartbeat_age_s is None:
            heartbeat_age_s = record.lease_ttl_s - remaining_s
        self._members[record.instance_id] = Member(
            record, shown, load.sequence_number, self._clock() - heartbeat_age_s, self._leases_s + remaining_s
        )
        self._changed.set()

    def forget(self, instance_id: str, incarnation: int) -> None:
        """Takes in that this life has ended. Another life of the instance stays."""
        if self.record_of(instance_id, incarnation) is not None:
            del self._members[instance_id]
            self._changed.set()

    def tick(self) -> None:
        """Takes in that the store was just heard: time passes, and leases end, unless the store is lost."""
        if not self._connected:
            return
        self._pass_time()
        self._end_leases()

    def store_lost(self) -> None:
        """The store is away, or refuses heartbeats: time stands still."""
        if self._connected:
            self._connected = False
            self._changed.set()

    def store_returned(self) -> None:
        """The store is back, perhaps without its state: every member has one lease time to show up."""
        if self._connected:
            return
        self._connected = True
        self._ticked_at_s = self._clock()
        for member in self._members.values():
            member.lease_end_s = self._leases_s + member.record.lease_ttl_s
        self._changed.set()

    def view(self) -> ClusterView:
        """The members now."""
        now_s = self._clock()
        instances = {
            name: InstanceStatus(member.record, member.load, now_s - member.heard_at_s)
            for name, member in self._members.items()
        }
        return ClusterView(instances, self._connected)

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        """See ClusterStore.wait_for_change."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        return self.view()

    def _pass_time(self) -> None:
        now_s = self._clock()
        self._leases_s += min(now_s - self._ticked_at_s, MAX_TICK_S)
        self._ticked_at_s = now_s

    def _end_leases(self) -> None:
        ended = [name for name, member in self._members.items() if member.lease_end_s <= self._leases_s]
        for instance_id in ended:
            del self._members[instance_id]
        if ended:
            self._changed.set()

    def _shown(self, load: InstanceLoad, former: Member) -> InstanceLoad:
        """What the view shows of a heartbeat that is not older than the former one of the same life."""
        return load
