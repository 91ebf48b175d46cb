"""The receiving end of a simulated engine's KV transfers, over a KvWire: tickets, leases, marks, fencing, expiry.

A write does not look at the transfer (kv_sender.py). So the blocks of a transfer that the receiver has given up stay
quarantined until the sender has confirmed that it writes no more, or until its connection is gone.
"""

import asyncio
import contextvars
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kaveri.engine.stepwise.fake import StaleKv
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import ReceiverFlow
from kaveri.kv.transfer.receiver import LandingListener, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_wire import (
    TRANSPORT,
    ExtendPush,
    FinishPush,
    KvLink,
    KvMessage,
    KvWire,
    MarkPush,
    OpenPush,
    PushAnswer,
    PushFenced,
    PushKept,
    PushOpened,
    WriteBlocks,
)


class _LandingState(enum.Enum):
    GRANTED = enum.auto()
    """No sender has shown the ticket."""
    OPEN = enum.auto()
    """A sender may write into the blocks."""
    QUARANTINED = enum.auto()
    """Given up, but the sender may still write."""


@dataclass(eq=False, slots=True)
class _Landing:
    ticket: Ticket
    expiry: asyncio.TimerHandle
    expires_at_s: float
    marked_count: int = 0
    told_count: int = 0
    """Blocks that the sender knows of: those of the grant, and those of extensions once the transfer is open."""
    state: _LandingState = _LandingState.GRANTED
    connection: "_LandingConnection | None" = None
    reason: str = ""


