"""Pushes under way on the sending side: their queues and their progress. Moves nothing."""

import time
from collections import deque
from dataclasses import dataclass

from kaveri.kv.transfer.connection import Connection
from kaveri.kv.transfer.digest import DigestFactory
from kaveri.kv.transfer.ticket import Ticket

_TELL_AGAIN_S = 0.25
_TELL_AGAIN_MAX_S = 4.0
"""First delay, doubled each time, before an unreachable receiver is notified again of pushes that were given up."""

# The queue of a push, in order: one PushOpening; for each layer at most a QueuedWrite for each block; at most a Marking
# for each block; one Ending.


@dataclass(frozen=True, slots=True)
class PushOpening:
    """Begin the transfer at the receiver."""


@dataclass(frozen=True, slots=True)
class Marking:
    """Mark blocks [0, block_count) of each layer; they are queued before this."""

    block_count: int
    note: bytes


@dataclass(frozen=True, slots=True)
class Ending:
    """Send the end mark."""

    note: bytes


@dataclass(slots=True)
class QueuedWrite:
    """Blocks of one layer that wait to be sent, at least one: [first_index, first_index + len(blocks)) of the
    ticket's."""

    layer: int
    first_index: int
    blocks: tuple[int, ...]

    def take(self, count: int) -> tuple[int, ...]:
        """Take the next blocks off the queue."""
        taken, self.blocks = self.blocks[:count], self.blocks[count:]
        self.first_index += len(taken)
        return taken


class Push:
    """One transfer under way. Guarded by the sender's lock, except the digest, which is the peer thread's.

    waiting ── connection is set: open ── is_ended: the end mark is sent ── accepted
       └──────────────┴───────────────────────┴── stopped: its reason ── no longer reading: failed
    """

    def __init__(self, ticket: Ticket, digest: DigestFactory) -> None:
        self.ticket = ticket
        """Includes the blocks that the receiver has added."""
        self.expires_at_s = time.monotonic() + ticket.expires_in_s
        """Expiry of the push; that of an open push counts from the last mark that was answered."""
        self.digest = digest()
        self.queued = [0] * ticket.layout.layer_count
        self.queue: deque[PushOpening | QueuedWrite | Marking | Ending] = deque((PushOpening(),))
        self.marks = Marks()
        self.kv_bytes = 0
        self.connection: Connection | None = None
        """Set once the transfer is open on it."""
        self.is_reading = False
        """True while the peer's thread may read source blocks."""
        self.is_ending = False
        """True once the end mark is queued."""
        self.is_ended = False
        """True once the end mark is sent."""
        self.stopped: str | None = None
        self.keeps_marked = False
        """True if the push was given up and its marked blocks are still useful."""

    @property
    def transfer_id(self) -> bytes:
        """The ticket's."""
        return self.ticket.transfer_id

    def take_write(self, most: int, joined_most: int) -> tuple[range, int, tuple[int, ...]]:
        """Takes at most `most` blocks of the write at the head of the queue, and all of the writes behind it that bring
        the same blocks of the following layers, up to `joined_most` blocks over all layers. Returns layers, first index
        and blocks."""
        head = self.queue[0]
        assert isinstance(head, QueuedWrite)
        layer, index = head.layer, head.first_index
        blocks = head.take(most)
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

    def is_stopped(self) -> bool:
        """True if it was given up."""
        return self.stopped is not None


class Marks:
    """Marks of an open push. Guarded by the sender's lock."""

    def __init__(self) -> None:
        self.queued_count = 0
        """Blocks that the latest queued mark covers."""
        self._unanswered: deque[int] = deque()

    def sent(self, block_count: int) -> None:
        """Record that a mark is sent."""
        self._unanswered.append(block_count)

    def answered(self, block_count: int) -> bool:
        """Record that the receiver keeps a mark. True if it was due: the oldest unanswered one."""
        return bool(self._unanswered) and self._unanswered.popleft() == block_count


class Untold:
    """Pushes that were given up before they were open. Until their receiver is notified it keeps blocks for them, at
    most until their tickets end; they are forgotten then. Used by the peer's thread only."""

    def __init__(self) -> None:
        self.pushes: list[Push] = []
        self.tell_at_s = 0.0
        self._again_s = _TELL_AGAIN_S

    def is_due(self) -> bool:
        """True if there are some, and a retry is due."""
        return bool(self.pushes) and time.monotonic() >= self.tell_at_s

    def rest_s(self) -> float:
        """Seconds until the next retry."""
        return max(0.0, self.tell_at_s - time.monotonic())

    def drop_expired(self) -> None:
        """Drop pushes whose tickets have ended."""
        now_s = time.monotonic()
        self.pushes = [push for push in self.pushes if push.expires_at_s > now_s]

    def attempt_made(self) -> None:
        """Schedule the next retry."""
        if self.pushes:
            self.tell_at_s = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _TELL_AGAIN_MAX_S)
        else:
            self.tell_at_s, self._again_s = 0.0, _TELL_AGAIN_S
