"""ClusterStore contract: leases, heartbeats, the view, the cluster monitor's election, claims of request ids. State in
a store is soft. When the store dies, requests in flight continue, the last view stays in use, and everything registers
again when it returns. Implementations: redis_store (real), memory_store (one process, for tests)."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, LoadBroadcast


class ViewSource(enum.Enum):
    """Source of a store's view, chosen when it is opened."""

    HEARTBEATS = enum.auto()
    """Every heartbeat of every instance."""
    BROADCASTS = enum.auto()
    """The cluster monitor's broadcasts: one message for predictors and the instances that accept pushes or hold copies
    of KV, no others. Without a monitor nothing expires; after BROADCAST_LOST_AFTER_S without one, and before the first
    one, heartbeats of the same instances are used."""


DEFAULT_CLUSTER = "default"


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Owner of an instance id after a heartbeat."""

    holds: bool = True
    """False: a newer incarnation has the id. True also while the store is lost."""
    other: InstanceRecord | None = None
    """The newer incarnation, or if `holds`, the one whose lease was taken over; None if there is none."""


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """Claim of a request in flight by one incarnation of a router, for one session."""

    request_id: str
    router_id: str
    router_incarnation: int
    session: int = 0
    """Number of times that the client has re-attached."""
    secret_hash: str = ""
    """Hash of the client's secret; the same in all sessions of a request. Empty: no secret."""
    hint: bytes = field(default=b"", compare=False)
    """Opaque data stored with update_requests(), for the router of a later session."""

    def is_later_session_of(self, other: "RequestClaim") -> bool:
        """Return True if this claim is a later session of the same client's request."""
        return self.secret_hash != "" and self.secret_hash == other.secret_hash and self.session > other.session


class ClusterStore(Protocol):
    """Access of one process to the cluster's state. Used as an async context manager; not shared between event loops. A
    store is lost while it cannot be reached, and while it refuses heartbeats (a Redis that became a replica, or has no
    memory left). No call raises because of that: registration and heartbeats are retried by the next heartbeat, the
    view says `store_connected=False`, claims are granted, and no router leads. A call waits at most a second for each
    answer of the store. A process that makes no heartbeats does not notice that they are refused."""

    async def __aenter__(self) -> Self:
        """Connect. Raises ConfigError when the store cannot be reached within a few seconds."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop background work. Leases expire by themselves unless deregistered."""

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        """Register the instance or renew its lease for `record.lease_ttl_s`, and publish its load. The latest
        registration wins an instance id: it alone is in the view, at once. The answer names the other incarnation, once
        to the newer one and each time to the older one, which should end."""

    async def deregister(self, record: InstanceRecord) -> None:
        """End this incarnation's lease at once, visibly for every watcher. Unknown ones are ignored."""

    def view(self) -> ClusterView:
        """The current view, without I/O and without expired leases. While the store is lost nothing more expires; after
        its return every instance has one lease time to renew."""

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        """Wait until instances or loads may have changed since the last call, for at most `timeout_s` seconds; then
        return view(). One waiter at a time."""

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        """Take or renew the lead of the cluster monitor for `ttl_s` seconds. Returns the fencing token; None: another
        leads. candidate_id: of one incarnation, so that a restarted process is not mistaken for its dead predecessor.
        Every change of leader increases the token, even if none led in between or the store has lost its state."""

    async def resign(self, candidate_id: str) -> None:
        """Give up the lead at once. No-op if another has it."""

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        """Send to every store that follows broadcasts. Returns False if not sent: the token is no longer the leader's,
        or the store is away. Check and send are atomic, so no follower receives a deposed leader's broadcast."""

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        """Claim a request id for at most `ttl_s` seconds. Returns None on success; the current claim if a router with a
        valid lease, possibly this one, has the id. The claim of a router incarnation without a lease is taken over,
        atomically; so is that of an earlier session of the same request, with its hint."""

    async def find_request(self, request_id: str) -> RequestClaim | None:
        """Return the claim of a request id; None if there is none, or the store is away."""

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        """Store the hints of current claims. Ended claims, and those held by others, are left alone."""

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        """End claims. Those of other router incarnations are left alone. Returns False when the store is away: the
        claims may still exist when it returns."""
