"""A sender whose receivers may keep KV in other blocks, or each a part of it: by layers, by KV heads.

    ticket.layout                                  goes
    the pool's own                                 directly, block by block (KvSender)
    other block_tokens, or the other known order   mapped, through staging (staged_pushes)
    some of the layers, or of the heads            mapped, as one part of several (open_parts)
    anything else                                  LayoutMismatch, before a byte moves

Split at the source, merged at the destination (DéjàVu, section 4.1.2): receivers are ordinary ones, each takes what its
own ticket says.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kaveri.errors import InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.block_map import map_blocks
from kaveri.kv.digest import DigestFactory, xxh3
from kaveri.kv.flow import SenderFlow
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed, PushListener
from kaveri.kv.staged_pushes import StagedPush, StagedPushes
from kaveri.kv.ticket import Ticket
from kaveri.kv.transport import Transport, require_note
from kaveri.kv.transports import make_transports

STAGING_BYTES = 64 * 2**20
"""Memory for the blocks of one other shape; less where the source pool is smaller, more where four blocks need it."""
STAGINGS_MAX = 4
"""Other shapes that are served at a time. One that is not in use gives way to a new one."""


class MappedSender:
    """KvSender's calls, for receivers of any layout onto which `pool` can be mapped. Any thread; close() not from the
    listener, which is called on several threads, once per opened transfer.

    Memory beside the pool: STAGINGS_MAX * staging_bytes at the most (see StagedPushes for very large blocks), and
    nothing while all receivers are alike. A shape whose staging gives way frees its memory before another takes any.
    Arguments as of KvSender.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: PushListener,
        *,
        transports: Sequence[Transport] | None = None,
        digest: DigestFactory = xxh3,
        idle_s: float = 60.0,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.pool = pool
        self._listener = listener
        self._transports = tuple(transports or make_transports())
        self._digest = digest
        self._idle_s = idle_s
        self._staging_bytes = min(staging_bytes, pool.memory.nbytes)
        self._direct = KvSender(pool, self._on_part, transports=self._transports, digest=digest, idle_s=idle_s)
        self._lock = threading.Lock()
        # By shape, the one used last at the end.
        self._stagings: dict[KvLayout, StagedPushes] = {}
        self._given_up: list[StagedPushes] = []
        # Staging that is in memory, that on its way out included.
        self._room = threading.BoundedSemaphore(STAGINGS_MAX)
        self._transfers: dict[bytes, _Transfer] = {}
        self._transfer_of: dict[bytes, _Transfer] = {}
        self._closed = False

    def open(self, ticket: Ticket) -> None:
        """Begins a transfer to one receiver of all that `pool` holds. Raises LayoutMismatch, naming the field, when it
        cannot be mapped, and TransferFailed as KvSender.open does, but that a mapped push may tell that by PushFailed.
        """
        if ticket.layout == self.pool.layout:
            self._direct.open(ticket)
            return
        self.pool.layout.require_mappable(ticket.layout)
        self._open(ticket.transfer_id, (ticket,))

    def open_parts(self, transfer_id: bytes, tickets: Sequence[Ticket]) -> None:
        """Begins one transfer, of this name, to all ranks of an instance: a ticket of each, for its layers and heads.

        It is accepted when all parts are. When one fails the others are given up and PushFailed follows; receivers may
        have landed some of them, so whoever granted the tickets takes all back. kv_bytes and the transport's label are
        of all parts together.

        tickets: alike but for their receivers and the part of the model, together all of the pool's layers and heads;
        several may be of the same ones. Raises LayoutMismatch and InvalidArgument.
        """
        if not tickets:
            raise InvalidArgument("tickets", tickets, "at least one")
        if len({ticket.transfer_id for ticket in tickets}) < len(tickets):
            raise InvalidArgument("tickets", len(tickets), "of different transfers")
        first = tickets[0]
        for ticket in tickets:
            for field in ("token_count", "first_block"):
                if getattr(ticket, field) != getattr(first, field):
                    raise InvalidArgument(field, getattr(ticket, field), f"{getattr(first, field)} in every ticket")
            for field in ("block_tokens", "order"):
                if getattr(ticket.layout, field) != getattr(first.layout, field):
                    raise LayoutMismatch(field, getattr(first.layout, field), getattr(ticket.layout, field))
            self.pool.layout.require_part(ticket.layout)
        self.pool.layout.require_whole([ticket.layout for ticket in tickets])
        self._open(transfer_id, tickets)

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        """As KvSender.write: blocks of one layer of `pool`, in the order of tokens, each exactly once.

        first_index: of the first of them among those of the request's blocks that hold a token which the ticket asks
        for; see first_source_block. Never blocks on network or staging.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._direct.write(transfer_id, layer, first_index, source_blocks)
            return
        self.pool.require_blocks("source_blocks", source_blocks)
        for part in transfer.parts:
            part.pusher.write(part.ticket.transfer_id, layer, first_index, source_blocks)

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """As KvSender.finish; every part carries the note."""
        # Here, and not where the staging thread says it: all of that thread's pushes would end with it.
        require_note(note)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._direct.finish(transfer_id, note)
            return
        for part in transfer.parts:
            part.pusher.finish(part.ticket.transfer_id, note)

    def abort(self, transfer_id: bytes) -> None:
        """As KvSender.abort."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._direct.abort(transfer_id)
        else:
            self._abort_parts(transfer)

    def flow(self) -> SenderFlow:
        """As KvSender.flow; a receiver with pushes of several shapes counts once for each."""
        with self._lock:
            stagings = tuple(self._stagings.values())
        return SenderFlow.total((self._direct.flow(), *(staging.flow() for staging in stagings)))

    def close(self) -> None:
        """As KvSender.close."""
        with self._lock:
            self._closed = True
            stagings = (*self._stagings.values(), *self._given_up)
        for staging in stagings:
            staging.close()
        self._direct.close()
        for staging in stagings:
            staging.join()

    def check_integrity(self) -> None:
        """Asserts that every staging block is free or held by a push under way. Does not look into the direct ones."""
        with self._lock:
            stagings = tuple(self._stagings.values())
        for staging in stagings:
            staging.check_integrity()

    def _open(self, transfer_id: bytes, tickets: Sequence[Ticket]) -> None:
        with self._lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            assert transfer_id not in self._transfers, "the name of a transfer is used once"
            parts = tuple(_Part(ticket, self._pusher(ticket.layout)) for ticket in tickets)
            transfer = _Transfer(transfer_id, parts)
            self._transfers[transfer_id] = transfer
            for part in parts:
                self._transfer_of[part.ticket.transfer_id] = transfer
        for part in parts:
            if isinstance(part.pusher, StagedPushes):
                part.pusher.open(StagedPush(part.ticket, map_blocks(self.pool.layout, part.ticket.layout)))
                continue
            try:
                part.pusher.open(part.ticket)
            except TransferFailed as error:
                self._on_part(PushFailed(part.ticket.transfer_id, error.reason))
        # Those that were not open yet when another failed.
        if transfer.failure is not None:
            self._abort_parts(transfer)

    def _pusher(self, layout: KvLayout) -> "KvSender | StagedPushes":
        """Under the lock: what pushes to receivers of this layout. Raises TransferFailed."""
        if layout == self.pool.layout:
            return self._direct
        shape = replace(layout, first_layer=0, first_kv_head=0)
        staging = self._stagings.pop(shape, None)
        if staging is None or staging.is_closed:
            if staging is not None:
                self._give_up(staging)
            self._make_room()
            staging = StagedPushes(
                self.pool,
                shape,
                self._on_part,
                transports=self._transports,
                digest=self._digest,
                idle_s=self._idle_s,
                staging_bytes=self._staging_bytes,
                room=self._room,
            )
            try:
                staging.start()
            except RuntimeError as error:
                raise TransferFailed(f"no thread for staging: {error}") from error
        self._stagings[shape] = staging
        return staging

    def _make_room(self) -> None:
        """Under the lock: gives up the staging that is idle for longest, where there are too many."""
        if len(self._stagings) < STAGINGS_MAX:
            return
        busy = {part.pusher for transfer in self._transfers.values() for part in transfer.parts}
        idle = next((shape for shape, staging in self._stagings.items() if staging not in busy), None)
        if idle is None:
            raise TransferFailed(f"KV goes to {STAGINGS_MAX} other layouts already")
        self._give_up(self._stagings.pop(idle))

    def _give_up(self, staging: StagedPushes) -> None:
        """Under the lock."""
        staging.close()
        self._given_up = [each for each in self._given_up if each.is_alive]
        self._given_up.append(staging)

    def _on_part(self, event: PushAccepted | PushFailed) -> None:
        with self._lock:
            transfer = self._transfer_of.pop(event.transfer_id, None)
            if transfer is not None:
                transfer.end_part(event)
                ended = not transfer.left
                if ended:
                    del self._transfers[transfer.transfer_id]
        if transfer is None:
            self._listener(event)
        elif ended:
            self._listener(transfer.outcome())
        elif transfer.failure is not None:
            self._abort_parts(transfer)

    @staticmethod
    def _abort_parts(transfer: "_Transfer") -> None:
        for part in transfer.parts:
            part.pusher.abort(part.ticket.transfer_id)