class SimulatedReceiver:
    """Grants tickets for blocks of `memory` and takes the pushes."""

    def __init__(
        self,
        memory: KvMemory,
        layout: KvLayout,
        wire: KvWire,
        epoch: int,
        listener: LandingListener,
        report: Callable[[str], object] = str,
    ) -> None:
        """report: takes blocks that are not what they must be, and were not damaged on their way."""
        self._report = report
        self._memory = memory
        self._layout = layout
        self._wire = wire
        self._epoch = epoch
        self._listener = listener
        self._context = contextvars.copy_context()
        self._landings: dict[bytes, _Landing] = {}
        self._connections: dict[_LandingConnection, None] = {}
        self._address = wire.listen(self._accept)

    @property
    def epoch(self) -> int:
        """This incarnation."""
        return self._epoch

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where it takes pushes."""
        return (KvEndpoint(TRANSPORT, self._address),)

    def lease(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Leases the ticket's blocks to its transfer, until the listener hears that it has landed or was released."""
        expiry = self._expiry(ticket)
        landing = _Landing(ticket, expiry, expiry.when(), told_count=len(ticket.block_ids))
        self._landings[ticket.transfer_id] = landing

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """See KvReceiver.extend."""
        landing = self._landings.get(transfer_id)
        if landing is None or landing.state is _LandingState.QUARANTINED:
            return False
        assert landing.ticket.is_open, "only an open transfer is extended"
        landing.ticket = replace(landing.ticket, block_ids=(*landing.ticket.block_ids, *block_ids))
        self._tell_extension(landing)
        return True

    def revoke(self, transfer_id: bytes) -> None:
        """The transfer is not wanted any more. Unknown ids are ignored."""
        self._stop(transfer_id, "revoked")

    def flow(self) -> ReceiverFlow:
        """What is under way."""
        leased = [(len(landing.ticket.block_ids), landing.state) for landing in self._landings.values()]
        return ReceiverFlow(
            sender_count=len(self._connections),
            leased_block_count=sum(count for count, _ in leased),
            quarantined_block_count=sum(count for count, state in leased if state is _LandingState.QUARANTINED),
        )

    def close(self) -> None:
        """Ends listening, connections and transfers, without events. Idempotent."""
        for landing in self._landings.values():
            landing.expiry.cancel()
        self._landings.clear()
        self._connections.clear()
        self._wire.stop_listening(self._address)

    def open(self, connection: "_LandingConnection", message: OpenPush) -> None:
        """For connections: a sender shows a ticket."""
        landing = self._landings.get(message.transfer_id)
        refusal = self._refusal(landing, message)
        if refusal is not None:
            connection.send(PushAnswer(message.transfer_id, refusal))
            return
        assert landing is not None
        landing.state = _LandingState.OPEN
        landing.connection = connection
        connection.send(PushOpened(message.transfer_id))
        self._tell_extension(landing)

    def write(self, message: WriteBlocks) -> None:
        """For connections: KV arrives in the pool."""
        for block_id, block in message.blocks:
            self._memory.put(block_id, block)

    def mark(self, connection: "_LandingConnection", message: MarkPush) -> None:
        """For connections: a sender marks an open push."""
        landing = self._written(connection, message.transfer_id)
        if landing is None:
            return
        ticket, block_count = landing.ticket, message.block_count
        problem = None
        if not ticket.is_open or not landing.marked_count < block_count <= len(ticket.block_ids):
            problem = f"a mark at block {block_count}, behind {landing.marked_count} of {len(ticket.block_ids)}"
        else:
            problem = self._problem(landing, ticket.block_ids[:block_count], block_count * self._layout.block_tokens)
        if problem is not None:
            self._stop(message.transfer_id, problem)
            return
        landing.marked_count = block_count
        landing.expiry.cancel()
        landing.expiry = self._expiry(ticket)
        landing.expires_at_s = landing.expiry.when()
        self._listener(TransferMarked(ticket.transfer_id, block_count, message.note))
        connection.send(PushKept(ticket.transfer_id, block_count))

    def finish(self, connection: "_LandingConnection", message: FinishPush) -> None:
        """For connections: a sender has written everything."""
        landing = self._written(connection, message.transfer_id)
        if landing is None:
            return
        ticket = landing.ticket
        # The last block may be part full; how full an open transfer ends, its ticket does not say.
        block_ids = ticket.block_ids[: message.block_count] if ticket.is_open else ticket.block_ids
        problem = self._problem(landing, block_ids, None if ticket.is_open else ticket.token_count)
        if problem is not None:
            self._stop(message.transfer_id, problem)
            return
        kv_bytes = self._layout.layer_count * len(block_ids) * self._layout.block_bytes
        self._conclude(landing, TransferLanded(ticket.transfer_id, kv_bytes, message.note))
        connection.send(PushAnswer(ticket.transfer_id, None))

    def fenced(self, connection: "_LandingConnection", message: PushFenced) -> None:
        """For connections: the sender writes no more for this transfer."""
        landing = self._landings.get(message.transfer_id)
        if landing is not None and landing.connection is connection:
            given_up = not landing.reason and not message.keep_marked
            reason = landing.reason or "the sender gave up"
            self._conclude(landing, TransferReleased(message.transfer_id, reason, given_up))

    def lost(self, connection: "_LandingConnection", reason: str) -> None:
        """For connections: nothing can be written over it any more."""
        self._connections.pop(connection, None)
        for landing in [each for each in self._landings.values() if each.connection is connection]:
            released = TransferReleased(landing.ticket.transfer_id, landing.reason or f"connection lost: {reason}")
            self._conclude(landing, released)

    def _accept(self, link: KvLink) -> "_LandingConnection":
        connection = _LandingConnection(self, link)
        self._connections[connection] = None
        return connection

    def _refusal(self, landing: _Landing | None, message: OpenPush) -> str | None:
        if message.epoch != self._epoch:
            return f"the ticket is of epoch {message.epoch}, this receiver of epoch {self._epoch}"
        if landing is None:
            return "unknown, expired or ended transfer"
        if landing.ticket.secret != message.secret:
            return "wrong secret"
        if landing.state is not _LandingState.GRANTED:
            return "the ticket is in use already"
        return None

    def _expiry(self, ticket: Ticket) -> asyncio.TimerHandle:
        expire = partial(self._stop, ticket.transfer_id, "the ticket expired")
        return asyncio.get_running_loop().call_later(ticket.expires_in_s, expire, context=self._context)

    def _tell_extension(self, landing: _Landing) -> None:
        """Tells the sender of blocks that it does not know of, once it has opened the transfer."""
        ticket, told_count = landing.ticket, landing.told_count
        if landing.connection is not None and told_count < len(ticket.block_ids):
            landing.told_count = len(ticket.block_ids)
            landing.connection.send(ExtendPush(ticket.transfer_id, told_count, ticket.block_ids[told_count:]))

    def _written(self, connection: "_LandingConnection", transfer_id: bytes) -> _Landing | None:
        """The transfer of this name, while this connection's sender may write into it."""
        landing = self._landings.get(transfer_id)
        if landing is None or landing.state is not _LandingState.OPEN or landing.connection is not connection:
            return None
        return landing

    def _problem(self, landing: _Landing, block_ids: Sequence[int], token_count: int | None) -> str | None:
        """What is wrong with these blocks. token_count: in them; None when the last one may be part full."""
        # A process that stood still takes in what waited before its timers run, and its sender has given it up.
        if asyncio.get_running_loop().time() > landing.expires_at_s:
            return "the ticket expired"
        try:
            if token_count is None:
                self._memory.verify(block_ids, landing.ticket.first_block)
            else:
                self._memory.read(block_ids, token_count, landing.ticket.first_block)
        except StaleKv as error:
            if not self._memory.is_damaged(block_ids):
                # A sender has marked or finished what it has not written, or not yet.
                self._report(f"a push of {len(block_ids)} blocks is not what its sender says: {error}")
            return f"wrong digest: {error}"
        return None

    def _stop(self, transfer_id: bytes, reason: str) -> None:
        landing = self._landings.get(transfer_id)
        if landing is None or landing.state is _LandingState.QUARANTINED:
            return
        if landing.state is _LandingState.GRANTED:
            self._conclude(landing, TransferReleased(transfer_id, reason))
            return
        assert landing.connection is not None
        landing.state, landing.reason = _LandingState.QUARANTINED, reason
        landing.connection.send(PushAnswer(transfer_id, reason))

    def _conclude(self, landing: _Landing, event: TransferLanded | TransferReleased) -> None:
        del self._landings[landing.ticket.transfer_id]
        landing.expiry.cancel()
        self._listener(event)


class _LandingConnection:
    """The receiver's end of one connection; a KvEnd."""

    def __init__(self, receiver: SimulatedReceiver, link: KvLink) -> None:
        self._receiver = receiver
        self._link = link

    def send(self, message: KvMessage) -> None:
        self._link.send(message)

    def received(self, message: KvMessage) -> None:
        match message:
            case OpenPush():
                self._receiver.open(self, message)
            case WriteBlocks():
                self._receiver.write(message)
            case MarkPush():
                self._receiver.mark(self, message)
            case FinishPush():
                self._receiver.finish(self, message)
            case PushFenced():
                self._receiver.fenced(self, message)

    def lost(self, reason: str) -> None:
        self._receiver.lost(self, reason)
