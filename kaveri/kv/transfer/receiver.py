"""KvReceiver: grants tickets for pool blocks, takes in the pushes, verifies them, and reports their ends."""

import hmac
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kaveri.errors import ConfigError, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.credit import CreditBook, SenderCredit
from kaveri.kv.transfer.digest import DigestFactory, Digests, xxh3
from kaveri.kv.transfer.flow import ReceiverFlow
from kaveri.kv.transfer.landing import (
    Claim,
    LandingListener,
    PoolLanding,
    TransferEvent,
    TransferLanded,
    TransferMarked,
    TransferReleased,
)
from kaveri.kv.transfer.part_transfers import Grants, PartedLanding
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Answer, Capabilities, Credit, GiveCredit, Listener, Progress, Transport
from kaveri.telemetry.logs import get_logger

CREDIT_BYTES = 128 << 20
"""Default bytes that all senders together may have in flight to a receiver. Up to four have windows of 32 MiB, twice
what the largest writes of a transport need to proceed without a pause."""
_LEAST_CREDIT_BYTES = 4 << 20
"""Bytes that each sender may have in flight, however many there are. A single push is up to a fifth slower with it."""


__all__ = [
    "KvReceiver",
    "LandingListener",
    "ReceiverOptions",
    "TransferEvent",
    "TransferLanded",
    "TransferMarked",
    "TransferReleased",
]


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Operator's options of a KvReceiver: flow-control credit in bytes, and which transfers are verified by digest."""

    credit_bytes: int = CREDIT_BYTES
    digests: Digests = Digests.AUTO


class KvReceiver:
    """Takes pushes into the blocks of `pool`. Thread-safe, but the listener must not call close().

    A granted transfer ends in exactly one event: TransferLanded, or TransferReleased after a refusal, revoke(), expiry,
    the loss of its connection or close(). It is released only when fenced: while its sender may write into the blocks,
    they stay quarantined. An open transfer (grant(is_open=True)) may get more blocks (extend()), and its sender may
    mark those that have arrived, to have them verified and kept (TransferMarked); its time limit counts from the last
    mark.

    listen: where to listen, best first, such as KvEndpoint("unix", path) and KvEndpoint("tcp", "127.0.0.1:0"). epoch:
    incarnation, [0, 2**64), different from all former receivers' at the same addresses. digests: transfers that are
    verified by a digest of their bytes; senders learn it when they connect. credit_bytes: max bytes in flight from all
    senders (CreditBook); each may have 4 MiB of it, or a quarter if less, and at least two blocks, even if that exceeds
    the sum. Raises ConfigError when it cannot listen.
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
        self._listener = listener
        self._digests = digests
        self._digest = digest
        self._lock = threading.Lock()
        self._grants = Grants()
        least_bytes = max(2 * pool.layout.block_bytes, min(_LEAST_CREDIT_BYTES, credit_bytes // 4))
        self._credit = CreditBook(credit_bytes, least_bytes)
        self._listeners: list[Listener] = []
        self._reporter = Reporter("kv-receiver")
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
        """Addresses where it listens for senders, in order of preference."""
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
        """Return a ticket for a new transfer into these pool blocks, and lease them to it; see lease().

        first_block: number of the request's blocks already here, which are not pushed. part: block layout, if only some
        heads are pushed. is_open: the transfer may be marked, extended and end early. Raises TransferFailed if closed.
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

    def lease(self, ticket: Ticket, parts: Sequence[Ticket] = (), listener: LandingListener | None = None) -> None:
        """Reserve a ticket's blocks for its transfer, until TransferLanded or TransferReleased.

        parts: tickets of the parts that this pool takes, if any (taken_tickets); the transfer lands when all have.
        Block ids of a part are those of KvPool.split(). listener: receives the transfer's events in place of the
        receiver's listener. Raises TransferFailed when closed.
        """
        listener = listener or self._listener
        if parts:
            PartedLanding(ticket, parts, self.pool, self._grants).open(
                listener, lambda each, told: self.lease(each, (), told)
            )
            return
        pool = self.pool
        if ticket.layout.block_bytes != pool.layout.block_bytes:
            pool = pool.split(ticket.layout)
        assert all(0 <= block < pool.block_count for block in ticket.block_ids), "a block outside the pool"
        with self._lock:
            if self._grants.is_closed:
                raise TransferFailed("the receiver is closed")
            self._grants.landings[ticket.transfer_id] = PoolLanding(ticket, pool, partial(self._note_event, listener))
        self._reporter.call_after(ticket.expires_in_s, partial(self._expire, ticket.transfer_id))

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """Add destination blocks to an open transfer, after those that it has, and notify its sender.

        Returns True if they are leased now; False if the transfer is unknown or has ended: the caller keeps the blocks.
        """
        landing = self._grants.wholes.get(transfer_id) or self._grants.landings.get(transfer_id)
        return landing is not None and landing.extend(block_ids)

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a transfer. TransferReleased follows once its blocks cannot be written; unknown ids are ignored."""
        landing = self._grants.wholes.get(transfer_id) or self._grants.landings.get(transfer_id)
        if landing is not None:
            landing.abort("revoked")

    def close(self) -> None:
        """Close listeners and connections, release transfers that have not landed, end threads. Idempotent."""
        with self._lock:
            self._grants.is_closed = True
        for listener in self._listeners:
            listener.close()
        # No link is left, so nothing stays quarantined for long.
        with self._lock:
            waiting = tuple(self._grants.landings.values())
        try:
            for landing in waiting:
                landing.abort("the receiver was closed")
        finally:
            self._reporter.close()

    def flow(self) -> ReceiverFlow:
        """Return a flow-control snapshot of the granted transfers and their senders."""
        with self._lock:
            landings = tuple(self._grants.landings.values())
        # In blocks of the pool; a part of a block is a fraction.
        whole_bytes = self.pool.layout.block_bytes
        leased = [
            (each.block_count * each.pool.layout.block_bytes / whole_bytes, each.is_stopped()) for each in landings
        ]
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
        """Assert that the senders' credit, as counted here, is consistent and within the limit. At any time."""
        self._credit.check_integrity()

    def admit(self, give: GiveCredit) -> SenderCredit:
        return self._credit.join(give)

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
        landing = self._grants.landings.get(transfer_id)
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
        elif not landing.claim(Claim(answer, credit, self._digest() if with_digest else None, progress)):
            reason = "the ticket is in use already"
        else:
            return landing
        answer(transfer_id, reason)
        get_logger().warning("kv_transfer_refused", transfer_id=transfer_id.hex(), reason=reason)
        raise TransferFailed(reason)

    def _note_event(self, listener: LandingListener, event: TransferEvent) -> None:
        # Called under the landing's lock.
        if not isinstance(event, TransferMarked):
            with self._lock:
                del self._grants.landings[event.transfer_id]
        self._reporter.report(partial(listener, event))

    def _expire(self, transfer_id: bytes) -> None:
        landing = self._grants.landings.get(transfer_id)
        if landing is None:
            return
        if (left_s := landing.left_s()) > 0:
            self._reporter.call_after(left_s, partial(self._expire, transfer_id))
        else:
            landing.abort("the ticket expired")
