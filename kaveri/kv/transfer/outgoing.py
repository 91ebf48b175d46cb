"""Active pushes on the sending side: their queues, progress and turns, and the connection that they use."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kaveri.errors import InvalidArgument
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.push import IsIntact, PushListener
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Link, Transport

MemberT = TypeVar("MemberT", bound=Hashable)


@dataclass(eq=False, slots=True)
class Connection:
    """A sender's link to one receiver, and its credit. Guarded by the sender's lock. A push never moves to another
    connection."""

    transport: Transport
    endpoint: KvEndpoint
    link: Link = field(init=False)
    """Set once it is connected; credit may arrive before."""
    lost_reason: str | None = None
    credit_bytes: int = 0
    """Bytes that may be written now."""
    window_bytes: int = 0
    """Bytes that may be in flight."""


@dataclass(slots=True)
class QueuedWrite:
    """Blocks of one layer, at least one, queued for the ticket's blocks [first_index, first_index + len(blocks))."""

    layer: int
    first_index: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class PushProgress:
    """Blocks and bytes that a push has queued and written, and its marks (blocks that the receiver must keep)."""

    queued: list[int]
    """Per layer, blocks that were queued so far."""
    kv_bytes: int = 0
    """Bytes written."""
    marked_count: int = 0
    """Blocks that the latest queued mark covers."""
    unanswered_marks: deque[int] = field(default_factory=deque)
    """Block counts of marks that were sent."""
    keeps_marked: bool = False
    """True if the push was given up and its marked blocks are still useful."""


class PushQueues(Protocol):
    """A push's view of its Peer, which runs the queues of all pushes to one receiver."""

    lock: threading.Lock
    """The sender's lock."""

    def on_queued(self, push: "Push") -> None:
        """Schedule a push whose queue has grown. The caller holds the lock."""

    def give_up(self, push: "Push", reason: str) -> None:
        """Stop a push and notify its receiver. The caller holds the lock."""


