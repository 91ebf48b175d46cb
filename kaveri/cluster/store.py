"""The ClusterStore contract: leases, heartbeats, the view, who leads the cluster monitor, claims of request ids.

State in a store is soft. When the store dies, requests in flight go on, the last view stays in use, and everything
registers again when it returns. Implementations: redis_store (real), memory_store (one process, for tests).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, LoadBroadcast


class ViewSource(enum.Enum):
    """What a store's view is made from; said when it is opened."""

    HEARTBEATS = enum.auto()
    """From every heartbeat of every instance."""
    BROADCASTS = enum.auto()
    """From the cluster monitor's broadcasts: one message for predictors and the instances that take pushes or hold
    copies of KV, no others.

    As long as no monitor is heard nothing expires; after kaveri.cluster.monitored_membership.SILENT_AFTER_S without
    one, and before the first one, from the heartbeats of the same instances.
    """


DEFAULT_CLUSTER = "default"
"""Name of the cluster where none was given."""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Whose the instance id is after a heartbeat."""

    holds: bool = True
    """False: a newer life has it. True also while the store is lost."""
    other: InstanceRecord | None = None
    """The newer life; where `holds`, the one that held the lease until now. None: there is none."""


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """One life of a router has a session of a request in flight."""

    request_id: str
    router_id: str
    """The router's instance id."""
    router_incarnation: int
    session: int = 0
    """The client's count of its re-attaches."""
    secret_hash: str = ""
    """Of the client's secret; the same in all sessions of a request. Empty: it has none."""
    hint: bytes = field(default=b"", compare=False)
    """What update_requests() has said of the request, for the router of a later session."""

    def is_later_session_of(self, other: "RequestClaim") -> bool:
        """Whether the same client has re-attached."""
        return self.secret_hash != "" and self.secret_hash == other.secret_hash and self.session > other.session


class ClusterStore(Protocol):
    """One process's access to the cluster's state. Used as an async context manager; not shared between event loops.

    A store is lost while it cannot be reached, and while it refuses heartbeats (a Redis that became a replica, or has
    no memory left). No call raises because of that: registration and heartbeats are retried by the next heartbeat, the
    view says `store_connected=False`, claims are granted, and no router leads. A call waits at most a second for each
    answer of the store. A process that makes no heartbeats does not notice that they are refused.
    """

    async def __aenter__(self) -> Self:
        """Connects. Raises ConfigError when the store cannot be reached within a few seconds."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what runs in the background. Leases are left to expire unless deregistered."""

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        """Registers the instance or renews its lease for `record.lease_ttl_s`, and publishes its load.

        The newest life wins an instance id: of two, the one that registered last is in the view, at once. The answer
        names the other life, once to the newer one and each time to the older one, which should end.
        """

    async def deregister(self, record: InstanceRecord) -> None:
        """Ends this incarnation's lease at once; every watcher sees it go. Unknown ones are ignored."""

    def view(self) -> ClusterView:
        """The view now, without I/O. Leases that have run out are not in it.

        While the store is lost nothing new expires; after its return every instance has one lease time to show up.
        """

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        """Waits until the set of instances, or any load, may have changed since the last call of this method or
        `timeout_s` seconds have passed; then view(). One waiter at a time."""

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        """Leads the cluster monitor for the next `ttl_s` seconds, also if it leads already. Returns the fencing token;
        None: another leads.

        candidate_id: of one life, so that a process started again does not pass for its dead predecessor. Every change
        of leader brings a greater token, also when none led in between and when the store has lost its state.
        """

    async def resign(self, candidate_id: str) -> None:
        """Leaves the lead to others at once. Ignored when another has it."""

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        """Sends it to every store that follows broadcasts. False: not sent, because its token is no longer the leader's
        or the store is away. Nothing comes between the check and the sending, so no follower hears a deposed leader."""

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        """Claims a request id for at most `ttl_s` seconds. Returns None when claimed; the holder's claim when a router
        whose lease holds, possibly this one, has the id.

        The claim of a router life whose lease has ended is taken over, atomically; and so is that of an earlier session
        of the same request, with its hint."""

    async def find_request(self, request_id: str) -> RequestClaim | None:
        """The claim of a request id; None: there is none, or the store is away."""

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        """Enters the hints of claims that are held. Those that have ended or that others hold are left alone."""

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        """Ends claims. Those that other router lives hold are left alone. Returns False when the store is away: the
        claims may still be there when it returns."""

    async def requests(self) -> tuple[RequestClaim, ...]:
        """All claims, in no particular order. No service calls it."""
