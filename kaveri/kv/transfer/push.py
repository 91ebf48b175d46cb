"""Events of a push, the types of its listeners, and the interface of its sender. Knows no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.kv.transfer.flow import SenderFlow
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
    """The receiver of an open push has verified blocks [0, block_count), and keeps them even if the push fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""


@dataclass(frozen=True, slots=True)
class PushExtended:
    """The receiver of an open push has given it more destination blocks."""

    transfer_id: bytes
    block_count: int
    """Total number of blocks that may be written now, including the ticket's."""


PushEnd = PushAccepted | PushFailed
PushEvent = PushEnd | PushMarked | PushExtended
PushListener = Callable[[PushEvent], None]
"""Called on threads of the sender; must not block. The last call for each opened transfer is its end, exactly once."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the sender's thread for that receiver; must not block."""


class OpenPush(Protocol):
    """A push that has not ended; see KvSender for its methods."""

    def write(self, layers: range, first_index: int, blocks: tuple[int, ...]) -> None:
        """Queue blocks, at least one, of each layer."""

    def mark(self, block_count: int, note: bytes) -> None:
        """Queue a mark."""

    def finish(self, note: bytes) -> None:
        """Queue the end mark."""

    def abort(self, *, keep_marked: bool = False) -> None:
        """Give it up."""


class PushSender(Protocol):
    """Interface of a sender of pushes: a KvSender (sender.py), or a stand-in."""

    def open(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Begin a transfer; see KvSender.open. Raises LayoutMismatch and TransferFailed."""

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queue the same blocks of some layers: within a layer in index order, each once. Never waits."""

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        """Mark an open push; see KvSender.mark."""

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """Finish a transfer whose blocks are all queued; the note arrives after them."""

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        """Give a transfer up; see KvSender.abort."""

    def flow(self) -> SenderFlow:
        """Snapshot of the pushes under way."""

    def close(self) -> None:
        """End all pushes. Idempotent."""