class Push:
    """One active push of KV blocks. write(), mark(), finish() and abort() are thread-safe; its Peer calls the others,
    under the sender's lock. The digest is used by the peer's thread only.

    waiting ── connection is set: open ── the end mark is sent ── accepted
       └──────────────┴───────────────────────┴── stopped: its reason ── no longer reading: failed
    """

    def __init__(
        self, ticket: Ticket, digest: Digest, listener: PushListener, peer: "PushQueues", is_intact: IsIntact | None
    ) -> None:
        self.ticket = ticket
        """Includes the blocks that the receiver has added."""
        self.digest = digest
        self.listener = listener
        self.expires_at_s = time.monotonic() + ticket.expires_in_s
        """Expiry of the push; that of an open push counts from the last mark that was answered."""
        self.progress = PushProgress([0] * ticket.layout.layer_count)
        self.queue: deque[QueuedWrite | Callable[[], None]] = deque()
        """In order: blocks to write, and calls that send the opening, the marks and the end. Bounded by the ticket."""
        self.connection: Connection | None = None
        """Set once the transfer is open on it."""
        self.is_finished = False
        """True once the end mark is queued, which is the last of the queue."""
        self.stopped: str | None = None
        self._peer = peer
        self._is_intact = is_intact

    def write(self, layers: range, first_index: int, blocks: tuple[int, ...]) -> None:
        """Queue source blocks, at least one, of each layer, for the ticket's blocks from first_index on. Ignored once
        the push is stopped or finished. Raises InvalidArgument for more blocks than the ticket has."""
        with self._peer.lock:
            if self.stopped is not None or self.is_finished:
                return
            end, granted_count = first_index + len(blocks), len(self.ticket.block_ids)
            if end > granted_count:
                raise InvalidArgument("first_index", f"{first_index} with {len(blocks)} blocks", f"in {granted_count}")
            for layer in layers:
                assert first_index == self.progress.queued[layer], "a block was left out or written twice"
                self.progress.queued[layer] = end
                self.queue.append(QueuedWrite(layer, first_index, blocks))
            self._peer.on_queued(self)

    def mark(self, block_count: int, note: bytes) -> None:
        """Queue a mark: the receiver verifies blocks [0, block_count) and keeps them even if the push fails. note:
        bytes sent with it. Ignored once the push is stopped or finished."""
        with self._peer.lock:
            if self.stopped is not None or self.is_finished:
                return
            assert self.ticket.is_open, "only an open push is marked"
            low, high = self.progress.marked_count, min(self.progress.queued)
            if not low < block_count <= high:
                raise InvalidArgument("block_count", block_count, f"above {low}, the last mark, and at most {high}")
            self.progress.marked_count = block_count
            self.queue.append(partial(self._send, block_count, note))
            self._peer.on_queued(self)

    def finish(self, note: bytes) -> None:
        """Queue the end of the push. note: bytes sent with it. Ignored once the push is stopped or finished."""
        with self._peer.lock:
            if self.stopped is None and not self.is_finished:
                self.is_finished = True
                self.queue.append(partial(self._send, None, note))
                self._peer.on_queued(self)

    def abort(self, reason: str = "aborted", *, keep_marked: bool = False) -> None:
        """Stop the push and notify the receiver. keep_marked: it should keep the marked blocks. Idempotent."""
        with self._peer.lock:
            if self.stopped is None:
                self.progress.keeps_marked = keep_marked
                self._peer.give_up(self, reason)

    def take_write(self, most: int, joined_most: int) -> tuple[range, int, tuple[int, ...]]:
        """Dequeue at most `most` blocks of the first write, and the same blocks of the following layers, if they are
        next in the queue, up to `joined_most` over all layers. Returns (layers, first index, blocks)."""
        head = self.queue[0]
        assert isinstance(head, QueuedWrite)
        layer, index = head.layer, head.first_index
        blocks, head.blocks = head.blocks[:most], head.blocks[most:]
        head.first_index += len(blocks)
        layer_count = 1
        if not head.blocks:
            self.queue.popleft()
            while self.queue and (layer_count + 1) * len(blocks) <= joined_most:
                following = self.queue[0]
                if (
                    not isinstance(following, QueuedWrite)
                    or following.layer != layer + layer_count
                    or following.first_index != index
                    or following.blocks != blocks
                ):
                    break
                self.queue.popleft()
                layer_count += 1
        return range(layer, layer + layer_count), index, blocks

    def take_mark(self, block_count: int) -> bool:
        """Record the receiver's answer to a mark. Returns False if it is not for the oldest unanswered mark."""
        unanswered = self.progress.unanswered_marks
        if not unanswered or unanswered.popleft() != block_count:
            return False
        self.expires_at_s = time.monotonic() + self.ticket.expires_in_s
        return True

    def is_stopped(self) -> bool:
        """True if the push was given up or has failed."""
        return self.stopped is not None

    # On the peer's thread, without the lock.

    def _send(self, block_count: int | None, note: bytes) -> None:
        """Send the mark at a block; None: the end. Nothing is sent if source blocks have changed."""
        if self.stopped is not None or self.connection is None:
            return
        if self._is_intact is not None and not self._is_intact(self.ticket.transfer_id, block_count):
            return
        link = self.connection.link
        digest = self.digest.intdigest() if link.wants_digest else 0
        if block_count is None:
            link.finish(self.ticket, note, digest)
        else:
            self.progress.unanswered_marks.append(block_count)
            link.mark(self.ticket, block_count, note, digest)


class Turns(Generic[MemberT]):
    """Deficit round robin: each member with work may send a quantum of bytes per round, whether by large or small
    writes (M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995).

    A write is never split: a member continues while its balance is above zero, and the excess is deducted from its next
    round. While two members have work, their bytes differ by at most three times the larger of a quantum and a write.
    quantum_bytes: at least 1.
    """

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        self._ring: deque[MemberT] = deque()
        self._balances: dict[MemberT, int] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def join(self, member: MemberT) -> None:
        """Add a member that has work, at the end of the round. No-op for a present one."""
        if member not in self._balances:
            self._balances[member] = self._quantum_bytes
            self._ring.append(member)

    def leave(self, member: MemberT) -> None:
        """Remove a member that has no more work. No-op for an absent one."""
        if self._balances.pop(member, None) is not None:
            self._ring.remove(member)

    def next(self, is_ready: Callable[[MemberT], bool]) -> MemberT | None:
        """Return the member whose turn it is, None if none is ready. Those not ready are skipped and keep their
        balance."""
        passed_count = 0
        while passed_count < len(self._ring):
            member = self._ring[0]
            if not is_ready(member):
                passed_count += 1
            elif self._balances[member] > 0:
                return member
            else:
                passed_count = 0
                self._balances[member] += self._quantum_bytes
            self._ring.rotate(-1)
        return None

    def charge(self, member: MemberT, byte_count: int) -> None:
        """Deduct the bytes that a member is about to send from its balance."""
        self._balances[member] -= byte_count
