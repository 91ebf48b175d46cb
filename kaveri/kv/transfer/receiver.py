"""The receiving side of a transfer: grants tickets, lets bytes land in leased blocks only, verifies, reports."""

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kaveri.errors import ConfigError, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.layout.regions import merge_parts
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.credit import SenderCredit, SharedCredit
from kaveri.kv.transfer.digest import DigestFactory, Digests, xxh3
from kaveri.kv.transfer.flow import ReceiverFlow
from kaveri.kv.transfer.landing import (
    PoolLanding,
    TransferEvent,
    TransferLanded,
    TransferMarked,
    TransferReleased,
)
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Answer, Capabilities, Credit, GiveCredit, Listener, Progress, Transport
from kaveri.telemetry.logs import get_logger

CREDIT_BYTES = 128 << 20
"""Bytes that all senders together may have in flight to a receiver. A window of 32 MiB for each of up to four is twice
what the largest writes of a transport need to proceed without a pause."""
_LEAST_CREDIT_BYTES = 4 << 20
"""Bytes that each sender may have in flight, however many there are. A push alone is up to a fifth slower with it than
with the largest window, on two busy cores."""


__all__ = [
    "KvReceiver",
    "LandingListener",
    "ReceiverOptions",
    "TransferEvent",
    "TransferLanded",
    "TransferMarked",
    "TransferReleased",
]

LandingListener = Callable[[TransferEvent], None]
"""Called on a thread of the receiver, in the order of events: once with the end of each granted ticket, and before that
once with each mark of an open transfer."""


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """A receiver's options that an operator sets; see KvReceiver."""

    credit_bytes: int = CREDIT_BYTES
    digests: Digests = Digests.AUTO


