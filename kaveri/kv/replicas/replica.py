"""One replica: its tokens, and the transfers that may still touch its blocks. Values and their cell; no I/O, no lock.

Receiving ──┬── Sealed ──┬── Kept ── Dropped
            └────────────┘
"""

from dataclasses import dataclass, field

from kaveri.kv.replicas.store import ReplicaKey


@dataclass(frozen=True, slots=True)
class Receiving:
    """The owner's push is open, and its marks count."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """The owner's push is being ended. It may still write beyond the watermark, and its marks do not count."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """Kept after the end of the owner's push."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Forgotten. Its blocks are free once neither the owner's push nor a push from here touches them."""

    transfer_id: bytes | None
    """The owner's push, until it has ended."""


@dataclass(eq=False, slots=True)
class Replica:
    """The cell that holds a replica's state. Also the owner of its blocks in the allocator."""

    key: ReplicaKey
    state: Receiving | Sealed | Kept | Dropped
    stays: bool = False
    """True if it is kept when its owner gives it up."""
    block_ids: list[int] = field(default_factory=list)
    """[0, blocks of token_ids) are verified; the others are granted ahead. The last one may be part full once the owner
    has released the request."""
    token_ids: list[int] = field(default_factory=list)
    reading: set[bytes] = field(default_factory=set)
    """Pushes from here that read its blocks."""

    @property
    def is_touched(self) -> bool:
        """True if anything may still write or read its blocks."""
        return bool(self.reading) or (not isinstance(self.state, Kept) and self.state.transfer_id is not None)
