"""Moves the KV of one pool: pushes its blocks out and lets pushes land in it. Knows no request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kaveri.engine.pushes import Pushes, PushSender, Source
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow, SenderFlow
from kaveri.kv.transfer.receiver import TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket


@dataclass(frozen=True, slots=True)
class Granted:
    """The blocks are leased to this transfer: its ticket may be given away."""

    transfer_id: bytes


PlaneEvent = Granted | PushAccepted | PushFailed | TransferLanded | TransferReleased
PlaneListener = Callable[[PlaneEvent], None]
"""Called on any thread, and within grant() and open_push() too."""


class KvPlane(Protocol):
    """What an engine moves KV with. Any thread may call it; no call but close() waits.

    Every opened push ends with PushAccepted or PushFailed, every granted transfer with TransferLanded or
    TransferReleased. Then nothing touches its blocks any more.
    """

    @property
    def endpoints(self) -> tuple[tuple[KvEndpoint, ...], ...]:
        """Where it takes pushes: for each tensor-parallel rank, best first. Empty when it takes none."""

    def require_fit(self, ticket: Ticket) -> None:
        """Raises LayoutMismatch and InvalidArgument for a ticket that this pool's blocks cannot be pushed by."""

    def open_push(self, source: Any, ticket: Ticket) -> None:
        """Begins to push what `source` names, as it is computed."""

    def abort_push(self, transfer_id: bytes) -> None:
        """Gives a push up. Ignored before open_push() and after the push has ended."""

    def grant(self, ticket: Ticket) -> None:
        """Leases the ticket's blocks to its transfer. Granted follows, or TransferReleased alone."""

    def revoke(self, transfer_id: bytes) -> None:
        """Gives a landing up. Ignored before grant() and after the transfer has ended."""

    def flow(self) -> KvFlow:
        """What is under way."""

    def close(self) -> None:
        """Ends all transfers. Idempotent."""


class FlowingSender(PushSender, Protocol):
    """A PushSender that an engine can watch and close."""

    def flow(self) -> SenderFlow:
        """What is under way."""

    def close(self) -> None:
        """Ends all pushes. Idempotent."""


class TicketReceiver(Protocol):
    """What takes pushes: a KvReceiver (kaveri/kv/transfer/receiver.py), or what stands for one."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where it listens, best first."""

    def grant(
        self,
        block_ids: Sequence[int],
        token_count: int,
        expires_in_s: float,
        *,
        first_block: int,
        transfer_id: bytes,
        secret: bytes,
    ) -> Ticket:
        """Leases the blocks to one transfer. Raises TransferFailed when closed."""

    def revoke(self, transfer_id: bytes) -> None:
        """Gives a transfer up."""

    def flow(self) -> ReceiverFlow:
        """What is under way."""

    def close(self) -> None:
        """Ends all transfers. Idempotent."""


class PoolPlane:
    """A KvPlane of one pool. Sources are of pushes.py.

    receiver: None when no pushes are taken.
    """

    def __init__(
        self, layout: KvLayout, sender: FlowingSender, receiver: TicketReceiver | None, listener: PlaneListener
    ) -> None:
        self.pushes = Pushes(sender, layout)
        self._layout = layout
        self._sender = sender
        self._receiver = receiver
        self._listener = listener

    @property
    def endpoints(self) -> tuple[tuple[KvEndpoint, ...], ...]:
        return (self._receiver.endpoints,) if self._receiver is not None else ()

    def require_fit(self, ticket: Ticket) -> None:
        self._layout.require_mappable(ticket.layout)

    def open_push(self, source: Source, ticket: Ticket) -> None:
        try:
            self.pushes.open(source, ticket)
        except KaveriError as error:
            self._listener(PushFailed(ticket.transfer_id, str(error)))

    def abort_push(self, transfer_id: bytes) -> None:
        self.pushes.abort(transfer_id)

    def grant(self, ticket: Ticket) -> None:
        assert self._receiver is not None, "only a plane that takes pushes grants"
        try:
            self._receiver.grant(
                ticket.block_ids,
                ticket.token_count,
                ticket.expires_in_s,
                first_block=ticket.first_block,
                transfer_id=ticket.transfer_id,
                secret=ticket.secret,
            )
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