class KvReceiver:
    """Takes pushes into `pool`. Every method may be called from any thread but the listener's own calls to close().

    A granted transfer ends in exactly one event: landed, or released by a refusal, revoke(), expiry, the loss of its
    connection or close(). It is released only when fenced: while a link may write into its blocks it stays quarantined.

    An open transfer (grant(is_open=True)) may be marked by its sender, which is a TransferMarked here, and extended by
    this side. Its time limit counts from its last mark.

    listen: where to listen, best first, such as KvEndpoint("unix", path) and KvEndpoint("tcp", "127.0.0.1:0"). epoch:
    this incarnation, [0, 2**64); differs from that of every former receiver at the same addresses. digests: which
    transfers are verified by a digest of all their bytes; senders learn it when they connect. credit_bytes: what all
    senders together may have in flight, in bytes; see CreditBook. Each may have 4 MiB of it, or a quarter where that is
    less, and at least two blocks, even when that makes more in all. Raises ConfigError when it cannot listen.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: LandingListener,
        *,
        listen: Sequence[KvEndpoint],
        epoch: int,
        transports: Sequence[Transport],
        digests: Digests = Digests.AUTO,
        digest: DigestFactory = xxh3,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self._digests = digests
        self._digest = digest
        self._lock = threading.Lock()
        # Granted and neither landed nor released.
        self._landings: dict[bytes, PoolLanding] = {}
        # The pool in smaller blocks, by their number of heads.
        self._split: dict[int, KvPool] = {}
        least_bytes = max(2 * pool.layout.block_bytes, min(_LEAST_CREDIT_BYTES, credit_bytes // 4))
        self._credit = SharedCredit(credit_bytes, least_bytes)
        self._closed = False
        self._listeners: list[Listener] = []
        self._reporter = Reporter[TransferEvent]("kv-receiver", listener)
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
        """Addresses it listens at, best first."""
        return tuple(listener.endpoint for listener in self._listeners)

    def grant(
        self,
        block_ids: Sequence[int],
        token_count: int,
        expires_in_s: float,
        *,
        first_block: int = 0,
        part: KvLayout | None = None,
        is_open: bool = False,
    ) -> Ticket:
        """Make a ticket for one transfer into these blocks, and lease them to it; see lease().

        part: layout of a block, if the transfer brings some of the heads. is_open: the transfer may be marked,
        extended, and end with fewer blocks. Raises TransferFailed when closed.
        """
        ticket = Ticket(
            transfer_id=secrets.token_bytes(16),
            secret=secrets.token_bytes(16),
            epoch=self.epoch,
            endpoints=self.endpoints,
            block_ids=tuple(block_ids),
            token_count=token_count,
            expires_in_s=expires_in_s,
            layout=part or self.pool.layout,
            first_block=first_block,
            is_open=is_open,
        )
        self.lease(ticket)
        return ticket

    def lease(self, ticket: Ticket) -> None:
        """Lease a ticket's blocks to its transfer: they are the receiver's until TransferLanded or TransferReleased.

        The blocks of a ticket for some of the heads are those of the pool split by them (KvPool.split). Raises
        TransferFailed when closed.
        """
        pool = self.pool
        if ticket.layout.block_bytes != pool.layout.block_bytes:
            with self._lock:
                pool = self._split.get(ticket.layout.kv_head_count) or self.pool.split(ticket.layout)
                self._split[ticket.layout.kv_head_count] = pool
        assert all(0 <= block < pool.block_count for block in ticket.block_ids), "a block outside the pool"
        with self._lock:
            if self._closed:
                raise TransferFailed("the receiver is closed")
            self._landings[ticket.transfer_id] = PoolLanding(ticket, pool, self._digest, self._note_event)
        self._reporter.call_after(ticket.expires_in_s, partial(self._expire, ticket.transfer_id))

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """Give an open transfer more destination blocks, after those that it has, and notify its sender.

        Returns True if the blocks are leased now, like those of the grant. False if the transfer has ended, is stopped
        or unknown: the caller keeps the blocks.
        """
        landing = self._landing(transfer_id)
        if landing is None:
            return False
        assert all(0 <= block < landing.pool.block_count for block in block_ids), "a block outside the pool"
        return landing.extend(block_ids)

    def merge_parts(self, block_ids: Sequence[int], ways: int) -> None:
        """Put the heads of these blocks in order, once all `ways` parts have landed."""
        merge_parts(self.pool.layout, self.pool.memory, block_ids, ways)

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a transfer. TransferReleased follows once its blocks are fenced; unknown ids are ignored."""
        landing = self._landing(transfer_id)
        if landing is not None:
            landing.abort("revoked")

    def close(self) -> None:
        """Close listeners and connections, release what has not landed, end threads. Idempotent."""
        with self._lock:
            self._closed = True
        for listener in self._listeners:
            listener.close()
        # No link is left, so nothing stays quarantined for long.
        with self._lock:
            waiting = tuple(self._landings.values())
        try:
            for landing in waiting:
                landing.abort("the receiver was closed")
        finally:
            self._reporter.close()

    def flow(self) -> ReceiverFlow:
        """Snapshot of the transfers under way."""
        with self._lock:
            leased = [(self._lease_size(landing), landing.is_stopped()) for landing in self._landings.values()]
        sender_count, window_bytes, held_bytes, arriving_bytes = self._credit.figures()
        return ReceiverFlow(
            sender_count=sender_count,
            window_bytes=window_bytes,
            held_bytes=held_bytes,
            arriving_bytes=arriving_bytes,
            leased_block_count=math.ceil(sum(count for count, _ in leased)),
            quarantined_block_count=math.ceil(sum(count for count, stopped in leased if stopped)),
        )

    def check_integrity(self) -> None:
        """Assert that no credit is lost or made up, and that no more than the limit is given. Any time; does not check
        the senders' own accounts."""
        self._credit.check_integrity()

    def admit(self, give: GiveCredit) -> SenderCredit:
        credit = SenderCredit(self._credit, give)
        self._credit.change(lambda book: book.join(credit))
        return credit

    def wants_digests(self, capabilities: Capabilities) -> bool:
        return self._digests is Digests.ON or (self._digests is Digests.AUTO and capabilities.is_byte_stream)

    def open(
        self,
        transfer_id: bytes,
        secret: bytes,
        epoch: int,
        answer: Answer,
        credit: Credit,
        with_digest: bool = True,
        progress: Progress | None = None,
    ) -> PoolLanding:
        landing = self._landing(transfer_id)
        # The epoch first: a ticket of an earlier incarnation is unknown here for a reason worth reporting.
        if epoch != self.epoch:
            reason = f"the ticket is of epoch {epoch}, this receiver of epoch {self.epoch}"
        elif landing is None:
            reason = "unknown, expired or ended transfer"
        elif not hmac.compare_digest(secret, landing.ticket.secret):
            reason = "wrong secret"
        elif landing.ticket.is_open and progress is None:
            reason = "the transfer is open, and the sender's version of the KV protocol has no open transfers"
            # It will never come: its blocks need not wait for the end of the ticket.
            landing.abort(reason)
        elif not landing.claim(answer, credit, with_digest, progress):
            reason = "the ticket is in use already"
        else:
            return landing
        answer(transfer_id, reason)
        get_logger().warning("kv_transfer_refused", transfer_id=transfer_id.hex(), reason=reason)
        raise TransferFailed(reason)

    def _lease_size(self, landing: PoolLanding) -> float:
        """Size in blocks of the pool; a part of a block is a fraction."""
        return len(landing.ticket.block_ids) * landing.pool.layout.block_bytes / self.pool.layout.block_bytes

    def _note_event(self, event: TransferEvent) -> None:
        """Count a kept mark, or the end of a transfer whose blocks are fenced. Called under the landing's lock."""
        if not isinstance(event, TransferMarked):
            with self._lock:
                del self._landings[event.transfer_id]
        self._reporter.report(event)

    def _expire(self, transfer_id: bytes) -> None:
        """Handle the end of a time limit: of a grant, or of the last mark that was seen then."""
        landing = self._landing(transfer_id)
        if landing is None:
            return
        if (left_s := landing.left_s()) > 0:
            self._reporter.call_after(left_s, partial(self._expire, transfer_id))
        else:
            landing.abort("the ticket expired")

    def _landing(self, transfer_id: bytes) -> PoolLanding | None:
        with self._lock:
            return self._landings.get(transfer_id)
