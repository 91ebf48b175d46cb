"""One granted transfer on the receiving side: what has arrived, its verification, and the fencing of its blocks."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest, DigestFactory
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX, Answer, Credit, Progress
from kaveri.telemetry.logs import get_logger


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """Every byte has arrived and every digest is right. The blocks belong to the owner of the ticket."""

    transfer_id: bytes
    kv_bytes: int
    note: bytes
    """The sender's argument of finish()."""


@dataclass(frozen=True, slots=True)
class TransferMarked:
    """Blocks [0, block_count) of an open transfer have arrived in every layer, and are verified. They stay valid even
    if the rest of the transfer fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""
    note: bytes
    """The sender's argument of mark()."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """The transfer ended without landing, and nothing can write into its blocks any more: they may be reused. Marked
    blocks still hold what was marked."""

    transfer_id: bytes
    reason: str
    given_up: bool = False
    """True if the sender cancelled it. Otherwise the sender or its link is gone, or this side ended it."""


TransferEvent = TransferLanded | TransferMarked | TransferReleased
Report = Callable[[TransferEvent], None]


class PoolLanding:
    """One granted transfer; see Landing. A link's thread advances it, any thread may stop it.

    granted ── claim ── [begin_write ── end_write, mark]* ── finish: landed
       └────────┴────────────┴────────────────── abort: stopped ── fenced: released

    Fenced: no link is within a write, nor holds the blocks for a sender that writes by itself.
    """

    def __init__(
        self,
        ticket: Ticket,
        pool: KvPool,
        digest: DigestFactory,
        report: Report,
    ) -> None:
        """pool: contains the ticket's blocks. report: called under the landing's lock, when a mark is kept, and last
        when the transfer has ended and its blocks are fenced."""
        self.ticket = ticket
        """Includes the blocks that extend() has added."""
        self.pool = pool
        self._expires_at_s = time.monotonic() + ticket.expires_in_s
        self._report = report
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._credit: Credit | None = None
        self._progress: Progress | None = None
        # The ticket's blocks as its sender knows them before the transfer is open.
        self._granted_count = len(ticket.block_ids)
        # Blocks [0, marked) are verified.
        self._marked_count = 0
        # Bytes that its connection expects and that have not arrived.
        self._due_bytes = 0
        # Per layer: blocks [0, arrived) have arrived and are in the digest.
        self._arrived = [0] * ticket.layout.layer_count
        # Digest of all bytes, in the order of arrival; None if the sender sends none.
        self._digest: Digest | None = digest()
        # The run that a link may be writing: its layers, and the index after its last block.
        self._writing: tuple[range, int] | None = None
        # A one-sided sender may write.
        self._held = False
        # The outcome once it is fenced. Nothing more is accepted.
        self._stopped: TransferReleased | None = None
        self._ended = False

    def claim(self, answer: Answer, credit: Credit, with_digest: bool, progress: Progress | None = None) -> bool:
        """Bind the transfer to one link. False if it is bound already or has ended.

        with_digest: the sender sends a digest of all bytes. progress: needed for an open transfer.
        """
        with self._lock:
            if self._answer is not None or self._stopped or self._ended:
                return False
            self._answer, self._credit, self._progress = answer, credit, progress
            if not with_digest:
                self._digest = None
            due_bytes = self._due_bytes = self._bytes_of(len(self.ticket.block_ids))
            self._tell_extension(self._granted_count)
        credit.expect(due_bytes)
        return True

    def extend(self, block_ids: Sequence[int]) -> bool:
        """Give an open transfer more destination blocks, and notify its sender. False if it has ended or was stopped:
        the caller keeps the blocks then. Any thread."""
        assert self.ticket.is_open, "only an open transfer is extended"
        with self._lock:
            if self._stopped or self._ended:
                return False
            first_index = len(self.ticket.block_ids)
            self.ticket = replace(self.ticket, block_ids=(*self.ticket.block_ids, *block_ids))
            credit = self._credit
            if credit is not None:
                self._due_bytes += self._bytes_of(len(block_ids))
                # Under the lock: the sender must receive extensions in order.
                self._tell_extension(first_index)
        if credit is not None:
            credit.expect(self._bytes_of(len(block_ids)))
        return True

    def left_s(self) -> float:
        """Seconds until it expires, counted from its last mark, or from its grant."""
        return self._expires_at_s - time.monotonic()

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        with self._lock:
            self._require_live()
            end = first_index + block_count
            problem = None
            if not (layers and layers.stop <= len(self._arrived)):
                problem = f"layer {layers.stop - 1} of {len(self._arrived)}"
            elif end > len(self.ticket.block_ids):
                problem = f"layer {layers.start}: block {end - 1} of {len(self.ticket.block_ids)}"
            else:
                for layer in layers:
                    if first_index != self._arrived[layer]:
                        due = self._arrived[layer]
                        problem = f"layer {layer}: block {first_index} came where block {due} was due"
            if problem is None:
                self._writing = (layers, end)
                return self.ticket.block_ids[first_index:end], self._digest
        raise self._refuse(problem)

    def hold(self) -> None:
        with self._lock:
            self._require_live()
            self._held = True

    def fence(self) -> None:
        with self._lock:
            self._held = False
            if self._stopped and not self._ended and self._writing is None:
                self._end(self._stopped)

    def is_stopped(self) -> bool:
        return self._stopped is not None

    def end_write(self) -> None:
        with self._lock:
            assert self._writing is not None, "end_write without begin_write"
            layers, end = self._writing
            self._writing = None
            if self._stopped and not self._held:
                self._end(self._stopped)
            byte_count = len(layers) * (end - self._arrived[layers.start]) * self.ticket.layout.block_bytes
            for layer in layers:
                self._arrived[layer] = end
            self._require_live()
            self._due_bytes -= byte_count
        assert self._credit is not None, "a write of a transfer that no link has claimed"
        self._credit.arrived(byte_count)

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        progress = self._progress
        with self._lock:
            self._require_live()
            arrived_count = min(self._arrived)
            if not self.ticket.is_open or progress is None:
                problem: str | None = "a mark in a transfer that is not open"
            elif not self._marked_count < block_count <= arrived_count:
                problem = f"a mark at block {block_count}, behind {self._marked_count} marked and {arrived_count} there"
            else:
                problem = self._problem(note, sender_digest)
            if problem is None:
                self._marked_count = block_count
                self._expires_at_s = time.monotonic() + self.ticket.expires_in_s
                self._report(TransferMarked(self.ticket.transfer_id, block_count, note))
        if problem is not None:
            raise self._refuse(problem)
        assert progress is not None
        progress.marked(self.ticket.transfer_id, block_count)

    def finish(self, note: bytes, sender_digest: int = 0) -> None:
        due_bytes = 0
        with self._lock:
            self._require_live()
            # An open transfer may end with fewer blocks than it was granted, the same in every layer.
            block_count = max(self._arrived) if self.ticket.is_open else len(self.ticket.block_ids)
            incomplete = sum(arrived < block_count for arrived in self._arrived)
            if incomplete:
                problem: str | None = f"{incomplete} layers are incomplete at the end"
            else:
                problem = self._problem(note, sender_digest)
            if problem is None:
                due_bytes, self._due_bytes = self._due_bytes, 0
                self._end(TransferLanded(self.ticket.transfer_id, self._bytes_of(block_count), note))
        if problem is not None:
            raise self._refuse(problem)
        if self._credit is not None and due_bytes:
            self._credit.expect(-due_bytes)
        if self._answer is not None:
            self._answer(self.ticket.transfer_id, None)

    def abort(self, reason: str, *, given_up: bool = False) -> None:
        """See Landing.abort; for revocation and expiry too."""
        with self._lock:
            if self._stopped or self._ended:
                return
            self._stopped = TransferReleased(self.ticket.transfer_id, reason, given_up)
            due_bytes, self._due_bytes = self._due_bytes, 0
            if self._writing is None and not self._held:
                self._end(self._stopped)
        if self._credit is not None:
            self._credit.expect(-due_bytes)
        if self._answer is not None:
            self._answer(self.ticket.transfer_id, reason)
        get_logger().info("kv_transfer_ended", transfer_id=self.ticket.transfer_id.hex(), reason=reason)

    def _problem(self, note: bytes, sender_digest: int) -> str | None:
        """Return what is wrong with all that has arrived, at a mark or at the end; None if nothing is."""
        problem = None
        if self._digest is not None and self.ticket.block_ids and self._digest.intdigest() != sender_digest:
            problem = "wrong digest"
        # A stalled process handles queued input before its timers run, and its sender has given up by then.
        if time.monotonic() > self._expires_at_s:
            problem = "the ticket expired"
        if len(note) > NOTE_BYTES_MAX:
            problem = f"a note of {len(note)} bytes"
        return problem

    def _bytes_of(self, block_count: int) -> int:
        return len(self._arrived) * block_count * self.ticket.layout.block_bytes

    def _tell_extension(self, first_index: int) -> None:
        block_ids = self.ticket.block_ids[first_index:]
        if block_ids:
            assert self._progress is not None, "an open transfer without a way to tell its sender"
            self._progress.extended(self.ticket.transfer_id, first_index, block_ids)

    def _refuse(self, problem: str) -> TransferFailed:
        self.abort(problem)
        return TransferFailed(problem)

    def _require_live(self) -> None:
        if self._stopped or self._ended:
            raise TransferFailed("the transfer has ended")

    def _end(self, event: TransferLanded | TransferReleased) -> None:
        self._ended = True
        self._report(event)
