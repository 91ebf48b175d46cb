"""Instances of the cluster according to the cluster monitor's broadcasts. From TetriInfer's cluster monitor (arXiv
2401.11181, section 3.2). A broadcast renews the leases of the instances in it and removes others. Leases run only while
a leader broadcasts. A new leader may know fewer instances than its predecessor (it started when the store had lost its
state), so instances that only the predecessor broadcast stay for one lease."""

from collections.abc import Callable
from dataclasses import replace

from kaveri.cluster.membership import Member, Membership
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceStatus, LoadBroadcast, is_broadcast
from kaveri.timeouts import BROADCAST_LOST_AFTER_S


class MonitoredMembership(Membership):
    """Membership according to the cluster monitor's broadcasts; according to heartbeats while is_silent()."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._broadcast_at_s = -float("inf")
        self._newest = (0, 0)
        self._named: dict[str, int] = {}

    @property
    def fencing_token(self) -> int:
        return self._newest[0]

    def is_silent(self) -> bool:
        """Return True if no broadcast arrived for BROADCAST_LOST_AFTER_S seconds; heartbeats are followed then."""
        return self._clock() - self._broadcast_at_s > BROADCAST_LOST_AFTER_S

    def take_in(self, broadcast: LoadBroadcast) -> bool:
        """Process the monitor's broadcast. Returns False if stale: of a deposed leader, or older than the last one."""
        number = broadcast.fencing_token, broadcast.sequence_number
        if number <= self._newest:
            return False
        same_leader = broadcast.fencing_token == self.fencing_token
        self._newest = number
        self._broadcast_at_s = self._clock()
        ended = self._named if same_leader else {}
        self._named = {status.record.instance_id: status.record.incarnation for status in broadcast.instances}
        # Leases end after the renewals: the time since the last broadcast does not count against the instances named
        # here.
        self._leases.tick(self._clock())
        for status in broadcast.instances:
            self.learn(status.record, status.load, heartbeat_age_s=status.heartbeat_age_s)
        for instance_id, incarnation in ended.items():
            if instance_id not in self._named:
                self.forget(instance_id, incarnation)
        self._end_leases()
        return True

    def learn(
        self,
        record: InstanceRecord,
        load: InstanceLoad,
        remaining_s: float | None = None,
        heartbeat_age_s: float | None = None,
    ) -> None:
        """Process a heartbeat as Membership.learn(); ignore or remove instances whose loads are not broadcast."""
        if is_broadcast(InstanceStatus(record, load)):
            super().learn(record, load, remaining_s, heartbeat_age_s)
        else:
            self.forget(record.instance_id, record.incarnation)

    def store_lost(self) -> None:
        """Stop the leases' clock while the store is unreachable. is_silent() is True until the next broadcast."""
        self._broadcast_at_s = -float("inf")
        super().store_lost()

    def _shown(self, load: InstanceLoad, former: Member) -> InstanceLoad:
        # Count broadcasts instead of heartbeats, of which there are many between two broadcasts. A caller that waits
        # for the second one after a send (kaveri.policy.unconfirmed.UnconfirmedWork) would otherwise accept the first
        # broadcast, whose content may predate the send.
        heard = former.load.sequence_number + (load.sequence_number > former.sequence_number)
        return replace(load, sequence_number=heard)