@dataclass(frozen=True, slots=True)
class _Part:
    ticket: Ticket
    pusher: KvSender | StagedPushes


class _Transfer:
    """One transfer and what became of its parts. Guarded by the sender's lock."""

    def __init__(self, transfer_id: bytes, parts: tuple[_Part, ...]) -> None:
        self.transfer_id = transfer_id
        self.parts = parts
        self.left = {part.ticket.transfer_id for part in parts}
        self.failure: str | None = None
        self._kv_bytes = 0
        self._transports: set[str] = set()

    def end_part(self, event: PushAccepted | PushFailed) -> None:
        """One part has ended."""
        self.left.remove(event.transfer_id)
        part = next(part for part in self.parts if part.ticket.transfer_id == event.transfer_id)
        if isinstance(event, PushAccepted):
            self._kv_bytes += event.kv_bytes
            mapped = isinstance(part.pusher, StagedPushes)
            self._transports.add(f"{event.transport} mapped" if mapped else event.transport)
        elif self.failure is None:
            layout, alone = part.ticket.layout, len(self.parts) == 1
            which = "" if alone else f"layers {_span(layout.layers)}, KV heads {_span(layout.kv_heads)}: "
            self.failure = which + event.reason

    def outcome(self) -> PushAccepted | PushFailed:
        """What became of it, when nothing is left."""
        if self.failure is not None:
            return PushFailed(self.transfer_id, self.failure)
        return PushAccepted(self.transfer_id, self._kv_bytes, " and ".join(sorted(self._transports)))


def _span(numbers: range) -> str:
    return f"{numbers.start}-{numbers.stop - 1}"
