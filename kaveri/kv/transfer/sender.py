"""KvSender: pushes KV blocks of its own pool into the blocks that a receiver's ticket names.

ticket.layout                                  way of the blocks
the pool's own                                 direct, block by block (peer)
other block_tokens, or the other known order   converted in staging memory (mapped_pushes)
some of the layers, or of the heads            likewise, when the caller asks for a part
anything else                                  LayoutMismatch, before a byte moves
"""

import time
from collections.abc import Sequence
from functools import partial

from kaveri.errors import InvalidArgument, TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory, xxh3
from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.mapped_pushes import STAGING_BYTES, MappedPushes
from kaveri.kv.transfer.outgoing import Push
from kaveri.kv.transfer.part_transfers import PartedPush
from kaveri.kv.transfer.peer import Peer, PeerOptions, Route, SenderState
from kaveri.kv.transfer.push import (
    IsIntact,
    LocalDoneListener,
    PushAccepted,
    PushEvent,
    PushExtended,
    PushFailed,
    PushListener,
    PushMarked,
)
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX, Transport

__all__ = ["KvSender", "PushAccepted", "PushEvent", "PushExtended", "PushFailed", "PushListener", "PushMarked"]

_ANSWER_GRACE_S = 1.0
"""A landing just before the ticket's expiry is answered just after it."""


