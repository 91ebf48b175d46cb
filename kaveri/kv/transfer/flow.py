"""Flow-control snapshots for metrics and tests. Immutable values."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """Flow-control snapshot of a sender's pushes to one receiver."""

    address: str
    """Address of the connection; of the preferred endpoint while there is none."""
    transport: str
    """Label of the connection's transport; empty while there is none."""
    push_count: int
    block_count: int
    """Blocks that open pushes lease there, per layer."""
    queued_bytes: int
    """Bytes that could be written, but wait for credit, their turn or the link."""
    unaccepted_bytes: int
    """Written bytes of pushes that are not accepted yet."""
    credit_bytes: int
    """Bytes that may be written now."""
    is_waiting: bool
    """True if everything queued waits for credit."""


@dataclass(frozen=True, slots=True)
class SenderFlow:
    """Flow-control snapshot of a sender, with each receiver that it has a thread for."""

    peers: tuple[PeerFlow, ...] = ()
    credit_waits: int = 0
    """Times that everything queued for a receiver had to wait for credit; includes one for each new connection."""
    credit_wait_s: float = 0.0
    """Seconds of these waits, summed over all receivers."""

    @staticmethod
    def total(parts: "Iterable[SenderFlow]") -> "SenderFlow":
        """Combine the flow-control snapshots of several senders: all their receivers, and sums of their waits."""
        parts = tuple(parts)
        return SenderFlow(
            peers=tuple(peer for part in parts for peer in part.peers),
            credit_waits=sum(part.credit_waits for part in parts),
            credit_wait_s=sum(part.credit_wait_s for part in parts),
        )


@dataclass(frozen=True, slots=True)
class ReceiverFlow:
    """Flow-control snapshot of a receiver, summed over its senders."""

    sender_count: int = 0
    """Open connections."""
    window_bytes: int = 0
    """Bytes that each sender may have in flight."""
    held_bytes: int = 0
    """Credit that has not returned: unused by its sender, or arriving."""
    arriving_bytes: int = 0
    """Used credit whose bytes are not taken in yet."""
    leased_block_count: int = 0
    """Blocks of granted transfers that have neither landed nor been released, per layer."""
    quarantined_block_count: int = 0
    """Leased blocks whose transfer has ended and that a sender may still write to."""

    @staticmethod
    def total(parts: "Iterable[ReceiverFlow]") -> "ReceiverFlow":
        """Combine the flow-control snapshots of an instance's ranks. Block counts are maxima: ranks lease equal
        blocks."""
        parts = tuple(parts)
        return ReceiverFlow(
            sender_count=sum(part.sender_count for part in parts),
            window_bytes=sum(part.window_bytes for part in parts),
            held_bytes=sum(part.held_bytes for part in parts),
            arriving_bytes=sum(part.arriving_bytes for part in parts),
            leased_block_count=max(part.leased_block_count for part in parts),
            quarantined_block_count=max(part.quarantined_block_count for part in parts),
        )


@dataclass(frozen=True, slots=True)
class KvFlow:
    """Flow-control snapshots of a pool's sender and receiver."""

    sending: SenderFlow = field(default_factory=SenderFlow)
    receiving: ReceiverFlow = field(default_factory=ReceiverFlow)
