"""The transfers of one rank by parts: a push or a landing is complete when all parts of the rank are, and marked as far
as its least marked part.

A ticket may list parts (Ticket.parts), each a transfer with an id of its own. Callers of these classes know the whole
ticket's id alone. A ticket without parts passes through unchanged.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout, PartPlace, source_rank
from kaveri.kv.transfer.flow import ReceiverFlow, SenderFlow
from kaveri.kv.transfer.gathering import Gathering, TransferEnd, TransferStep
from kaveri.kv.transfer.landing import TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.push import PushListener, PushSender
from kaveri.kv.transfer.receiver import LandingListener
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, part_blocks, pushed_tickets, taken_tickets


class TicketReceiver(Protocol):
    """Interface of what takes pushes: a KvReceiver (kaveri/kv/transfer/receiver.py), or a stand-in."""

    @property
    def epoch(self) -> int:
        """This incarnation."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses it listens at, best first."""

    def lease(self, ticket: Ticket) -> None:
        """See KvReceiver.lease."""

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """See KvReceiver.extend."""

    def merge_parts(self, block_ids: Sequence[int], ways: int) -> None:
        """See KvReceiver.merge_parts."""

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a transfer."""

    def flow(self) -> ReceiverFlow:
        """Snapshot of the landings under way."""

    def close(self) -> None:
        """End all transfers. Idempotent."""


class PartSender:
    """A PushSender that pushes the parts of a rank at once. layout: the engine's. rank: which of its ranks this is."""

    def __init__(
        self, layout: KvLayout, rank: int, listener: PushListener, make_sender: Callable[[PushListener], PushSender]
    ) -> None:
        self._layout = layout
        self._rank = rank
        # The events of a sender's transfers are pushes' events.
        self._table = _PartTable(cast(Callable[[TransferEnd | TransferStep], None], listener))
        self._inner = make_sender(self._table.handle)

    def has_part(self, ticket: Ticket) -> bool:
        """Return True if this rank has something to push for the ticket."""
        return not ticket.parts or any(source_rank(self._layout, part.place) == self._rank for part in ticket.parts)

    def open(self, ticket: Ticket, *, part: bool = False) -> None:
        if not ticket.parts:
            self._inner.open(ticket, part=part)
            return
        tickets = pushed_tickets(self._layout, self._rank, ticket)
        # One part's failure must not make the receiver drop what all parts have marked.
        give_up = partial(self._inner.abort, keep_marked=True)
        self._table.begin(ticket.transfer_id, tickets, lambda own: self._inner.open(own, part=True), give_up)

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        for name in self._table.names(transfer_id):
            self._inner.write_layers(name, layers, first_index, source_blocks)

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        for name in self._table.names(transfer_id):
            self._inner.mark(name, block_count, note)

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        for name in self._table.names(transfer_id):
            self._inner.finish(name, note)

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        for name in self._table.names(transfer_id):
            self._inner.abort(name, keep_marked=keep_marked)

    def flow(self) -> SenderFlow:
        return self._inner.flow()

    def close(self) -> None:
        self._inner.close()


