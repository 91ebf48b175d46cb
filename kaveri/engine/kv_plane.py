"""Data path of one KV pool: pushes blocks as they are computed, and receives pushes. Knows no requests."""

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
    """Event of a KvPlane: the ticket's blocks are leased to an incoming transfer, so the sender may get the ticket."""

    transfer_id: bytes


PlaneEvent = Granted | PushEvent | TransferEvent
PlaneListener = Callable[[PlaneEvent], None]
"""Called on any thread, also within grant() and open_push()."""


class KvPlane(Protocol):
    """Interface by which an engine pushes and receives KV. Thread-safe; no call but close() waits.

    Every opened push ends with PushAccepted or PushFailed, every granted transfer with TransferLanded or
    TransferReleased. Then nothing touches its blocks any more.
    """

    @property
    def endpoints(self) -> tuple[tuple[KvEndpoint, ...], ...]:
        """Addresses that accept pushes: for each tensor-parallel rank, best first. Empty if pushes are not accepted."""

    def open_push(self, source: Any, ticket: Ticket) -> None:
        """Start pushing a sequence's KV to the ticket's blocks as it is computed. source: handle of the sequence."""

    def abort_push(self, transfer_id: bytes) -> None:
        """Cancel an outgoing push. Ignored before open_push() and after the push has ended."""

    def grant(self, ticket: Ticket) -> None:
        """Lease the ticket's blocks to its incoming transfer. Granted follows, or TransferReleased alone on failure."""

    def revoke(self, transfer_id: bytes) -> None:
        """Cancel an incoming transfer. Ignored before grant() and after the transfer has ended."""

    def flow(self) -> KvFlow:
        """Snapshot of the KV transfers under way, in both directions."""

    def close(self) -> None:
        """End all transfers. Idempotent."""


@dataclass(eq=False, slots=True)
class Source:
    """A sequence's blocks, and how many of them are computed and pushed. Guarded by PoolPlane."""

    block_ids: list[int]
    token_count: int
    ready: int = 0
    """Leading blocks with final KV in every layer. A part-full last block counts once the prompt is computed."""
    ready_in_step: int = 0
    """Same, for the layers that the running step has passed; equals `ready` between steps."""
    note: bytes | None = None
    """Serialized first token; None until it is drawn."""
    transfer_id: bytes | None = None
    """Id of the latest push. It may have failed meanwhile: the sender ignores later writes to it."""
    first_block: int = 0
    """Number of leading blocks that the receiver of that push has already."""
    written: list[int] = field(default_factory=list)
    """Per layer, number of leading blocks queued for that push, or skipped by first_block."""


class PoolPlane:
    """KvPlane of one pool, to which the engine reports its progress layer by layer. Thread-safe.

    Per layer, blocks are sent in index order and each once, although two threads write: the engine's own during a step,
    and the caller of open_push() for blocks computed before. Every write to the sender happens under one lock, which is
    never held while waiting.

    layout: of the whole engine. rank: tensor-parallel rank of the pool. make_receiver: None if pushes are not accepted.
    Raises the makers' errors.
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
        """Push a sequence: queue its computed blocks, and its first token if known. Replaces an earlier push of it."""
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
        """Announce a step that computes prompts. advances: its prompts, each with its number of computed tokens after
        the step, prefixes from the cache included."""
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
        """Mark the step as computed; push the layers that layer_done() has not reported."""
        with self._lock:
            for source in self._in_step:
                source.ready = source.ready_in_step
                if source.transfer_id is not None:
                    for layer in range(self._pool_layout.layer_count):
                        self._write(source, layer, source.ready)
            self._in_step.clear()
            self._layers_done = 0

    def hand_over(self, source: Source, first_token_id: int) -> None:
        """Record the first token of a sequence: its open push, if any, and every later one deliver it."""
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
    """Return the first token in the final note of a push; None if the note is malformed."""
    try:
        return kv_pb2.HandOver.FromString(note).first_token_id
    except DecodeError:
        return None
