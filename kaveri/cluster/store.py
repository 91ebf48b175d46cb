"""Contract of a ClusterStore: leases, heartbeats, the view of the cluster, the cluster monitor's election, claims of
request ids. State in a store may be lost: requests in flight continue, the last view stays in use, and everything
registers again when the store returns. Implementations: redis_store (real), memory_store (one process, for tests)."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, LoadBroadcast


class ViewSource(enum.Enum):
    """Source of a store's view of the cluster, chosen when the store is opened."""

    HEARTBEATS = enum.auto()
    """Every heartbeat of every instance."""
    BROADCASTS = enum.auto()
    """The cluster monitor's broadcasts: one message for all instances that decode, hold KV replicas, or predict; other
    instances are not in the view. Nothing expires without a monitor. Until the first broadcast, and
    BROADCAST_LOST_AFTER_S after the last one, heartbeats of the same instances are used."""


DEFAULT_CLUSTER = "default"


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Result of a heartbeat: whether this process (incarnation) still owns its instance id."""

    holds: bool = True
    """False: a newer incarnation owns the id. True while the store is lost."""
    other: InstanceRecord | None = None
    """The newer incarnation if not `holds`; else the one that lost its lease to this one. None if there is none."""


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """Claim of a router (one incarnation) on the id of a request in flight, for one session of its client."""

    request_id: str
    router_id: str
    router_incarnation: int
    session: int = 0
    """Number of times that the client has reconnected to the request."""
    secret_hash: str = ""
    """Hash of the client's secret, the same in all sessions of a request. Empty: no secret."""
    hint: bytes = field(default=b"", compare=False)
    """Opaque data for the router of a later session; stored with update_requests()."""

    def is_later_session_of(self, other: "RequestClaim") -> bool:
        """Return True if this claim is of the same request and client as `other`, in a later session."""
        return self.secret_hash != "" and self.secret_hash == other.secret_hash and self.session > other.session


class ClusterStore(Protocol):
    """Access of one process to the cluster's state. Used as an async context manager; for one event loop. A store is
    lost while it is unreachable or refuses heartbeats (a Redis that became a replica, or has no memory left). Calls
    then do not raise: heartbeats retry registration, the view has `store_connected=False`, claims are granted, and no
    router leads. Calls wait up to a second per answer. A process that sends no heartbeats does not notice refusals."""

    async def __aenter__(self) -> Self:
        """Connect. Raises ConfigError when the store cannot be reached within a few seconds."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect. Leases expire by themselves unless deregistered."""

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        """Register the instance, or renew its lease for `record.lease_ttl_s` seconds, and publish its load. The latest
        registration owns an instance id, at once. If two processes use one id, the answer names the other incarnation:
        once to the newer one, each time to the older one, which should end."""

    async def deregister(self, record: InstanceRecord) -> None:
        """End the lease of this incarnation at once, visibly for all processes. No-op if it has none."""

    def view(self) -> ClusterView:
        """Return the current instances with a valid lease, without I/O. While the store is lost no lease expires; when
        it returns every instance has one lease time to renew."""

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        """Wait up to `timeout_s` seconds for a change since the last call; return view(). One waiter at a time."""

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        """Become or stay the cluster monitor's leader for `ttl_s` seconds. Returns the fencing token; None if another
        leads. candidate_id: unique to this run of the process, so that it is not mistaken for its predecessor. The
        token rises with each change of leader, even after nobody led or the store lost its state."""

    async def resign(self, candidate_id: str) -> None:
        """Stop leading at once. No-op if another candidate leads."""

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        """Send to all stores with ViewSource.BROADCASTS. Returns False if not sent: its token is not the leader's, or
        the store is lost. Check and send are atomic: followers receive no broadcast of a deposed leader."""

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        """Claim a request id for up to `ttl_s` seconds. Returns None on success; the current claim if a router with a
        valid lease, possibly this one, has it. Atomically takes over the claim of a router incarnation without a lease,
        and that of an earlier session of the same request, keeping the latter's hint."""

    async def find_request(self, request_id: str) -> RequestClaim | None:
        """Return the claim of a request id; None if there is none or the store is lost."""

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        """Store the hints (data for the next router) of these claims. Ended claims, and those of others, stay."""

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        """End these claims; those of others stay. Returns False if the store is lost: they may still exist later."""
