"""Landing: the receiving side of one granted transfer. Tracks and verifies arrived blocks; fences them at its end."""

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
    """Event of a transfer, on the receiver: all bytes have arrived and all digests match. The blocks return to the
    caller of lease()."""

    transfer_id: bytes
    kv_bytes: int
    note: bytes
    """The sender's argument of finish()."""


@dataclass(frozen=True, slots=True)
class TransferMarked:
    """Event of an open (growing) transfer, on the receiver: its sender has marked blocks [0, block_count), which have
    arrived in every layer and are verified. They stay valid even if the rest of the transfer fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""
    note: bytes
    """The sender's argument of mark()."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """Event of a transfer, on the receiver: ended without landing. Nothing can write into its blocks any more, so they
    may be reused; those that a TransferMarked reported keep their content."""

    transfer_id: bytes
    reason: str
    given_up: bool = False
    """True if the sender cancelled it. Otherwise the sender or its link is gone, or this side ended it."""


TransferEvent = TransferLanded | TransferMarked | TransferReleased
LandingListener = Callable[[TransferEvent], None]
"""Receives, on a thread of the receiver and in order, an open transfer's marks and each granted ticket's end."""


class TicketReceiver(Protocol):
    """Interface of a receiver of pushes: KvReceiver (receiver.py), or a substitute in simulations."""

    @property
    def epoch(self) -> int:
        """Incarnation number of the receiver, different in each run of its process."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses where it listens for senders, in order of preference."""

    def lease(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Reserve a ticket's blocks for its transfer. parts: one ticket for each pair of ranks, if several. Raises
        TransferFailed when closed."""

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """Add destination blocks to an open transfer. Returns False if it has ended: the caller keeps the blocks."""

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a granted transfer."""

    def flow(self) -> ReceiverFlow:
        """Return a flow-control snapshot of the granted transfers."""

    def close(self) -> None:
        """End all transfers and stop listening. Idempotent."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Connection that carries a transfer's bytes to the receiver: its callbacks, credit and digest."""

    answer: Answer
    credit: Credit
    digest: Digest | None
    """Digest of all bytes, in the order of arrival; None if the sender sends none."""
    progress: Progress | None
    """Needed for an open transfer."""


@dataclass(slots=True)
class _Extent:
    """Destination blocks of a transfer, and how many of them have arrived."""

    block_ids: list[int]
    """Destination blocks, those of extensions included."""
    arrived: list[int]
    """Per layer: blocks [0, arrived) have arrived and are in the digest."""
    marked_count: int = 0
    """Blocks [0, marked_count) are verified."""


class PoolLanding:
    """Receiving side of one granted transfer into `pool`; implements transport.Landing. Advanced by its connection's
    thread; any thread may abort it. report: called with its events, under the landing's lock.

    granted ── claim ── [begin_write ── end_write, mark]* ── finish: landed
       └────────┴────────────┴────────────────── abort: stopped ── fenced: released

    Fenced: the connection's thread is not writing, and a one-sided sender cannot write into the blocks.
    """

    def __init__(self, ticket: Ticket, pool: KvPool, report: LandingListener) -> None:
        self.ticket = ticket
        """Ticket as granted, without extensions."""
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
        """Number of the transfer's destination blocks per layer, extensions included."""
        return len(self._extent.block_ids)

    def claim(self, claim: Claim) -> bool:
        """Bind the transfer to one connection. Returns False if it is bound already or has ended."""
        with self._lock:
            if self._claim is not None or self._outcome is not None:
                return False
            self._claim = claim
            due_bytes = self._due_bytes()
            self._tell_extension(len(self.ticket.block_ids))
        claim.credit.expect(due_bytes)
        return True

    def extend(self, block_ids: Sequence[int]) -> bool:
        """Add destination blocks to an open transfer, and notify its sender. Returns False if it has ended: the caller
        keeps the blocks. Any thread."""
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
            claim = self._claim
        if claim is not None:
            claim.credit.expect(due_bytes)
        return True

    def left_s(self) -> float:
        """Seconds until the transfer expires, counted from its last mark, or from its grant."""
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
        """Cancel the transfer and answer its sender. given_up: True if the sender itself cancelled it. Idempotent."""
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
        # None if all that has arrived is right, at a mark or at the end.
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
