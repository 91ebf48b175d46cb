"""The sending end of a simulated engine's KV transfers, over a KvWire: a PushSender that stands for KvSender.

It writes straight into the receiver's blocks, as RDMA writes and shared memory do: a write does not look at the
transfer.
"""

import asyncio
import contextvars
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kaveri.errors import InvalidArgument, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import PeerFlow, SenderFlow
from kaveri.kv.transfer.push import IsIntact
from kaveri.kv.transfer.sender import PushAccepted, PushExtended, PushFailed, PushListener, PushMarked, require_note
from kaveri.kv.transfer.ticket import Ticket
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

_READ_AFTER_S = 0.03
"""Seconds from a write, a mark or an end until the sender carries it out, if blocks may change; for a slow receiver."""
_ANSWER_GRACE_S = 1.0
"""Seconds past a ticket's expiry that the sender waits for an answer."""


class _PushState(enum.Enum):
    OPENING = enum.auto()
    """The receiver has not confirmed the ticket: nothing may be written."""
    WRITING = enum.auto()
    FINISHED = enum.auto()
    """Everything is sent; the answer decides."""


@dataclass(eq=False, slots=True)
class _Push:
    ticket: Ticket
    peer: "_SimulatedPeer"
    deadline: asyncio.TimerHandle
    state: _PushState = _PushState.OPENING
    queued: list[tuple[int, tuple[int, ...]] | MarkPush] = field(default_factory=list)
    """What waits for the receiver's confirmation: first index within the ticket and source blocks, and marks."""
    written_count: int = 0
    """Blocks that were queued, or sent."""
    marked_count: int = 0
    """Of the last mark that was queued, or sent."""
    note: bytes | None = None


