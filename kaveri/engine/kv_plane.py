"""Moves the KV of one pool: pushes its blocks and lets pushes land in it. Knows no request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kaveri.engine.pushes import Pushes, Source
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow
from kaveri.kv.transfer.part_transfers import PartReceiver, PartSender, TicketReceiver
from kaveri.kv.transfer.push import PushSender
from kaveri.kv.transfer.receiver import LandingListener, TransferEvent, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushEvent, PushFailed, PushListener
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, require_pushable


@dataclass(frozen=True, slots=True)
class Granted:
    """The blocks are leased to this transfer: its ticket may be passed on."""

    transfer_id: bytes


PlaneEvent = Granted | PushEvent | TransferEvent
PlaneListener = Callable[[PlaneEvent], None]
"""Called on any thread, and within grant() and open_push() too."""


class KvPlane(Protocol):
    """Interface by which an engine moves KV. Any thread may call it; no call but close() waits.

    Every opened push ends with PushAccepted or PushFailed, every granted transfer with TransferLanded or
    TransferReleased. Then nothing touches its blocks any more.
    """

    @property
    def endpoints(self) -> tuple[tuple[KvEndpoint, ...], ...]:
        """Addresses where it takes pushes: for each tensor-parallel rank, best first. Empty when it takes none."""

    def require_fit(self, ticket: Ticket) -> None:
        """Raise LayoutMismatch and InvalidArgument for a ticket that this pool's blocks cannot be pushed by."""

    def open_push(self, source: Any, ticket: Ticket) -> None:
        """Begin to push the KV of `source`, as it is computed."""

    def abort_push(self, transfer_id: bytes) -> None:
        """Cancel a push. Ignored before open_push() and after the push has ended."""

    def grant(self, ticket: Ticket) -> None:
        """Lease the ticket's blocks to its transfer. Granted follows, or TransferReleased alone."""

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a landing. Ignored before grant() and after the transfer has ended."""

    def flow(self) -> KvFlow:
        """Snapshot of the transfers under way."""

    def close(self) -> None:
        """End all transfers. Idempotent."""


class PoolPlane:
    """A KvPlane of one pool. Sources are those of pushes.py.

    layout: of the whole engine. rank: the pool's rank. make_receiver: None when no pushes are taken. Raises the makers'
    errors.
    """

    def __init__(
        self,
        layout: KvLayout,
        make_sender: Callable[[PushListener], PushSender],
        make_receiver: Callable[[LandingListener], TicketReceiver] | None,
        listener: PlaneListener,
        rank: int = 0,
    ) -> None:
        self._layout = layout
        self._listener = listener
        self._receiver = PartReceiver(rank, listener, make_receiver) if make_receiver is not None else None
        self._sender = PartSender(layout, rank, listener, make_sender)
        self.pushes = Pushes(self._sender, layout.rank(rank))

    @property
    def endpoints(self) -> tuple[tuple[KvEndpoint, ...], ...]:
        return (self._receiver.endpoints,) if self._receiver is not None else ()

    def require_fit(self, ticket: Ticket) -> None:
        require_pushable(self._layout, ticket)

    def open_push(self, source: Source, ticket: Ticket) -> None:
        if not self._sender.has_part(ticket):
            # Other ranks hold the same heads, and push them.
            self._listener(PushAccepted(ticket.transfer_id, 0, ""))
            return
        try:
            self.pushes.open(source, ticket)
        except KaveriError as error:
            self._listener(PushFailed(ticket.transfer_id, str(error)))

    def abort_push(self, transfer_id: bytes) -> None:
        self.pushes.abort(transfer_id)

    def grant(self, ticket: Ticket) -> None:
        assert self._receiver is not None, "only a plane that takes pushes grants"
        try:
            self._receiver.grant(ticket)
        except KaveriError as error:
            self._listener(TransferReleased(ticket.transfer_id, str(error)))
        else:
            self._listener(Granted(ticket.transfer_id))

    def revoke(self, transfer_id: bytes) -> None:
        if self._receiver is not None:
            self._receiver.revoke(transfer_id)

    def flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def close(self) -> None:
        self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
