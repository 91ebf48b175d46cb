"""The receiving side of a transfer: grants tickets, lets bytes land in leased blocks only, verifies, reports."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kaveri.errors import ConfigError, TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.credit import CreditBook
from kaveri.kv.transfer.digest import Digest, DigestFactory, xxh3
from kaveri.kv.transfer.flow import ReceiverFlow
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX, Answer, Credit, GiveCredit, LinkLost, Listener, Transport
from kaveri.telemetry.logs import get_logger

CREDIT_BYTES = 128 << 20
"""What all senders together may have under way to a receiver. A window of 32 MiB for each of up to four is twice what
the largest writes of a transport need to go on without a pause."""
_LEAST_CREDIT_BYTES = 4 << 20
"""What each sender may have under way, however many there are. A push alone is up to a fifth slower with it than with
the largest window, on two busy cores."""


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """Every byte has arrived and every digest is right. The blocks belong to whoever was granted the ticket."""

    transfer_id: bytes
    kv_bytes: int
    note: bytes
    """What the sender gave to finish()."""


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """The transfer ended without landing, and nothing can write into its blocks any more: they may be reused."""

    transfer_id: bytes
    reason: str


LandingListener = Callable[[TransferLanded | TransferReleased], None]
"""Called on a thread of the receiver, once per granted ticket, in the order in which things happened."""


class KvReceiver:
    """Takes pushes into `pool`. Every method may be called from any thread but the listener's own calls to close().

    A granted transfer ends in exactly one event: landed, or released by a refusal, revoke(), expiry, the loss of its
    connection or close(). It is released only when fenced: while a link may write into its blocks it stays quarantined.

    listen: where to listen, best first, such as KvEndpoint("unix", path) and KvEndpoint("tcp", "127.0.0.1:0").
    epoch: this incarnation, [0, 2**64); differs from that of every former receiver at the same addresses.
    credit_bytes: what all senders together may have under way; see CreditBook. Each may have 4 MiB of it, or a quarter
    where that is less, and two blocks at the least, even when that makes more in all.
    Raises ConfigError when it cannot listen.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: LandingListener,
        *,
        listen: Sequence[KvEndpoint],
        epoch: int,
        transports: Sequence[Transport],
        digest: DigestFactory = xxh3,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self.digest = digest
        self._lock = threading.Lock()
        # Granted and neither landed nor released.
        self._landings: dict[bytes, PoolLanding] = {}
        # Of connections. Its lock is taken within no other, and none within it.
        self._credit_lock = threading.Lock()
        least_bytes = max(2 * pool.layout.block_bytes, min(_LEAST_CREDIT_BYTES, credit_bytes // 4))
        self._credit: CreditBook[SenderCredit] = CreditBook(credit_bytes, least_bytes)
        self._closed = False
        self._listeners: list[Listener] = []
        self._reporter = Reporter[TransferLanded | TransferReleased]("kv-receiver", listener)
        spoken = {transport.name: transport for transport in transports}
        try:
            for endpoint in listen:
                if endpoint.transport not in spoken:
                    raise ConfigError("kv transport", f"{endpoint.transport!r} is none of {', '.join(spoken)}")
                self._listeners.append(spoken[endpoint.transport].listen(endpoint.address, pool, self))
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where it listens, best first."""
        return tuple(listener.endpoint for listener in self._listeners)

    def grant(
        self,
        block_ids: Sequence[int],
        token_count: int,
        expires_in_s: float,
        *,
        first_block: int = 0,
        transfer_id: bytes = b"",
        secret: bytes = b"",
    ) -> Ticket:
        """Leases the blocks to one transfer: the receiver's own until TransferLanded or TransferReleased.

        transfer_id, secret: what all ranks of an instance call the transfer; empty for fresh ones. Raises
        TransferFailed when closed.
        """
        assert all(0 <= block < self.pool.block_count for block in block_ids), "a block outside the pool"
        ticket = Ticket(
            transfer_id=transfer_id or secrets.token_bytes(16),
            secret=secret or secrets.token_bytes(16),
            epoch=self.epoch,
            endpoints=self.endpoints,
            block_ids=tuple(block_ids),
            token_count=token_count,
            expires_in_s=expires_in_s,
            layout=self.pool.layout,
            first_block=first_block,
        )
        with self._lock:
            if self._closed:
                raise TransferFailed("the receiver is closed")
            self._landings[ticket.transfer_id] = PoolLanding(self, ticket)
        self._reporter.call_after(expires_in_s, partial(self._stop, ticket.transfer_id, "the ticket expired"))
        return ticket

    def revoke(self, transfer_id: bytes) -> None:
        """The transfer is not wanted any more. TransferReleased follows once its blocks are fenced; unknown ids are
        ignored."""
        self._stop(transfer_id, "revoked")

    def close(self) -> None:
        """Closes listeners and connections, releases what has not landed, ends threads. Idempotent."""
        with self._lock:
            self._closed = True
        for listener in self._listeners:
            listener.close()
        # No link is left, so nothing here is quarantined for long.
        with self._lock:
            waiting = tuple(self._landings.values())
        try:
            for landing in waiting:
                landing.abort("the receiver was closed")
        finally:
            self._reporter.close()

    def flow(self) -> ReceiverFlow:
        """What is under way."""
        with self._lock:
            leased = [(len(landing.ticket.block_ids), landing.is_stopped()) for landing in self._landings.values()]
        with self._credit_lock:
            return ReceiverFlow(
                sender_count=self._credit.sender_count,
                window_bytes=self._credit.window_bytes,
                held_bytes=self._credit.held_bytes,
                arriving_bytes=self._credit.arriving_bytes,
                leased_block_count=sum(count for count, _ in leased),
                quarantined_block_count=sum(count for count, stopped in leased if stopped),
            )

    def check_integrity(self) -> None:
        """Asserts that no credit is lost or made up, and that no more than the limit is given. Any time; says nothing
        of what senders believe that they have."""
        with self._credit_lock:
            self._credit.check_integrity()

    def admit(self, give: GiveCredit) -> "SenderCredit":
        """For transports; see Intake."""
        credit = SenderCredit(self, give)
        self.change_credit(lambda book: book.join(credit))
        return credit

    def spend_credit(self, credit: "SenderCredit", byte_count: int) -> bool:
        """For the credit of connections: whether there was so much of it."""
        with self._credit_lock:
            return self._credit.spend(credit, byte_count)

    def expect_credit(self, credit: "SenderCredit", byte_count: int) -> None:
        """For the credit of connections: so many bytes more are to come over one. Gives nothing."""
        with self._credit_lock:
            self._credit.expect(credit, byte_count)

    def change_credit(self, change: Callable[[CreditBook["SenderCredit"]], None]) -> None:
        """For the credit of connections: changes the account, and gives what can be given then."""
        with self._credit_lock:
            change(self._credit)
            granted = self._credit.grants()
        for credit, byte_count, window_bytes in granted:
            credit.give(byte_count, window_bytes)

    def open(self, transfer_id: bytes, secret: bytes, epoch: int, answer: Answer, credit: Credit) -> "PoolLanding":
        """For transports; see Intake."""
        with self._lock:
            landing = self._landings.get(transfer_id)
        # The epoch first: a ticket of a former life names a transfer that is unknown here for a reason worth telling.
        if epoch != self.epoch:
            reason = f"the ticket is of epoch {epoch}, this receiver of epoch {self.epoch}"
        elif landing is None:
            reason = "unknown, expired or ended transfer"
        elif not hmac.compare_digest(secret, landing.ticket.secret):
            reason = "wrong secret"
        elif not landing.claim(answer, credit):
            reason = "the ticket is in use already"
        else:
            return landing
        answer(transfer_id, reason)
        get_logger().warning("kv transfer refused", transfer_id=transfer_id.hex(), reason=reason)
        raise TransferFailed(reason)

    def conclude(self, event: TransferLanded | TransferReleased) -> None:
        """For landings: the transfer has ended, and its blocks are fenced."""
        with self._lock:
            del self._landings[event.transfer_id]
        self._reporter.report(event)

    def _stop(self, transfer_id: bytes, reason: str) -> None:
        with self._lock:
            landing = self._landings.get(transfer_id)
        if landing is not None:
            landing.abort(reason)


class SenderCredit:
    """The credit of one connection; see Credit."""

    def __init__(self, receiver: KvReceiver, give: GiveCredit) -> None:
        self.give = give
        self._receiver = receiver
        self._is_closed = False

    def spend(self, byte_count: int) -> None:
        """See Credit.spend."""
        if not self._receiver.spend_credit(self, byte_count):
            raise LinkLost(f"protocol error: {byte_count} bytes beyond the sender's credit")

    def settle(self, byte_count: int) -> None:
        """See Credit.settle."""
        self._receiver.change_credit(lambda book: book.settle(self, byte_count))

    def expect(self, byte_count: int) -> None:
        """See Credit.expect."""
        if byte_count:
            self._receiver.change_credit(lambda book: book.expect(self, byte_count))

    def arrived(self, byte_count: int) -> None:
        """See Credit.arrived."""
        self._receiver.expect_credit(self, -byte_count)

    def close(self) -> None:
        """See Credit.close."""
        if not self._is_closed:
            self._is_closed = True
            self._receiver.change_credit(lambda book: book.leave(self))


class PoolLanding:
    """One granted transfer; see Landing. A link's thread brings it on, any thread may stop it.

    granted ── claim ── [begin_write ── end_write]* ── finish: landed
       └────────┴────────────┴───────────── abort: stopped ── fenced: released

    Fenced: no link is within a write, nor holds the blocks for a sender that writes by itself.
    """

    def __init__(self, receiver: KvReceiver, ticket: Ticket) -> None:
        self.ticket = ticket
        self._expires_at_s = time.monotonic() + ticket.expires_in_s
        self._receiver = receiver
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._credit: Credit | None = None
        # Bytes that its connection was told to expect, and that have not arrived.
        self._due_bytes = 0
        # Per layer: blocks [0, arrived) are there and in the digest.
        self._arrived = [0] * ticket.layout.layer_count
        self._digests = [receiver.digest() for _ in self._arrived]
        # Layers whose digest is still to come.
        self._unverified = set(range(ticket.layout.layer_count)) if ticket.block_ids else set()
        # The run that a link may be writing: its layer, and the index behind its last block.
        self._writing: tuple[int, int] | None = None
        # A sender may write by itself.
        self._held = False
        self._stopped = False
        self._reason = ""
        self._ended = False

    def claim(self, answer: Answer, credit: Credit) -> bool:
        """Binds the transfer to one link. False when it is bound already or has ended."""
        with self._lock:
            if self._answer is not None or self._stopped or self._ended:
                return False
            self._answer, self._credit = answer, credit
            due_bytes = self._due_bytes = self._all_bytes
        credit.expect(due_bytes)
        return True

    def begin_write(self, layer: int, first_index: int, block_count: int) -> tuple[Sequence[int], Digest]:
        """See Landing.begin_write."""
        with self._lock:
            self._require_live()
            end = first_index + block_count
            if not 0 <= layer < len(self._arrived):
                problem = f"layer {layer} of {len(self._arrived)}"
            elif end > len(self.ticket.block_ids):
                problem = f"layer {layer}: block {end - 1} of {len(self.ticket.block_ids)}"
            elif first_index != self._arrived[layer]:
                problem = f"layer {layer}: block {first_index} came where block {self._arrived[layer]} was due"
            else:
                self._writing = (layer, end)
                return self.ticket.block_ids[first_index:end], self._digests[layer]
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
            layer, end = self._writing
            self._writing = None
            if self._stopped and not self._held:
                self._end(self._released())
            byte_count = (end - self._arrived[layer]) * self.ticket.layout.block_bytes
            self._arrived[layer] = end
            self._require_live()
            self._due_bytes -= byte_count
        assert self._credit is not None, "a write of a transfer that no link has claimed"
        self._credit.arrived(byte_count)

    def end_layer(self, layer: int, sender_digest: int) -> None:
        """See Landing.end_layer."""
        with self._lock:
            self._require_live()
            if layer not in self._unverified:
                problem = f"a digest for layer {layer}, which is due none"
            elif self._arrived[layer] != len(self.ticket.block_ids):
                problem = f"layer {layer} is incomplete: {self._arrived[layer]} of {len(self.ticket.block_ids)} blocks"
            elif self._digests[layer].intdigest() != sender_digest:
                problem = f"layer {layer}: wrong digest"
            else:
                self._unverified.remove(layer)
                return
        raise self._refuse(problem)

    def finish(self, note: bytes) -> None:
        """See Landing.finish."""
        with self._lock:
            self._require_live()
            problem = f"{len(self._unverified)} layers are incomplete at the end" if self._unverified else None
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
        get_logger().info("kv transfer ended", transfer_id=self.ticket.transfer_id.hex(), reason=reason)

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
        self._receiver.conclude(event)

    def _released(self) -> TransferReleased:
        return TransferReleased(self.ticket.transfer_id, self._reason)

    def _tell(self, rejection: str | None) -> None:
        if self._answer is not None:
            self._answer(self.ticket.transfer_id, rejection)
