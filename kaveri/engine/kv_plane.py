"""Moves the KV of one pool: pushes blocks as they are computed, and lets pushes land in it. Knows no request."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow
from kaveri.kv.transfer.landing import TicketReceiver
from kaveri.kv.transfer.push import PushSender
from kaveri.kv.transfer.receiver import LandingListener, TransferEvent, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushEvent, PushFailed, PushListener
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, first_source_block, pushed_tickets, taken_tickets
from kaveri.v1 import kv_pb2


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


@dataclass(eq=False, slots=True)
class Source:
    """A sequence's blocks that may be pushed and those that are. Guarded by PoolPlane."""

    block_ids: list[int]
    token_count: int
    ready: int = 0
    """Blocks with final KV in every layer. A part-full last block counts once the prompt is computed."""
    ready_in_step: int = 0
    """The same in the layers that the running step has passed; equals `ready` between steps."""
    note: bytes | None = None
    """The serialized hand-over, once the first token is known."""
    transfer_id: bytes | None = None
    """The last push opened. It may have failed meanwhile: the sender ignores later writes to it."""
    first_block: int = 0
    """Number of leading blocks whose tokens the receiver of that push has already."""
    written: list[int] = field(default_factory=list)
    """Per layer, number of blocks of the source that are queued for that push."""


class PoolPlane:
    """A KvPlane of one pool, fed from the sources of one engine. Thread-safe.

    Per layer, blocks go out in index order and each exactly once, although two threads write: the engine's own, layer
    by layer while a step computes, and the caller of open_push, for blocks computed before. Every write to the
    sender happens under one lock, which is never held while waiting for anything.

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
        self._pool_layout = layout.rank(rank)
        self._rank = rank
        self._listener = listener
        self._receiver = make_receiver(listener) if make_receiver is not None else None
        receiver = self._receiver
        self.endpoints: tuple[tuple[KvEndpoint, ...], ...] = (receiver.endpoints,) if receiver is not None else ()
        self._sender = make_sender(listener)
        self._lock = threading.Lock()
        self._in_step: list[Source] = []
        self._layers_done = 0

    def open_push(self, source: Source, ticket: Ticket) -> None:
        """Queue the computed blocks, and hand over if those are all. The sender no longer reads for an earlier push of
        this source."""
        parts = pushed_tickets(self._layout, self._rank, ticket) if ticket.parts else ()
        if ticket.parts and not parts:
            # Other ranks hold the same heads, and push them.
            self._listener(PushAccepted(ticket.transfer_id, 0, ""))
            return
        layer_count = self._pool_layout.layer_count
        try:
            with self._lock:
                self._sender.open(ticket, parts)
                source.transfer_id = ticket.transfer_id
                source.first_block = first_source_block(ticket, self._pool_layout)
                source.written = [source.first_block] * layer_count
                for layer in range(layer_count):
                    self._write(source, layer, source.ready_in_step if layer < self._layers_done else source.ready)
                if source.note is not None:
                    self._sender.finish(ticket.transfer_id, source.note)
        except KaveriError as error:
            self._listener(PushFailed(ticket.transfer_id, str(error)))

    def abort_push(self, transfer_id: bytes) -> None:
        # Under the lock: after the push is open, never before it.
        with self._lock:
            self._sender.abort(transfer_id)

    def begin_step(self, advances: Iterable[tuple[Source, int]]) -> None:
        """Record that the engine is about to compute prompts, which are followed layer by layer.

        advances: each prompt of the step, with the number of its tokens that are computed after it. KV that a source's
        blocks hold already, from a prefix cache, counts as computed by this step.
        """
        with self._lock:
            for source, computed in advances:
                ended = computed == source.token_count
                source.ready_in_step = len(source.block_ids) if ended else computed // self._layout.block_tokens
                self._in_step.append(source)

    def layer_done(self, layer: int) -> None:
        """Push the step's KV of this layer, which is in the pool, while the next layer computes."""
        with self._lock:
            self._layers_done = layer + 1
            for source in self._in_step:
                if source.transfer_id is not None:
                    self._write(source, layer, source.ready_in_step)

    def end_step(self) -> None:
        """Record that all layers are computed; catch up with those that layer_done has not reported."""
        with self._lock:
            for source in self._in_step:
                source.ready = source.ready_in_step
                if source.transfer_id is not None:
                    for layer in range(self._pool_layout.layer_count):
                        self._write(source, layer, source.ready)
            self._in_step.clear()
            self._layers_done = 0

    def hand_over(self, source: Source, first_token_id: int) -> None:
        """Record that the first token is drawn: the open push, if any, and every later one carry it."""
        with self._lock:
            source.note = kv_pb2.HandOver(first_token_id=first_token_id).SerializeToString()
            if source.transfer_id is not None:
                self._sender.finish(source.transfer_id, source.note)

    def grant(self, ticket: Ticket) -> None:
        assert self._receiver is not None, "only a plane that takes pushes grants"
        try:
            self._receiver.lease(ticket, taken_tickets(self._rank, ticket) if ticket.parts else ())
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

    def _write(self, source: Source, layer: int, block_count: int) -> None:
        assert source.transfer_id is not None
        first = source.written[layer]
        if block_count > first:
            source.written[layer] = block_count
            index = first - source.first_block
            blocks = source.block_ids[first:block_count]
            self._sender.write_layers(source.transfer_id, range(layer, layer + 1), index, blocks)


def first_token_of(note: bytes) -> int | None:
    """Return the token in a hand-over; None if the note is malformed."""
    try:
        return kv_pb2.HandOver.FromString(note).first_token_id
    except DecodeError:
        return None