class SimulatedSender:
    """Pushes blocks of `memory`; a PushSender (kaveri/engine/kv_plane.py). is_intact: permits blocks to change before
    they are read, as with KvSender."""

    def __init__(
        self,
        memory: KvMemory,
        layout: KvLayout,
        wire: KvWire,
        listener: PushListener,
        is_intact: IsIntact | None = None,
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._wire = wire
        self._listener = listener
        self._is_intact = is_intact
        self._context = contextvars.copy_context()
        self._pushes: dict[bytes, _Push] = {}
        self._peers: dict[tuple[str, int], _SimulatedPeer] = {}
        self._closed = False

    def open(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        self._layout.require_same(ticket.layout)
        if self._closed:
            raise TransferFailed("the sender is closed")
        addresses = [endpoint.address for endpoint in ticket.endpoints if endpoint.transport == TRANSPORT]
        if not addresses:
            raise TransferFailed("no transport in common")
        # A receiver that was restarted at the same address is another peer.
        place = (addresses[0], ticket.epoch)
        peer = self._peers.get(place)
        if peer is None:
            peer = self._peers[place] = _SimulatedPeer(self, place)
            peer.link = self._wire.connect(addresses[0], peer)
        self._pushes[ticket.transfer_id] = _Push(ticket, peer, self._deadline(ticket))
        peer.send(OpenPush(ticket.transfer_id, ticket.secret, ticket.epoch))

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        push = self._pushes.get(transfer_id)
        if push is not None and layer == 0:
            end, granted_count = first_index + len(source_blocks), len(push.ticket.block_ids)
            if end > granted_count:
                raise InvalidArgument("first_index", f"{first_index} with {len(source_blocks)}", f"in {granted_count}")
            push.written_count = end
            push.queued.append((first_index, tuple(source_blocks)))
            self._flush_soon(push)

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        for layer in layers:
            self.write(transfer_id, layer, first_index, source_blocks)

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        """See KvSender.mark."""
        require_note(note)
        push = self._pushes.get(transfer_id)
        if push is not None:
            assert push.ticket.is_open, "only an open push is marked"
            low, high = push.marked_count, push.written_count
            if not low < block_count <= high:
                raise InvalidArgument("block_count", block_count, f"above {low}, the last mark, and at most {high}")
            push.marked_count = block_count
            push.queued.append(MarkPush(transfer_id, block_count, note))
            self._flush_soon(push)

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        push = self._pushes.get(transfer_id)
        if push is not None:
            push.note = note
            self._flush_soon(push)

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        self._give_up(transfer_id, "aborted", keep_marked)

    def flow(self) -> SenderFlow:
        """What is under way."""
        counts = {
            peer: [len(push.ticket.block_ids) for push in self._pushes.values() if push.peer is peer]
            for peer in self._peers.values()
        }
        return SenderFlow(
            tuple(
                PeerFlow(peer.place[0], TRANSPORT, len(blocks), sum(blocks), 0, 0, 0, False)
                for peer, blocks in counts.items()
            )
        )

    def close(self) -> None:
        """Breaks all connections; what is under way ends without an event. Idempotent."""
        self._closed = True
        for push in self._pushes.values():
            push.deadline.cancel()
        self._pushes.clear()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def opened(self, transfer_id: bytes) -> None:
        """For peers: the receiver has confirmed the ticket."""
        push = self._pushes.get(transfer_id)
        if push is not None and push.state is _PushState.OPENING:
            push.state = _PushState.WRITING
            self._flush(push)

    def kept(self, transfer_id: bytes, block_count: int) -> None:
        """For peers: the receiver keeps what was marked."""
        push = self._pushes.get(transfer_id)
        if push is not None:
            push.deadline.cancel()
            push.deadline = self._deadline(push.ticket)
            self._listener(PushMarked(transfer_id, block_count))

    def extended(self, transfer_id: bytes, first_index: int, block_ids: tuple[int, ...]) -> None:
        """For peers: the push has more destination blocks."""
        push = self._pushes.get(transfer_id)
        if push is not None:
            assert first_index == len(push.ticket.block_ids), "an extension was lost"
            push.ticket = replace(push.ticket, block_ids=push.ticket.block_ids + block_ids)
            self._listener(PushExtended(transfer_id, len(push.ticket.block_ids)))

    def answered(self, peer: "_SimulatedPeer", transfer_id: bytes, reason: str | None) -> None:
        """For peers: the receiver says how the push has ended."""
        if reason is not None:
            # Also for a push that this end has given up: the receiver waits for it.
            peer.send(PushFenced(transfer_id))
        push = self._pushes.get(transfer_id)
        if push is None:
            return
        if reason is None:
            kv_bytes = self._layout.layer_count * push.written_count * self._layout.block_bytes
            self._conclude(push, PushAccepted(transfer_id, kv_bytes, TRANSPORT))
        else:
            self._conclude(push, PushFailed(transfer_id, reason))

    def lost(self, peer: "_SimulatedPeer", reason: str) -> None:
        """For peers: the connection is gone."""
        if self._peers.get(peer.place) is peer:
            del self._peers[peer.place]
        for push in [push for push in self._pushes.values() if push.peer is peer]:
            self._conclude(push, PushFailed(push.ticket.transfer_id, f"connection lost: {reason}"))

    def _flush_soon(self, push: _Push) -> None:
        if self._is_intact is None:
            self._flush(push)
        else:
            # Gives the engine time to reuse the blocks before they are read.
            asyncio.get_running_loop().call_later(_READ_AFTER_S, self._flush, push, context=self._context)

    def _flush(self, push: _Push) -> None:
        if push.state is not _PushState.WRITING or self._pushes.get(push.ticket.transfer_id) is not push:
            return
        for queued in push.queued:
            if isinstance(queued, MarkPush):
                if not self._is_whole(push, queued.block_count):
                    push.queued.clear()
                    return
                push.peer.send(queued)
                continue
            first_index, source_blocks = queued
            targets = push.ticket.block_ids[first_index : first_index + len(source_blocks)]
            kv = [self._memory.get(block_id) for block_id in source_blocks]
            push.peer.send(WriteBlocks(tuple(zip(targets, kv, strict=True))))
        push.queued.clear()
        if push.note is not None and self._is_whole(push, None):
            push.state = _PushState.FINISHED
            push.peer.send(FinishPush(push.ticket.transfer_id, push.written_count, push.note))

    def _is_whole(self, push: _Push, block_count: int | None) -> bool:
        return self._is_intact is None or self._is_intact(push.ticket.transfer_id, block_count)

    def _deadline(self, ticket: Ticket) -> asyncio.TimerHandle:
        """Counted from the opening, or from the last mark that the receiver has confirmed."""
        expire = partial(self._give_up, ticket.transfer_id, "the ticket expired", keep_marked=True)
        loop = asyncio.get_running_loop()
        return loop.call_later(ticket.expires_in_s + _ANSWER_GRACE_S, expire, context=self._context)

    def _give_up(self, transfer_id: bytes, reason: str, keep_marked: bool) -> None:
        push = self._pushes.get(transfer_id)
        if push is not None:
            push.peer.send(PushFenced(transfer_id, keep_marked))
            self._conclude(push, PushFailed(transfer_id, reason))

    def _conclude(self, push: _Push, event: PushAccepted | PushFailed) -> None:
        del self._pushes[push.ticket.transfer_id]
        push.deadline.cancel()
        self._listener(event)


class _SimulatedPeer:
    """The sender's end of one connection; a KvEnd."""

    def __init__(self, sender: SimulatedSender, place: tuple[str, int]) -> None:
        self.place = place
        self.link: KvLink | None = None
        self._sender = sender

    def send(self, message: KvMessage) -> None:
        assert self.link is not None
        self.link.send(message)

    def close(self) -> None:
        assert self.link is not None
        self.link.close()

    def received(self, message: KvMessage) -> None:
        match message:
            case PushOpened(transfer_id):
                self._sender.opened(transfer_id)
            case PushKept(transfer_id, block_count):
                self._sender.kept(transfer_id, block_count)
            case ExtendPush(transfer_id, first_index, block_ids):
                self._sender.extended(transfer_id, first_index, block_ids)
            case PushAnswer(transfer_id, reason):
                self._sender.answered(self, transfer_id, reason)

    def lost(self, reason: str) -> None:
        self._sender.lost(self, reason)
