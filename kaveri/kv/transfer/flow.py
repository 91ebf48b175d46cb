"""What flow control looks like from outside at one moment: values for metrics and tests. Snapshots, safe to keep."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """One receiver, as its sender sees it."""

    address: str
    """Of the connection; of the preferred endpoint while there is none."""
    transport: str
    """The label of the connection's; empty while there is none."""
    push_count: int
    block_count: int
    """Blocks that open pushes have there, per layer: what their tickets lease."""
    queued_bytes: int
    """Bytes that could be written: they wait for credit, for their turn or for the link."""
    unaccepted_bytes: int
    """Written bytes of pushes that are not accepted yet."""
    credit_bytes: int
    """What may be written now."""
    is_waiting: bool
    """All that is queued waits for credit."""


@dataclass(frozen=True, slots=True)
class SenderFlow:
    """A sender, with the receivers that it has a thread for."""

    peers: tuple[PeerFlow, ...] = ()
    credit_waits: int = 0
    """How often all that was queued for a receiver had to wait for credit: once a connection, when it begins, too."""
    credit_wait_s: float = 0.0
    """How long, over all receivers."""

    @staticmethod
    def total(parts: "Iterable[SenderFlow]") -> "SenderFlow":
        """Several senders as one."""
        parts = tuple(parts)
        return SenderFlow(
            peers=tuple(peer for part in parts for peer in part.peers),
            credit_waits=sum(part.credit_waits for part in parts),
            credit_wait_s=sum(part.credit_wait_s for part in parts),
        )


@dataclass(frozen=True, slots=True)
class ReceiverFlow:
    """A receiver, with all its senders."""

    sender_count: int = 0
    """Connections."""
    window_bytes: int = 0
    """What each sender may have under way."""
    held_bytes: int = 0
    """Credit that is not home: given to senders and not used, or arriving."""
    arriving_bytes: int = 0
    """Used credit whose bytes are not taken in yet."""
    leased_block_count: int = 0
    """Blocks of granted transfers that have neither landed nor been released, per layer."""
    quarantined_block_count: int = 0
    """Those of them whose transfer has ended, and that a sender may still write to."""

    @staticmethod
    def total(parts: "Iterable[ReceiverFlow]") -> "ReceiverFlow":
        """The receivers of several ranks as one: each leases the same blocks."""
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
    """Both sides of one pool."""

    sending: SenderFlow = field(default_factory=SenderFlow)
    receiving: ReceiverFlow = field(default_factory=ReceiverFlow)
