"""One granted transfer on the receiving side: what has arrived, its verification, and the fencing of its blocks."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.flow import ReceiverFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
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
LandingListener = Callable[[TransferEvent], None]
"""Called on a thread of the receiver, in the order of events: once with the end of each granted ticket, and before that
once with each mark of an open transfer."""


class TicketReceiver(Protocol):
    """Interface of what takes pushes: a KvReceiver (receiver.py), or a stand-in. See there for its methods."""

    @property
    def epoch(self) -> int:
        """This incarnation."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses it listens at, best first."""

    def lease(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Lease a ticket's blocks to its transfer. Raises TransferFailed when closed."""

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """Give an open transfer more blocks. False if it has ended: the caller keeps them."""

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a transfer."""

    def flow(self) -> ReceiverFlow:
        """Snapshot of the landings under way."""

    def close(self) -> None:
        """End all transfers. Idempotent."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The link that brings a transfer."""

    answer: Answer
    credit: Credit
    digest: Digest | None
    """Digest of all bytes, in the order of arrival; None if the sender sends none."""
    progress: Progress | None
    """Needed for an open transfer."""


@dataclass(slots=True)
class _Extent:
    """Blocks of a transfer, by their index in it."""

    block_ids: list[int]
    """Destination blocks, those of extensions included."""
    arrived: list[int]
    """Per layer: blocks [0, arrived) have arrived and are in the digest."""
    marked_count: int = 0
    """Blocks [0, marked_count) are verified."""


class PoolLanding:
    """One granted transfer; see Landing. A link's thread advances it, any thread may stop it.

    granted ── claim ── [begin_write ── end_write, mark]* ── finish: landed
       └────────┴────────────┴────────────────── abort: stopped ── fenced: released

    Fenced: no link is within a write, nor holds the blocks for a sender that writes by itself.
    """

    def __init__(self, ticket: Ticket, pool: KvPool, report: LandingListener) -> None:
        """pool: contains the ticket's blocks. report: called under the landing's lock, when a mark is kept, and last
        when the transfer has ended and its blocks are fenced."""
        self.ticket = ticket
        """As it was granted."""
        self.pool = pool
        self._expires_at_s = time.monotonic() + ticket.expires_in_s
        self._report = report
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self._extent = _Extent(list(ticket.block_ids), [0] * ticket.layout.layer_count)
        # The run that a link may be writing: its layers, and the index after its last block.
        self._writing: tuple[range, int] | None = None
        # A one-sided sender may write.
        self._held = False
        # Nothing more is accepted. A release is reported once it is fenced.
        self._outcome: TransferLanded | TransferReleased | None = None

    @property
    def block_count(self) -> int:
        """Destination blocks, those of extensions included."""
        return len(self._extent.block_ids)

    def claim(self, claim: Claim) -> bool:
        """Bind the transfer to one link. False if it is bound already or has ended."""
        with self._lock:
            if self._claim is not None or self._outcome is not None:
                return False
            self._claim = claim
            due_bytes = self._due_bytes()
            self._tell_extension(len(self.ticket.block_ids))
        claim.credit.expect(due_bytes)
        return True

    def extend(self, block_ids: Sequence[int]) -> bool:
        """Give an open transfer more destination blocks, and notify its sender. False if it has ended or was stopped:
        the caller keeps the blocks then. Any thread."""
        assert self.ticket.is_open, "only an open transfer is extended"
        assert all(0 <= block < self.pool.block_count for block in block_ids), "a block outside the pool"
        with self._lock:
            if self._outcome is not None:
                return False
            first_index, due_bytes = len(self._extent.block_ids), self._due_bytes()
            self._extent.block_ids += block_ids
            due_bytes = self._due_bytes() - due_bytes
            # Under the lock: the sender must receive extensions in order.
            self._tell_extension(first_index)
        if self._claim is not None:
            self._claim.credit.expect(due_bytes)
        return True

    def left_s(self) -> float:
        """Seconds until it expires, counted from its last mark, or from its grant."""
        return self._expires_at_s - time.monotonic()

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        with self._lock:
            self._require_live()
            block_ids, arrived = self._extent.block_ids, self._extent.arrived
            end = first_index + block_count
            problem = None
            if not (layers and layers.stop <= len(arrived)):
                problem = f"layer {layers.stop - 1} of {len(arrived)}"
            elif end > len(block_ids):
                problem = f"layer {layers.start}: block {end - 1} of {len(block_ids)}"
            else:
                for layer in layers:
                    if first_index != arrived[layer]:
                        problem = f"layer {layer}: block {first_index} came where block {arrived[layer]} was due"
            if problem is None:
                self._writing = (layers, end)
                return block_ids[first_index:end], self._claim.digest if self._claim is not None else None
        raise self._refuse(problem)

    def hold(self) -> None:
        with self._lock:
            self._require_live()
            self._held = True

    def fence(self) -> None:
        with self._lock:
            was_held, self._held = self._held, False
            if was_held and self._outcome is not None and self._writing is None:
                self._report(self._outcome)

    def is_stopped(self) -> bool:
        return isinstance(self._outcome, TransferReleased)

    def end_write(self) -> None:
        with self._lock:
            assert self._writing is not None, "end_write without begin_write"
            layers, end = self._writing
            self._writing = None
            if self._outcome is not None and not self._held:
                self._report(self._outcome)
            self._require_live()
            arrived = self._extent.arrived
            byte_count = len(layers) * (end - arrived[layers.start]) * self.ticket.layout.block_bytes
            for layer in layers:
                arrived[layer] = end
        assert self._claim is not None, "a write of a transfer that no link has claimed"
        self._claim.credit.arrived(byte_count)

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        progress = self._claim.progress if self._claim is not None else None
        with self._lock:
            self._require_live()
            marked_count, arrived_count = self._extent.marked_count, min(self._extent.arrived)
            if not self.ticket.is_open or progress is None:
                problem: str | None = "a mark in a transfer that is not open"
            elif not marked_count < block_count <= arrived_count:
                problem = f"a mark at block {block_count}, behind {marked_count} marked and {arrived_count} there"
            else:
                problem = self._problem(note, sender_digest)
            if problem is None:
                self._extent.marked_count = block_count
                self._expires_at_s = time.monotonic() + self.ticket.expires_in_s
                self._report(TransferMarked(self.ticket.transfer_id, block_count, note))
        if problem is not None:
            raise self._refuse(problem)
        assert progress is not None
        progress.marked(self.ticket.transfer_id, block_count)

    def finish(self, note: bytes, sender_digest: int = 0) -> None:
        with self._lock:
            self._require_live()
            arrived = self._extent.arrived
            # An open transfer may end with fewer blocks than it was granted, the same in every layer.
            block_count = max(arrived) if self.ticket.is_open else len(self._extent.block_ids)
            incomplete = sum(each < block_count for each in arrived)
            if incomplete:
                problem: str | None = f"{incomplete} layers are incomplete at the end"
            else:
                problem = self._problem(note, sender_digest)
            if problem is None:
                kv_bytes, due_bytes = sum(arrived) * self.ticket.layout.block_bytes, self._due_bytes()
                self._held = False
                self._outcome = TransferLanded(self.ticket.transfer_id, kv_bytes, note)
                self._report(self._outcome)
        if problem is not None:
            raise self._refuse(problem)
        if self._claim is not None:
            if due_bytes:
                self._claim.credit.expect(-due_bytes)
            self._claim.answer(self.ticket.transfer_id, None)

    def abort(self, reason: str, *, given_up: bool = False) -> None:
        """See Landing.abort; for revocation and expiry too."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = TransferReleased(self.ticket.transfer_id, reason, given_up)
            due_bytes = self._due_bytes()
            if self._writing is None and not self._held:
                self._report(self._outcome)
        if self._claim is not None:
            self._claim.credit.expect(-due_bytes)
            self._claim.answer(self.ticket.transfer_id, reason)
        get_logger().info("kv_transfer_ended", transfer_id=self.ticket.transfer_id.hex(), reason=reason)

    def _problem(self, note: bytes, sender_digest: int) -> str | None:
        """Return what is wrong with all that has arrived, at a mark or at the end; None if nothing is."""
        problem, digest = None, self._claim.digest if self._claim is not None else None
        if digest is not None and self._extent.block_ids and digest.intdigest() != sender_digest:
            problem = "wrong digest"
        # A stalled process handles queued input before its timers run, and its sender has given up by then.
        if time.monotonic() > self._expires_at_s:
            problem = "the ticket expired"
        if len(note) > NOTE_BYTES_MAX:
            problem = f"a note of {len(note)} bytes"
        return problem

    def _due_bytes(self) -> int:
        """Bytes that have not arrived."""
        arrived = self._extent.arrived
        return (len(arrived) * len(self._extent.block_ids) - sum(arrived)) * self.ticket.layout.block_bytes

    def _tell_extension(self, first_index: int) -> None:
        block_ids = self._extent.block_ids[first_index:]
        if block_ids and self._claim is not None:
            assert self._claim.progress is not None, "an open transfer without a way to tell its sender"
            self._claim.progress.extended(self.ticket.transfer_id, first_index, block_ids)

    def _refuse(self, problem: str) -> TransferFailed:
        self.abort(problem)
        return TransferFailed(problem)

    def _require_live(self) -> None:
        if self._outcome is not None:
            raise TransferFailed("the transfer has ended")
