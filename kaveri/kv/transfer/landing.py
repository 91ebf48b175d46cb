"""One granted transfer on the receiving side: what has arrived, whether it is right, and when its blocks are fenced."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest, DigestFactory
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX, Answer, Credit
from kaveri.telemetry.logs import get_logger


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """Every byte has arrived and every digest is right. The blocks belong to the owner of the ticket."""

    transfer_id: bytes
    kv_bytes: int
    note: bytes
    """What the sender gave to finish()."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """The transfer ended without landing, and nothing can write into its blocks any more: they may be reused."""

    transfer_id: bytes
    reason: str


class PoolLanding:
    """One granted transfer; see Landing. A link's thread brings it on, any thread may stop it.

    granted ── claim ── [begin_write ── end_write]* ── finish: landed
       └────────┴────────────┴───────────── abort: stopped ── fenced: released

    Fenced: no link is within a write, nor holds the blocks for a sender that writes by itself.
    """

    def __init__(
        self,
        ticket: Ticket,
        pool: KvPool,
        digest: DigestFactory,
        conclude: Callable[[TransferLanded | TransferReleased], None],
    ) -> None:
        """pool: what the ticket's blocks are of. conclude: called once, under the landing's lock, when the transfer has
        ended and its blocks are fenced."""
        self.ticket = ticket
        self.pool = pool
        self._expires_at_s = time.monotonic() + ticket.expires_in_s
        self._conclude = conclude
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._credit: Credit | None = None
        # Bytes that its connection expects and that have not arrived.
        self._due_bytes = 0
        # Per layer: blocks [0, arrived) are there and in the digest.
        self._arrived = [0] * ticket.layout.layer_count
        # Of all bytes, in the order in which they came; None where the sender sends none.
        self._digest: Digest | None = digest()
        # The run that a link may be writing: its layers, and the index behind its last block.
        self._writing: tuple[range, int] | None = None
        # A sender may write by itself.
        self._held = False
        self._stopped = False
        self._reason = ""
        self._ended = False

    def claim(self, answer: Answer, credit: Credit, with_digest: bool) -> bool:
        """Binds the transfer to one link. False when it is bound already or has ended.

        with_digest: the sender sends a digest of all bytes.
        """
        with self._lock:
            if self._answer is not None or self._stopped or self._ended:
                return False
            self._answer, self._credit = answer, credit
            if not with_digest:
                self._digest = None
            due_bytes = self._due_bytes = self._all_bytes
        credit.expect(due_bytes)
        return True

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        """See Landing.begin_write."""
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
        """See Landing.hold."""
        with self._lock:
            self._require_live()
            self._held = True

    def fence(self) -> None:
        """See Landing.fence."""
        with self._lock:
            self._held = False
            if self._stopped and not self._ended and self._writing is None:
                self._end(self._released())

    def is_stopped(self) -> bool:
        """See Landing.is_stopped."""
        return self._stopped

    def end_write(self) -> None:
        """See Landing.end_write."""
        with self._lock:
            assert self._writing is not None, "end_write without begin_write"
            layers, end = self._writing
            self._writing = None
            if self._stopped and not self._held:
                self._end(self._released())
            byte_count = len(layers) * (end - self._arrived[layers.start]) * self.ticket.layout.block_bytes
            for layer in layers:
                self._arrived[layer] = end
            self._require_live()
            self._due_bytes -= byte_count
        assert self._credit is not None, "a write of a transfer that no link has claimed"
        self._credit.arrived(byte_count)

    def finish(self, note: bytes, sender_digest: int = 0) -> None:
        """See Landing.finish."""
        with self._lock:
            self._require_live()
            problem = None
            incomplete = sum(arrived < len(self.ticket.block_ids) for arrived in self._arrived)
            if incomplete:
                problem = f"{incomplete} layers are incomplete at the end"
            elif self._digest is not None and self.ticket.block_ids and self._digest.intdigest() != sender_digest:
                problem = "wrong digest"
            # A process that stood still takes in what waited before its timers run, and its sender has given it up.
            if time.monotonic() > self._expires_at_s:
                problem = "the ticket expired"
            if len(note) > NOTE_BYTES_MAX:
                problem = f"a note of {len(note)} bytes"
            if problem is None:
                self._end(TransferLanded(self.ticket.transfer_id, self._all_bytes, note))
        if problem is not None:
            raise self._refuse(problem)
        self._tell(None)

    def abort(self, reason: str) -> None:
        """See Landing.abort; for revocation and expiry too."""
        with self._lock:
            if self._stopped or self._ended:
                return
            self._stopped, self._reason = True, reason
            due_bytes, self._due_bytes = self._due_bytes, 0
            if self._writing is None and not self._held:
                self._end(self._released())
        if self._credit is not None:
            self._credit.expect(-due_bytes)
        self._tell(reason)
        get_logger().info("kv_transfer_ended", transfer_id=self.ticket.transfer_id.hex(), reason=reason)

    @property
    def _all_bytes(self) -> int:
        return len(self._arrived) * len(self.ticket.block_ids) * self.ticket.layout.block_bytes

    def _refuse(self, problem: str) -> TransferFailed:
        self.abort(problem)
        return TransferFailed(problem)

    def _require_live(self) -> None:
        if self._stopped or self._ended:
            raise TransferFailed("the transfer has ended")

    def _end(self, event: TransferLanded | TransferReleased) -> None:
        self._ended = True
        self._conclude(event)

    def _released(self) -> TransferReleased:
        return TransferReleased(self.ticket.transfer_id, self._reason)

    def _tell(self, rejection: str | None) -> None:
        if self._answer is not None:
            self._answer(self.ticket.transfer_id, rejection)
