"""The prefill side's pushes: readable blocks, written blocks, and the completion of hand-overs.

Per layer, blocks go out in index order and each exactly once, although two threads write: the engine's own, layer by
layer while a step computes, and the caller of push_to, for blocks computed before. So every call to the sender happens
under one lock, which is never held while waiting for anything. The end of a push takes no lock of this file.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.push import PushSender
from kaveri.kv.transfer.ticket import Ticket, first_source_block
from kaveri.v1 import kv_pb2


@dataclass(eq=False, slots=True)
class Source:
    """A sequence's blocks that may be pushed and those that are. Guarded by Pushes."""

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


class Pushes:
    """Feeds the sender from the sources of one engine. Thread-safe."""

    def __init__(self, sender: PushSender, layout: KvLayout) -> None:
        self._sender = sender
        self._layout = layout
        self._lock = threading.Lock()
        self._in_step: list[Source] = []
        self._layers_done = 0

    def open(self, source: Source, ticket: Ticket) -> None:
        """Begin a push: queue the computed blocks, and hand over if those are all.

        The blocks whose tokens the receiver has already (ticket.first_block) are left out. The sender no longer reads
        for an earlier push of this source. Raises LayoutMismatch and TransferFailed.
        """
        with self._lock:
            self._sender.open(ticket)
            source.transfer_id = ticket.transfer_id
            source.first_block = first_source_block(ticket, self._layout)
            source.written = [source.first_block] * self._layout.layer_count
            for layer in range(self._layout.layer_count):
                self._write(source, layer, source.ready_in_step if layer < self._layers_done else source.ready)
            if source.note is not None:
                self._sender.finish(ticket.transfer_id, source.note)

    def abort(self, transfer_id: bytes) -> None:
        """Cancel a push; the sender reports when the blocks are no longer read. After open(), never before it."""
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
                    for layer in range(self._layout.layer_count):
                        self._write(source, layer, source.ready)
            self._in_step.clear()
            self._layers_done = 0

    def hand_over(self, source: Source, first_token_id: int) -> None:
        """Record that the first token is drawn: the open push, if any, and every later one carry it."""
        with self._lock:
            source.note = kv_pb2.HandOver(first_token_id=first_token_id).SerializeToString()
            if source.transfer_id is not None:
                self._sender.finish(source.transfer_id, source.note)

    def _write(self, source: Source, layer: int, block_count: int) -> None:
        assert source.transfer_id is not None
        first = source.written[layer]
        if block_count > first:
            source.written[layer] = block_count
            index = first - source.first_block
            self._sender.write(source.transfer_id, layer, index, source.block_ids[first:block_count])


def first_token_of(note: bytes) -> int | None:
    """Return the token in a hand-over; None if the note is malformed."""
    try:
        return kv_pb2.HandOver.FromString(note).first_token_id
    except DecodeError:
        return None


def ticket_refusal(ticket: Ticket, token_count: int) -> str | None:
    """Return why a prompt of this many tokens cannot be pushed by this ticket; None if it can, as far as they show."""
    pushed = ticket.layout.block_count(token_count) - ticket.first_block
    if (ticket.token_count, len(ticket.block_ids)) == (token_count, pushed):
        return None
    return f"the ticket is for {ticket.token_count} tokens, the request has {token_count}"
