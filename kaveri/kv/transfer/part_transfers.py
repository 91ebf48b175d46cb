"""Transfers split into parts, one per pair of ranks: landed when all parts are, and marked as far as all parts are.

A ticket may list parts (Ticket.parts), each a transfer with an id of its own. Callers use the whole ticket's id only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import PartPlace
from kaveri.kv.layout.regions import merge_parts
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.gathering import Gathering, TransferEnd, TransferStep
from kaveri.kv.transfer.landing import LandingListener, PoolLanding, TransferEvent, TransferLanded, TransferMarked
from kaveri.kv.transfer.push import OpenPush, PushEnd, PushEvent, PushListener
from kaveri.kv.transfer.ticket import Ticket, part_blocks

PartListener = Callable[[TransferEnd | TransferStep], None]


@dataclass(eq=False, slots=True)
class Grants:
    """A receiver's granted transfers that have neither landed nor been released, by transfer id."""

    landings: dict[bytes, PoolLanding] = field(default_factory=dict)
    """Transfers and parts of transfers. The first part has the id of its whole transfer."""
    wholes: "dict[bytes, PartedLanding]" = field(default_factory=dict)
    """Transfers split into parts."""
    is_closed: bool = False
    """True if the receiver grants no more."""


class PartedTransfer:
    """Runs a transfer's parts (one transfer per pair of ranks) until all have ended. When one fails, the others are
    cancelled. Thread-safe.

    give_up: cancels all active parts. listener: receives the events of the whole transfer.
    """

    def __init__(
        self, transfer_id: bytes, parts: Sequence[Ticket], give_up: Callable[[], None], listener: PartListener
    ) -> None:
        self._parts = parts
        self._gathering = Gathering(transfer_id, set(range(len(parts))))
        self._give_up = give_up
        self._listener = listener
        self._lock = threading.Lock()

    def begin(self, start: Callable[[Ticket, PartListener], object]) -> None:
        """Start all parts by calling `start`. If one cannot start, those before it are cancelled; its error is raised
        if none is active then."""
        for number, part in enumerate(self._parts):
            try:
                start(part, partial(self._handle, number))
            except KaveriError as error:
                with self._lock:
                    self._gathering.drop(range(number, len(self._parts)), str(error))
                    is_over = not self._gathering.left
                if is_over:
                    raise
                break
        with self._lock:
            failed = self._gathering.failure is not None
        # Parts that had not begun when another one failed.
        if failed:
            self._give_up()

    def _handle(self, number: int, event: TransferEnd | TransferStep) -> None:
        if isinstance(event, TransferStep):
            with self._lock:
                step = self._gathering.step(event)
            if step is not None:
                self._listener(step)
            return
        with self._lock:
            fails = self._gathering.end(number, event)
            ended = not self._gathering.left
        if ended:
            self._listener(self._gathering.outcome(event))
        elif fails:
            self._give_up()


class PartedPush:
    """Push split into parts, one per pair of ranks: passes each call on to the parts' pushes. Methods: see KvSender.

    pushes: the sender's, by transfer id. wholes: the sender's pushes with parts; this one is in it until it has ended.
    """

    def __init__(
        self,
        ticket: Ticket,
        parts: Sequence[Ticket],
        pushes: dict[bytes, OpenPush],
        wholes: "dict[bytes, PartedPush]",
    ) -> None:
        self._transfer_id = ticket.transfer_id
        self._parts = parts
        self._pushes = pushes
        self._wholes = wholes

    def open(self, listener: PushListener, start: Callable[[Ticket, PushListener], object]) -> None:
        """Start the pushes of all parts. Raises the first error of start() if none is active then."""

        def tell(event: PushEvent) -> None:
            if isinstance(event, PushEnd):
                del self._wholes[self._transfer_id]
            listener(event)

        # One part's failure must not make the receiver drop what all parts have marked.
        give_up = partial(self.abort, keep_marked=True)
        self._wholes[self._transfer_id] = self
        try:
            # The events of a sender's transfers are pushes' events.
            PartedTransfer(self._transfer_id, self._parts, give_up, cast(PartListener, tell)).begin(start)
        except KaveriError:
            del self._wholes[self._transfer_id]
            raise

    def write(self, layers: range, first_index: int, blocks: tuple[int, ...]) -> None:
        for push in self._live():
            push.write(layers, first_index, blocks)

    def mark(self, block_count: int, note: bytes) -> None:
        for push in self._live():
            push.mark(block_count, note)

    def finish(self, note: bytes) -> None:
        for push in self._live():
            push.finish(note)

    def abort(self, *, keep_marked: bool = False) -> None:
        for push in self._live():
            push.abort(keep_marked=keep_marked)

    def _live(self) -> list[OpenPush]:
        found = (self._pushes.get(part.transfer_id) for part in self._parts)
        return [push for push in found if push is not None]


class PartedLanding:
    """Receiving side of a transfer split into parts, one per pair of ranks, all of which land in one pool.

    grants: the receiver's; this transfer is among them until it has ended.
    """

    def __init__(
        self,
        ticket: Ticket,
        parts: Sequence[Ticket],
        pool: KvPool,
        grants: "Grants",
    ) -> None:
        self._transfer_id = ticket.transfer_id
        self._parts = parts
        self._pool = pool
        self._grants = grants
        self._block_ids = list(ticket.block_ids)

    def open(self, listener: LandingListener, start: Callable[[Ticket, LandingListener], object]) -> None:
        """Start the landings of all parts. Raises the first error of start() if none is active then."""

        def tell(event: TransferEvent) -> None:
            if not isinstance(event, TransferMarked):
                del self._grants.wholes[self._transfer_id]
            if isinstance(event, TransferLanded):
                merge_parts(self._pool.layout, self._pool.memory, self._block_ids, len(self._parts))
            listener(event)

        self._grants.wholes[self._transfer_id] = self
        try:
            give_up = partial(self.abort, "revoked")
            PartedTransfer(self._transfer_id, self._parts, give_up, cast(PartListener, tell)).begin(start)
        except KaveriError:
            del self._grants.wholes[self._transfer_id]
            raise

    def extend(self, block_ids: Sequence[int]) -> bool:
        """Add destination blocks (ids in the whole pool) to all parts. Returns False if all have ended: the caller
        keeps them."""
        self._block_ids += block_ids
        is_leased = False
        for part in self._parts:
            if (landing := self._grants.landings.get(part.transfer_id)) is not None:
                is_leased |= landing.extend(part_blocks(self._pool.layout, PartPlace(0, part.layout), block_ids))
        return is_leased

    def abort(self, reason: str) -> None:
        """Cancel the parts that have not ended."""
        for part in self._parts:
            if (landing := self._grants.landings.get(part.transfer_id)) is not None:
                landing.abort(reason)
