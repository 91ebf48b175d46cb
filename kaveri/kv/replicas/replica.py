"""State of one replica: its tokens, and the transfers that may still access its blocks. No I/O, no lock.

Receiving ──┬── Sealed ──┬── Kept ── Dropped
            └────────────┘
"""

from dataclasses import dataclass, field

from kaveri.kv.replicas.store import ReplicaKey


@dataclass(frozen=True, slots=True)
class Receiving:
    """State of a replica (copy of another instance's KV cache): its owner still pushes KV, which extends it once
    verified."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """State of a replica: its owner's push is being revoked; what still arrives of it is ignored."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """State of a replica: its owner's push has ended, and the verified KV is kept."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """State of a replica: deleted. Its blocks are freed once no transfer writes or reads them."""

    transfer_id: bytes | None
    """The owner's push; None once it has ended."""


@dataclass(eq=False, slots=True)
class Replica:
    """One replica (copy of another instance's KV cache): its state, tokens and blocks. Also the owner of these blocks
    in the block allocator."""

    key: ReplicaKey
    state: Receiving | Sealed | Kept | Dropped
    stays: bool = False
    """True if it is kept when its owner gives it up."""
    is_given_up: bool = False
    """True if it is complete and evict() may delete it: no owner pushes to it, and no request is resumed from it."""
    first_block: int = 0
    """Number of blocks that it already had when its owner's present push began."""
    block_ids: list[int] = field(default_factory=list)
    """First the blocks of token_ids, verified, the last one possibly part full; then blocks for the next tokens."""
    token_ids: list[int] = field(default_factory=list)
    reading: set[bytes] = field(default_factory=set)
    """Transfer ids of pushes that read its blocks."""

    @property
    def is_touched(self) -> bool:
        """True if a transfer may still write or read its blocks."""
        return bool(self.reading) or (not isinstance(self.state, Kept) and self.state.transfer_id is not None)
