"""The ReplicaStore contract: where an instance keeps copies of KV that other instances' requests own.

A replica grows while its owner pushes into it, over a transfer that stays open. Its watermark is the number of tokens,
from the first one of the prompt on, whose KV and whose ids have arrived and are verified; blocks below it never change.
When the owner is gone the replica stays up to its watermark, until drop(). DéjàVu (arXiv 2403.01876, section 4.2.3 and
appendix E) keeps such copies on the next worker of a ring; the choice of copies is not made here.

    open ── ReplicaGrew* ──┬── seal ───────────────────────────────────────┐
                           ├── owner lost: ReplicaOrphaned ────────────────┼── push* ── drop
                           ├── owner gave it up, it stays: ReplicaGivenUp ─┤
                           ├── owner let the request go: ──────────────────┘
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
    """Key of a replica in one store: the request, and the owner that pushes."""

    request_id: str
    session: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReplicaUsage:
    """The memory of a store."""

    used_bytes: int = 0
    """Memory of the blocks that replicas hold, those granted ahead included, and that an ended transfer may touch."""
    total_bytes: int = 0
    replica_count: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaGrew:
    """The watermark has risen."""

    key: ReplicaKey
    token_count: int


@dataclass(frozen=True, slots=True)
class ReplicaOrphaned:
    """The owner's push has ended, and the replica is kept until drop(). The owner is lost, was sealed off, or has
    released the request: then the replica has a tail, the tokens after its last whole block."""

    key: ReplicaKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaDropped:
    """The replica is gone: its owner has given it up, or was lost before the first mark. Not sent after drop()."""

    key: ReplicaKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaGivenUp:
    """The owner has given the replica up, and it was opened with stays=True. It is kept until drop()."""

    key: ReplicaKey
    reason: str


ReplicaEvent = ReplicaGrew | ReplicaOrphaned | ReplicaDropped | ReplicaGivenUp
ReplicaListener = Callable[[ReplicaEvent], None]
"""Called on one of the store's own threads, with events in the order in which they happened; must not block."""


class ReplicaStore(Protocol):
    """Keeps replicas. Every method may be called from any thread. Unknown keys are ignored, or have no tokens."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the replicas: the `source` of DecodeEngine.reserve() when a replica is pushed to the engine."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses where it takes the pushes of owners, best first."""

    def start(self, listener: ReplicaListener) -> None:
        """Start taking replicas. Events go to `listener`."""

    def open(
        self, key: ReplicaKey, layout: KvLayout, token_count: int, expires_in_s: float, *, stays: bool = False
    ) -> Ticket:
        """Take the whole blocks of `token_count` tokens, and one more, for a replica, and grant an open ticket for
        them. The owner gets more as it marks those, while there are free ones; until then the replica does not grow.

        expires_in_s: the owner is presumed lost after this long without a mark. stays: True to keep the replica, unless
        it is empty, when its owner gives it up. A replica of the same key is dropped first.

        Raises NoCapacity when the memory is full or other replicas wait for blocks, LayoutMismatch unless the layout is
        the store's own, and InvalidArgument for other values out of range.
        """

    def watermark(self, key: ReplicaKey) -> int:
        """Tokens that have arrived and are verified: whole blocks, and the tail once the owner has released it."""

    def token_ids(self, key: ReplicaKey) -> tuple[int, ...]:
        """The ids of those tokens."""

    def is_starved(self, key: ReplicaKey) -> bool:
        """True while the memory for replicas has no free block for the KV of the owner's next tokens."""

    def seal(self, key: ReplicaKey) -> None:
        """Stop taking KV from the owner. The watermark rises no more; later writes are not part of the replica."""

    def push(self, key: ReplicaKey, ticket: Ticket) -> "Future[None]":
        """Push the first `ticket.token_count` tokens, at most those below the watermark, to a decode engine's ticket.

        The note is empty. The future is done when the engine has accepted them. It fails with TransferFailed, with
        LayoutMismatch when the blocks cannot be mapped, and with InvalidArgument for a ticket of more tokens. The
        replica may be pushed again, and may be dropped meanwhile: the push fails then.
        """

    def drop(self, key: ReplicaKey) -> None:
        """Free the replica once no transfer can touch its blocks any more. No event of it follows."""

    def usage(self) -> ReplicaUsage:
        """Snapshot of the memory. Never blocks on a transfer."""

    def flow(self) -> KvFlow:
        """Snapshot of the transfers: from owners, and to engines."""

    def close(self) -> None:
        """End transfers, threads and the listener's calls, and free the memory. Idempotent."""

    def check_integrity(self) -> None:
        """Assert that every block is free, of a replica, or quarantined by a live transfer."""
