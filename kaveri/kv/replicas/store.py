"""Contract of a ReplicaStore: holds copies (replicas) of the KV caches of requests that run on other instances.

A replica's owner, the instance that runs the request, pushes KV over a transfer that stays open, so the replica grows.
Its watermark is the number of tokens, from the start of the prompt, whose KV and ids have arrived and are verified;
blocks below it never change. When the owner is lost, the replica up to the watermark stays until drop(). DéjàVu (arXiv
2403.01876, section 4.2.3 and appendix E) keeps such copies on the next worker of a ring; here, callers place them.

    open ── ReplicaGrew* ──┬── seal ───────────────────────────────────────┐
                           ├── owner lost: ReplicaOrphaned ────────────────┼── push* ── drop
                           ├── owner gave it up, it stays: ReplicaGivenUp ─┤
                           ├── owner finished its push: ───────────────────┘
                           │   ReplicaOrphaned, tail included
                           └── owner gave it up: ReplicaDropped
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket


class ReplicaKey(NamedTuple):
    """Key of a replica: the request and its owner. The owner is an attempt (placement on an instance) in a session
    (count of client reconnections)."""

    request_id: str
    session: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReplicaUsage:
    """Memory use of a replica store."""

    used_bytes: int = 0
    """Bytes of blocks that replicas hold or were granted in advance, or that an ended transfer may still access. In a
    pool with other users, of theirs too."""
    total_bytes: int = 0
    """Bytes that replicas can take; constant."""
    replica_count: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaGrew:
    """Event of a replica: its watermark has risen to `token_count` verified tokens."""

    key: ReplicaKey
    token_count: int


@dataclass(frozen=True, slots=True)
class ReplicaOrphaned:
    """Event of a replica: its owner's push has ended, since the owner was lost, sealed off or has finished; it is kept
    until drop(). After a finished push it includes the tail, the tokens after the last whole block."""

    key: ReplicaKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaDropped:
    """Event of a replica: deleted; its owner gave it up or was lost before any KV was verified, or the store needs its
    blocks for others. Not after drop()."""

    key: ReplicaKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaGivenUp:
    """Event of a replica opened with stays=True: its owner has given it up; it is kept until drop()."""

    key: ReplicaKey
    reason: str


ReplicaEvent = ReplicaGrew | ReplicaOrphaned | ReplicaDropped | ReplicaGivenUp
ReplicaListener = Callable[[ReplicaEvent], None]
"""Called on one of the store's own threads, with events in the order in which they happened; must not block."""


class ReplicaStore(Protocol):
    """Store of replicas: copies of other instances' KV caches. Thread-safe. Unknown keys are ignored, or count 0."""

    @property
    def layout(self) -> KvLayout:
        """KV layout of the replicas; DecodeEngine.reserve() takes it as `source` before a push to that engine."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses where owners (instances that run the requests) push replicas, in order of preference."""

    def start(self, listener: ReplicaListener) -> None:
        """Start accepting replicas, and send their events to `listener`."""

    def open(
        self,
        key: ReplicaKey,
        layout: KvLayout,
        token_count: int,
        expires_in_s: float,
        *,
        stays: bool = False,
        extends: ReplicaKey | None = None,
    ) -> Ticket:
        """Reserve blocks for a new replica and return the ticket with which its owner pushes KV into them.

        Reserves the whole blocks of `token_count` tokens and one more. Each mark (verified checkpoint) of the owner
        grants it further blocks, once some are free. expires_in_s: the owner is presumed lost after this long without a
        mark. stays: keep the replica, unless empty, when its owner gives it up. Replaces a replica of the same key.
        extends: key of a complete replica to append to, whose tokens are the first ones of the same request. It gets
        the new key, and the ticket is for the blocks after its own (Ticket.first_block). If nothing can be appended, it
        is deleted, and the ticket is for all blocks.

        Raises NoCapacity when the memory is full or other replicas wait for blocks, LayoutMismatch unless the layout is
        the store's own, and InvalidArgument for other values out of range.
        """

    def watermark(self, key: ReplicaKey) -> int:
        """Number of verified tokens: whole blocks, plus a part-full last one once the owner has finished its push."""

    def token_ids(self, key: ReplicaKey) -> tuple[int, ...]:
        """Ids of the replica's verified tokens, watermark(key) of them."""

    def is_starved(self, key: ReplicaKey) -> bool:
        """True while the store has no free block for the next tokens of this replica."""

    def seal(self, key: ReplicaKey) -> None:
        """Stop accepting KV from the owner: the watermark rises no more, later writes do not count."""

    def push(self, key: ReplicaKey, ticket: Ticket) -> "Future[None]":
        """Push the KV of the first `ticket.token_count` tokens (at most watermark(key)) to the ticket's engine.

        The future completes when the engine has accepted the KV. It fails with TransferFailed, also if the replica is
        dropped meanwhile; with LayoutMismatch when the blocks cannot be mapped; with InvalidArgument for a ticket of
        more tokens. The push's note is empty. A replica may be pushed several times.
        """

    def drop(self, key: ReplicaKey) -> None:
        """Delete the replica; its blocks are freed once no transfer can access them. No event of it follows."""

    def usage(self) -> ReplicaUsage:
        """Return the current memory use. Never waits for a transfer."""

    def flow(self) -> KvFlow:
        """Return a flow-control snapshot of the pushes from owners and to engines."""

    def close(self) -> None:
        """End all transfers and threads, and free the memory. The listener is not called afterwards. Idempotent."""

    def check_integrity(self) -> None:
        """Assert that every block is free, held by a replica, or still accessible to an active transfer."""