class KvSender:
    """Pushes KV blocks of `pool` to receivers. Thread-safe, but a listener must not call close().

    An opened push ends in exactly one event, PushAccepted or PushFailed. After a PushFailed the receiver may still have
    landed it, if its answer was lost, so a retry must count as a new attempt of the request. An open ticket
    (Ticket.is_open) permits marks, which the receiver answers (PushMarked), more destination blocks (PushExtended), and
    an end with fewer blocks than granted; its time limit counts from the last answered mark.

    Each receiver has one thread and one connection, made when needed and closed after `idle_s` seconds without a push.
    Writes are limited by the receiver's credit; a receiver that gives none for `credit_timeout_s` seconds, while a
    write waits for it, is presumed dead.

    transports: in order of preference. on_local_done: called with source blocks that are no longer read, before their
    push ends; not for all blocks of a failed push, nor for pushes to other layouts. is_intact: permits source blocks to
    change before they are read, in pushes to the pool's own layout. staging_bytes: memory for each of a few other
    layouts, while receivers need them; see MappedPushes.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: PushListener,
        *,
        transports: Sequence[Transport],
        digest: DigestFactory = xxh3,
        idle_s: float = 60.0,
        credit_timeout_s: float = 10.0,
        on_local_done: LocalDoneListener | None = None,
        is_intact: IsIntact | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.pool = pool
        self._listener = listener
        self._transports = tuple(transports)
        options = PeerOptions(digest, idle_s, credit_timeout_s, on_local_done, is_intact)
        self._state = SenderState(pool, options, Reporter("kv-sender"))
        # Pushes by parts, by transfer id. The first part has the id of its whole.
        self._wholes: dict[bytes, PartedPush] = {}
        make_sender = partial(
            KvSender, transports=self._transports, digest=digest, idle_s=idle_s, credit_timeout_s=credit_timeout_s
        )
        self._mapped = MappedPushes(pool, self._state.pushes, make_sender, staging_bytes)

    def open(
        self,
        ticket: Ticket,
        parts: Sequence[Ticket] = (),
        *,
        part: bool = False,
        listener: PushListener | None = None,
    ) -> None:
        """Begin the push that a ticket permits; connects in the background.

        parts: tickets of the parts that this pool pushes, if any (pushed_tickets); the push is accepted when all are.
        part: True if the ticket may be for some of the layers or KV heads; the caller covers the others by other
        tickets. An open ticket may be for some of the heads, but its blocks must otherwise be like the pool's.
        listener: receives the push's events in place of the sender's listener.

        Raises LayoutMismatch, naming the field, when the blocks cannot be mapped, and TransferFailed when there is no
        common transport, the sender is closed, or no thread can start; PushFailed may report these for a push to
        another layout.
        """
        state, listener = self._state, listener or self._listener
        assert ticket.transfer_id not in (self._wholes if parts else state.pushes), "a ticket is used once"
        if parts:
            PartedPush(ticket, parts, state.pushes, self._wholes).open(
                listener, lambda each, told: self.open(each, part=True, listener=told)
            )
            return
        if ticket.layout != self.pool.layout:
            assert state.options.is_intact is None, "converted blocks are not checked"
            self._mapped.open(ticket, listener, part=part)
            return
        with state.lock:
            if state.is_closed:
                raise TransferFailed("the sender is closed")
            key = (ticket.endpoints, ticket.epoch)
            peer = state.peers.get(key)
            if peer is None:
                peer = Peer(state, key, self._routes(ticket))
                try:
                    # The thread waits for the lock meanwhile.
                    peer.thread.start()
                except RuntimeError as error:
                    raise TransferFailed(f"no thread for a connection: {error}") from error
                state.peers[key] = peer
                state.threads.add(peer.thread)
            peer.open(ticket, listener)
        expiry_s = ticket.expires_in_s + _ANSWER_GRACE_S
        state.reporter.call_after(expiry_s, partial(self._expire, ticket.transfer_id))

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queue source blocks of one layer: source_blocks[i] goes to ticket.block_ids[first_index + i]. Never waits.

        Per layer, blocks are written in index order, each exactly once, and must not change until PushAccepted or
        PushFailed, unless the sender has is_intact. The queue holds block ids only, as many as the ticket has. Unknown
        (already failed) transfers are ignored. If the receiver's layout differs, first_index counts the request's
        source blocks from first_source_block(ticket) on, and layers that the ticket does not ask for are ignored.
        Raises InvalidArgument for blocks outside the pool or beyond the ticket's.
        """
        self.write_layers(transfer_id, range(layer, layer + 1), first_index, source_blocks)

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queue the same source blocks of each layer; see write(). Sent together, as far as there is credit."""
        # Its bytes would be missing from a frame, and the receiver would take those of other pushes for them.
        if source_blocks and not 0 <= min(source_blocks) <= max(source_blocks) < self.pool.block_count:
            given = f"{min(source_blocks)} to {max(source_blocks)}"
            raise InvalidArgument("source_blocks", given, f"in [0, {self.pool.block_count})")
        push = self._wholes.get(transfer_id) or self._state.pushes.get(transfer_id)
        if push is not None and source_blocks:
            push.write(layers, first_index, tuple(source_blocks))

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        """Mark an open push: the receiver verifies blocks [0, block_count) of all layers and keeps them if the push
        fails.

        PushMarked follows. note: at most 4 KiB, delivered with the mark. Unknown (already failed) transfers are
        ignored. Raises InvalidArgument unless block_count exceeds the last mark's and is queued in every layer.
        """
        require_note(note)
        if (push := self._wholes.get(transfer_id) or self._state.pushes.get(transfer_id)) is not None:
            push.mark(block_count, note)

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """Finish a push whose blocks are all queued. note: at most 4 KiB, delivered after all bytes."""
        require_note(note)
        if (push := self._wholes.get(transfer_id) or self._state.pushes.get(transfer_id)) is not None:
            push.finish(note)

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        """Give a push up. PushFailed follows once its source blocks are no longer read; unknown ids are ignored.

        keep_marked: the receiver should keep the marked blocks, as after a lost connection.
        """
        if (push := self._wholes.get(transfer_id) or self._state.pushes.get(transfer_id)) is not None:
            push.abort(keep_marked=keep_marked)

    def flow(self) -> SenderFlow:
        """Return a flow-control snapshot of the active pushes, with each receiver once per layout pushed to it."""
        state = self._state
        with state.lock:
            peers = tuple(peer.flow() for peer in state.peers.values())
            direct = SenderFlow(peers, state.credit_waits, state.credit_wait_s)
        return SenderFlow.total((direct, self._mapped.flow()))

    def close(self) -> None:
        """Break all connections, fail all pushes, end threads. Waits for a connection attempt. Idempotent."""
        self._mapped.close()
        state = self._state
        with state.lock:
            state.is_closed = True
            for peer in state.peers.values():
                peer.close()
            threads = tuple(state.threads)
        for thread in threads:
            thread.join()
        state.reporter.close()
        self._mapped.join()

    def check_integrity(self) -> None:
        """Assert that every staging block, of pushes to other layouts, is free or held by an active push."""
        self._mapped.check_integrity()

    def _routes(self, ticket: Ticket) -> tuple[Route, ...]:
        routes = tuple(
            (transport, endpoint)
            for transport in self._transports
            for endpoint in ticket.endpoints
            if endpoint.transport == transport.name
        )
        if not routes:
            offered = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "none"
            spoken = ", ".join(transport.name for transport in self._transports)
            raise TransferFailed(f"no transport in common: {offered} there, {spoken} here")
        return routes

    def _expire(self, transfer_id: bytes) -> None:
        push = self._state.pushes.get(transfer_id)
        if not isinstance(push, Push):
            return
        left_s = push.expires_at_s + _ANSWER_GRACE_S - time.monotonic()
        if left_s > 0:
            self._state.reporter.call_after(left_s, partial(self._expire, transfer_id))
        else:
            push.abort("the ticket expired", keep_marked=True)


def require_note(note: bytes) -> None:
    """Raise ValueError if a note, the bytes sent with a mark or the end of a push, exceeds NOTE_BYTES_MAX."""
    if len(note) > NOTE_BYTES_MAX:
        raise ValueError(f"a note of {len(note)} bytes; at most {NOTE_BYTES_MAX} travel")