class PartReceiver:
    """Grants the parts of one rank. rank: which of the engine's it is."""

    def __init__(
        self, rank: int, listener: LandingListener, make_receiver: Callable[[LandingListener], TicketReceiver]
    ) -> None:
        self._rank = rank
        self._listener = listener
        self._table = _PartTable(self._report)
        # Transfers whose parts land in the same blocks.
        self._split: dict[bytes, _Split] = {}
        self._inner = make_receiver(self._table.handle)

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        return self._inner.endpoints

    def grant(self, ticket: Ticket) -> None:
        """Lease the ticket's blocks, and to each part of this rank its share. Raises TransferFailed when closed."""
        if not ticket.parts:
            self._inner.lease(ticket)
            return
        tickets = taken_tickets(self._rank, ticket)
        if len(tickets) > 1:
            self._split[ticket.transfer_id] = _Split(ticket, len(tickets))
        try:
            self._table.begin(ticket.transfer_id, tickets, self._inner.lease, self._inner.revoke)
        except KaveriError:
            self._split.pop(ticket.transfer_id, None)
            raise

    def extend(self, transfer_id: bytes, block_ids: Sequence[int]) -> bool:
        """Give an open transfer more blocks. False if it has ended: the caller keeps them."""
        split = self._split.get(transfer_id)
        if split is None:
            return self._inner.extend(self._table.names(transfer_id)[0], block_ids)
        split.added += block_ids
        is_leased = False
        for part in taken_tickets(self._rank, split.ticket):
            places = part_blocks(split.ticket.layout, PartPlace(self._rank, part.layout), block_ids)
            is_leased |= self._inner.extend(part.transfer_id, places)
        return is_leased

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel a transfer."""
        for name in self._table.names(transfer_id):
            self._inner.revoke(name)

    def flow(self) -> ReceiverFlow:
        return self._inner.flow()

    def close(self) -> None:
        self._inner.close()

    def _report(self, event: TransferEnd | TransferStep) -> None:
        assert isinstance(event, TransferLanded | TransferReleased | TransferMarked)
        if not isinstance(event, TransferMarked):
            split = self._split.pop(event.transfer_id, None)
            if split is not None and isinstance(event, TransferLanded):
                self._inner.merge_parts((*split.ticket.block_ids, *split.added), split.ways)
        self._listener(event)


@dataclass(eq=False, slots=True)
class _Split:
    """A transfer whose parts land in the same blocks."""

    ticket: Ticket
    ways: int
    """Parts of each block."""
    added: list[int] = field(default_factory=list)
    """Blocks that extend() has added."""


@dataclass(eq=False, slots=True)
class _Whole:
    """A transfer by parts, until all have ended."""

    gathering: Gathering
    names: tuple[bytes, ...]
    """Transfer ids of the parts."""
    give_up: Callable[[bytes], None]
    """Cancels one of them; ignored before it begins and after it has ended."""


class _PartTable:
    """Maps transfers to the whole that they are parts of. Thread-safe.

    listener: called with the progress and the end of each whole, and of each transfer that is part of none.
    """

    def __init__(self, listener: Callable[[TransferEnd | TransferStep], None]) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._wholes: dict[bytes, _Whole] = {}
        self._parts: dict[bytes, tuple[_Whole, int]] = {}

    def names(self, transfer_id: bytes) -> tuple[bytes, ...]:
        """Return the ids of the transfers that this one is made of."""
        whole = self._wholes.get(transfer_id)
        return whole.names if whole is not None else (transfer_id,)

    def begin(
        self,
        transfer_id: bytes,
        tickets: Sequence[Ticket],
        start: Callable[[Ticket], object],
        give_up: Callable[[bytes], None],
    ) -> None:
        """Start all parts. If one cannot start, cancel those before it.

        Raises the first error of start() if nothing of the transfer is under way then.
        """
        names = tuple(ticket.transfer_id for ticket in tickets)
        whole = _Whole(Gathering(transfer_id, set(range(len(tickets)))), names, give_up)
        with self._lock:
            assert transfer_id not in self._wholes, "a ticket is used once"
            self._wholes[transfer_id] = whole
            self._parts.update({name: (whole, number) for number, name in enumerate(names)})
        for number, ticket in enumerate(tickets):
            try:
                start(ticket)
            except KaveriError as error:
                if self._drop(whole, number, str(error)):
                    raise
                break
        with self._lock:
            failed = whole.gathering.failure is not None
        # Parts that had not begun when another one failed.
        if failed:
            self._give_up(whole)

    def handle(self, event: TransferEnd | TransferStep) -> None:
        """Handle the progress or the end of a transfer."""
        if isinstance(event, TransferStep):
            self._handle_step(event)
            return
        with self._lock:
            whole, number = self._parts.pop(event.transfer_id, (None, 0))
            if whole is not None:
                fails = whole.gathering.end(number, event)
                ended = not whole.gathering.left
                if ended:
                    del self._wholes[whole.gathering.transfer_id]
        if whole is None:
            self._listener(event)
        elif ended:
            self._listener(whole.gathering.outcome(event))
        elif fails:
            self._give_up(whole)

    def _handle_step(self, event: TransferStep) -> None:
        with self._lock:
            whole, _ = self._parts.get(event.transfer_id, (None, 0))
            told = whole.gathering.step(event) if whole is not None else event
        if told is not None:
            self._listener(told)

    def _drop(self, whole: _Whole, number: int, reason: str) -> bool:
        """Record that the parts from this one on do not start. True if none is under way."""
        with self._lock:
            for name in whole.names[number:]:
                del self._parts[name]
            whole.gathering.drop(range(number, len(whole.names)), reason)
            if whole.gathering.left:
                return False
            del self._wholes[whole.gathering.transfer_id]
            return True

    def _give_up(self, whole: _Whole) -> None:
        for name in whole.names:
            whole.give_up(name)
