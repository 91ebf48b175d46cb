"""Events and interfaces of a push, the sending side of a transfer of KV blocks. Knows no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.ticket import Ticket


@dataclass(frozen=True, slots=True)
class PushAccepted:
    """Event of a push: the receiver has all bytes, verified if it wants digests. Source blocks are no longer read."""

    transfer_id: bytes
    kv_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """Event of a push: it has failed, and its source blocks are no longer read."""

    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class PushMarked:
    """Event of an open (growing) push: the receiver has verified blocks [0, block_count) and keeps them even if the
    push fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""


@dataclass(frozen=True, slots=True)
class PushExtended:
    """Event of an open (growing) push: the receiver has granted it more destination blocks."""

    transfer_id: bytes
    block_count: int
    """Total number of blocks that may be written now, including the ticket's."""


PushEnd = PushAccepted | PushFailed
PushEvent = PushEnd | PushMarked | PushExtended
PushListener = Callable[[PushEvent], None]
"""Called on threads of the sender; must not block. The last call for each opened transfer is its end, exactly once."""

IsIntact = Callable[[bytes, int | None], bool]
"""Called with (transfer id, block count) once the sender has read that many blocks of the push (None: all), before it
marks them or finishes the push. Returns False if one of them may have been overwritten before it was read: then the
sender sends nothing, and the caller aborts the push. Called without a lock; must not block."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the sender's thread for that receiver; must not block."""


class OpenPush(Protocol):
    """Interface of an active push: its operations are queued and sent in order."""

    def write(self, layers: range, first_index: int, blocks: tuple[int, ...]) -> None:
        """Queue source blocks, at least one, of each layer, for the ticket's blocks from first_index on."""

    def mark(self, block_count: int, note: bytes) -> None:
        """Queue a mark: the receiver verifies blocks [0, block_count) and keeps them even if the push fails. note:
        bytes sent with it."""

    def finish(self, note: bytes) -> None:
        """Queue the end of the push. note: bytes delivered to the receiver's listener with it."""

    def abort(self, *, keep_marked: bool = False) -> None:
        """Give the push up. keep_marked: the receiver should keep the marked blocks, as after a lost connection."""


class PushSender(Protocol):
    """Interface of a sender of pushes: KvSender (sender.py), or a substitute in simulations."""

    def open(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Begin the push that a ticket permits. parts: one ticket per pair of ranks, if several. Raises LayoutMismatch
        and TransferFailed."""

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queue the same source blocks of each layer, for the ticket's blocks from first_index on. Never waits."""

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        """Queue a mark: the receiver verifies blocks [0, block_count) and keeps them even if the push fails. note:
        bytes sent with it."""

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """Finish a push whose blocks are all queued. note: bytes delivered to the receiver's listener after them."""

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        """Give a push up. keep_marked: the receiver should keep the marked blocks, as after a lost connection."""

    def flow(self) -> SenderFlow:
        """Return a flow-control snapshot of the active pushes."""

    def close(self) -> None:
        """End all pushes. Idempotent."""
