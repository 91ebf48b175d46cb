"""How a push goes and ends, which listener hears of it, and what carries it. Knows no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.kv.transfer.ticket import Ticket


@dataclass(frozen=True, slots=True)
class PushAccepted:
    """The receiver has every byte, verified where it asked for digests. The source blocks are no longer read."""

    transfer_id: bytes
    kv_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push ended without acceptance. The source blocks are no longer read."""

    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class PushMarked:
    """The receiver of an open push has verified blocks [0, block_count), and keeps them if the push fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""


@dataclass(frozen=True, slots=True)
class PushExtended:
    """The receiver of an open push has given it more destination blocks."""

    transfer_id: bytes
    block_count: int
    """All that may be written now, those of the ticket included."""


PushEnd = PushAccepted | PushFailed
PushEvent = PushEnd | PushMarked | PushExtended
PushListener = Callable[[PushEvent], None]
"""Called on threads of the sender; must not block. Of each opened transfer it hears the end, once and last."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the receiver's own thread of the sender; must not block."""


class PushSender(Protocol):
    """What carries pushes: a KvSender (sender.py), or what stands for one."""

    def open(self, ticket: Ticket, *, part: bool = False) -> None:
        """Begins a transfer. part: of some of the layers or heads. Raises LayoutMismatch and TransferFailed."""

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queues blocks of one layer, in index order, each once. Never waits."""

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queues the same blocks of several layers, together."""

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        """Marks an open push; see KvSender.mark."""

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """All blocks are queued; the note arrives behind them."""

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        """Gives a transfer up; see KvSender.abort."""
