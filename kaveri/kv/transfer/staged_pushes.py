"""Pushes to receivers of one foreign layout: destination blocks are assembled in staging memory, then sent from there.

Buffered copies (DéjàVu, section 4.1.1, optimisation 1) between unlike layouts: receivers are unaware of it, and digests
are over their own blocks. Owns the staging pool, the thread that copies and the sender that reads it.

    source blocks ── copied, as destination blocks become complete ── staging blocks ── Link.write ── destination blocks

Receivers share the staging blocks by dynamic thresholds (Choudhury and Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches", 1998, with alpha = 1): each may hold as many as are free. A stalled receiver thus delays
no other, and a single one has half of them; several stalled ones may hold all until links or tickets run out of time.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kaveri.errors import InvalidArgument, TransferFailed
from kaveri.kv.layout.block_map import BlockMap
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.layout.regions import copy_regions
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.push import (
    LocalDoneListener,
    PushAccepted,
    PushEnd,
    PushEvent,
    PushExtended,
    PushFailed,
    PushListener,
    PushSender,
)
from kaveri.kv.transfer.ticket import Ticket, first_source_block
from kaveri.telemetry.logs import get_logger

_ROOM_CHECK_S = 0.1
_BLOCKS_MIN = 4
"""Fewest staging blocks of each layer, for any size of block."""


class StagingSender(PushSender, Protocol):
    """Sender of a staging pool (memory for converted blocks), which it keeps until it is closed and gone."""

    @property
    def pool(self) -> KvPool: ...


class MakeSender(Protocol):
    """Factory of senders of a staging pool (memory for converted blocks)."""

    def __call__(self, pool: KvPool, listener: PushListener, *, on_local_done: LocalDoneListener) -> StagingSender:
        """Create a sender for `pool`. listener: receives its pushes' events. on_local_done: called with blocks that are
        no longer read."""


@dataclass(slots=True)
class _StagingBlocks:
    """Free staging blocks of each layer, and counts of those in use."""

    count: int
    """Number of staging blocks in each layer."""
    free: list[list[int]]
    """Per layer, ids of free blocks."""
    held: Counter[tuple[object, int]] = field(default_factory=Counter)
    """Number in use, by (receiver, layer)."""


class StagedPush:
    """A push whose blocks are converted to the receiver's layout in staging memory. write(), mark(), finish() and
    abort() are thread-safe; its StagedPushes calls the others, under its lock. block_map: from the source pool to
    ticket.layout.

    In an open push, a destination block has the tokens of one source block, and may have only some of its heads.
    """

    def __init__(self, ticket: Ticket, block_map: BlockMap, staging: "StagedPushes", listener: PushListener) -> None:
        layer_count = ticket.layout.layer_count
        self.staging = staging
        self.listener = listener
        self.ticket = ticket
        self.block_map = block_map
        self.granted_count = len(ticket.block_ids)
        """Destination blocks, including those that the receiver has added."""
        self.first_block = first_source_block(ticket, block_map.source)
        """The first of the request's source blocks that is pushed."""
        self.block_ids: list[int] = []
        """Source blocks, from first_block on, that may be read in at least one layer."""
        self.readable = [0] * layer_count
        """Per layer, number of block_ids that may be read."""
        self.complete = [0] * layer_count
        """Per layer, number of destination blocks that can be assembled from those."""
        self.staged = [0] * layer_count
        """Per layer, number of destination blocks that have been given a staging block."""
        self.due: dict[int, None] = {}
        """Layers with destination blocks that are complete and not staged, oldest first."""
        self.held: list[set[int]] = [set() for _ in range(layer_count)]
        """Per layer, the staging blocks in use."""
        self.marks: deque[tuple[int, bytes]] = deque()
        """Marks of an open push that wait for staging: block counts, with their notes."""
        self.marked_count = 0
        """Blocks covered by the latest mark, whether it was sent or still waits."""
        self.opened = False
        self.aborted = False
        self.note: bytes | None = None
        self.finished = False
        self.reading = False
        """True while source blocks are being copied."""
        self.outcome: PushAccepted | PushFailed | None = None
        """The outcome, held back until `reading` is False."""

    @property
    def transfer_id(self) -> bytes:
        return self.ticket.transfer_id

    @property
    def receiver(self) -> object:
        """Key shared by all pushes to the same receiver: its addresses and epoch."""
        return self.ticket.endpoints, self.ticket.epoch

    def write(self, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Add source blocks that may be read from now on, of these source layers. first_index: that of the first one,
        counted from the push's first source block."""
        with self.staging.changed:
            if self.outcome is None:
                for source_layer in layers:
                    self._write_layer(source_layer, first_index, source_blocks)
                self.staging.changed.notify()

    def mark(self, block_count: int, note: bytes) -> None:
        """Mark blocks [0, block_count), once they are in staging memory. Raises InvalidArgument unless block_count
        exceeds the last mark's and write() has had all of them."""
        with self.staging.changed:
            if self.outcome is not None or self.note is not None:
                return
            low, high = self.marked_count, min(self.readable)
            if not low < block_count <= high:
                raise InvalidArgument("block_count", block_count, f"above {low}, the last mark, and at most {high}")
            self.marked_count = block_count
            self.marks.append((block_count, note))
            self.staging.changed.notify()

    def finish(self, note: bytes) -> None:
        """Send the end of the push, with its note, once everything is in staging memory."""
        with self.staging.changed:
            if self.outcome is None:
                self.note = note
                self.staging.changed.notify()

    def abort(self, *, keep_marked: bool = False) -> None:
        """Give the push up. keep_marked: the receiver should keep the marked blocks."""
        with self.staging.changed:
            self.aborted = True
            sender = self.staging.sender if self.opened else None
        # Otherwise the sender is notified after its open(), so that the receiver is notified as well.
        if sender is not None:
            sender.abort(self.transfer_id, keep_marked=keep_marked)

    @property
    def all_staged(self) -> bool:
        """True if every byte is with the sender, or being copied into staging memory."""
        if self.ticket.is_open:
            # It may end with fewer blocks than it was granted.
            return not self.due and not self.marks
        return not self.due and all(count == self.granted_count for count in self.staged)

    def copy(self, source: KvPool, staging: KvPool, layer: int, first_index: int, staging_ids: Sequence[int]) -> None:
        """Assemble destination blocks [first_index, first_index + len(staging_ids)) of a layer in the blocks
        staging_ids."""
        ticket, block_tokens = self.ticket, self.ticket.layout.block_tokens
        source_tokens = self.block_map.source.block_tokens
        # [first, stop) tokens of these blocks; the last one may be part full, to an extent that open pushes do not
        # state.
        first = (ticket.first_block + first_index) * block_tokens
        stop = first + len(staging_ids) * block_tokens
        tokens = range(first, stop if ticket.is_open else min(stop, ticket.token_count))
        if len(tokens) < len(staging_ids) * block_tokens:
            # Data left by an earlier push does not matter.
            staging.memory[layer, staging_ids[-1]] = 0
        first_source = tokens.start // source_tokens
        last_source = -(-tokens.stop // source_tokens)
        source_ids = self.block_ids[first_source - self.first_block : last_source - self.first_block]
        copies = self.block_map.copies(tokens, source_ids, first_source * source_tokens, staging_ids, first)
        source_layer = self.block_map.source_layer(layer)
        copy_regions(
            copies,
            source.memory[source_layer : source_layer + 1].reshape(1, -1),
            staging.memory[layer : layer + 1].reshape(1, -1),
        )

    def _write_layer(self, source_layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        layer = source_layer - self.block_map.source_layer(0)
        if not 0 <= layer < len(self.readable):
            return  # another part's
        assert first_index == self.readable[layer], "a block was left out or written twice"
        end = first_index + len(source_blocks)
        if self.ticket.is_open and end > self.granted_count:
            count = self.granted_count
            raise InvalidArgument("first_index", f"{first_index} with {len(source_blocks)} blocks", f"in {count}")
        self.block_ids.extend(source_blocks[len(self.block_ids) - first_index :] if end > len(self.block_ids) else ())
        self.readable[layer] = end
        ticket, block_tokens = self.ticket, self.ticket.layout.block_tokens
        tokens = (self.first_block + end) * self.block_map.source.block_tokens
        if ticket.is_open:
            self.complete[layer] = end
        elif tokens >= ticket.token_count:
            self.complete[layer] = len(ticket.block_ids)
        else:
            self.complete[layer] = max(0, tokens // block_tokens - ticket.first_block)
        if self.complete[layer] > self.staged[layer]:
            self.due[layer] = None


class StagedPushes:
    """All pushes of one sender to receivers with one layout other than its pool's. Thread-safe.

    shape: the receivers' layout without its place in the model, so that all ranks of an instance share the staging
    memory: at most staging_bytes, and at least four blocks of each layer. The thread here allocates and touches it, so
    that no caller waits, and frees it at its end. room: semaphore held while the memory is allocated. Each opened
    push's listener is called once with its end, on a thread of this object; its source blocks are no longer read then.
    """

    def __init__(
        self,
        source: KvPool,
        shape: KvLayout,
        *,
        make_sender: MakeSender,
        staging_bytes: int,
        room: threading.BoundedSemaphore,
    ) -> None:
        self._source = source
        self._shape = shape
        self._make_sender = make_sender
        self._room_for_memory = room
        self.changed = threading.Condition()
        # In round-robin order.
        self._pushes: dict[bytes, StagedPush] = {}
        count = max(_BLOCKS_MIN, staging_bytes // (shape.layer_count * shape.block_bytes))
        self._blocks = _StagingBlocks(count, [list(range(count - 1, -1, -1)) for _ in range(shape.layer_count)])
        # Made by the thread, with its memory, before it takes the first push, and freed with it.
        self.sender: StagingSender | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-stage", daemon=True)

    def start(self) -> None:
        """Start the thread, once and first. Raises RuntimeError if that fails; there is nothing to close then."""
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True if no more pushes are accepted, after close() or a failure."""
        return self._closing

    @property
    def is_alive(self) -> bool:
        """True while staging memory or a thread is in use."""
        return self._thread.is_alive()

    def open(self, push: StagedPush) -> None:
        """Begin a push; every error is reported by a PushFailed."""
        with self.changed:
            closed = self._closing
            if not closed:
                assert push.transfer_id not in self._pushes, "a ticket is used once"
                self._pushes[push.transfer_id] = push
                self.changed.notify()
        if closed:
            push.listener(PushFailed(push.transfer_id, "the sender is closed"))

    def flow(self) -> SenderFlow:
        """Return the staging sender's flow-control snapshot; empty while there is no staging memory."""
        sender = self.sender
        return sender.flow() if sender is not None else SenderFlow()

    def close(self) -> None:
        """Fail all pushes, free the memory and end the threads. Does not wait; see join(). Idempotent."""
        with self.changed:
            self._closing = True
            self.changed.notify()

    def join(self) -> None:
        """Wait, after close(), until memory is freed and threads have ended. Not from a listener."""
        self._thread.join()

    def check_integrity(self) -> None:
        """Assert that every staging block of every layer is free or held by exactly one active push."""
        with self.changed:
            for layer, free in enumerate(self._blocks.free):
                held = [block for push in self._pushes.values() for block in push.held[layer]]
                assert sorted(free + held) == list(range(self._blocks.count)), f"layer {layer}: staging is leaked"
            counted = Counter(
                (push.receiver, layer)
                for push in self._pushes.values()
                for layer, held in enumerate(push.held)
                for _ in held
            )
            assert self._blocks.held == counted, "the account of receivers is wrong"

    @property
    def _sender(self) -> StagingSender:
        assert self.sender is not None, "no push is opened before there is a sender"
        return self.sender

    # The thread.

    def _run(self) -> None:
        reason = "the sender was closed"
        has_room = False
        try:
            # An evicted one may still be ending.
            while not (has_room := self._room_for_memory.acquire(timeout=_ROOM_CHECK_S)) and not self._closing:
                pass
            if not has_room:
                return
            self.sender = self._make_sender(
                KvPool(self._shape, self._blocks.count), self._on_event, on_local_done=self._on_local_done
            )
            get_logger().info(
                "kv_layout_mapped",
                block_tokens=self._shape.block_tokens,
                order=self._shape.order,
                staging_bytes=self._sender.pool.memory.nbytes,
            )
            while (turn := self._next_turn()) is not None:
                turn()
                # It keeps the memory alive, through the push.
                del turn
        # After any error, no listener may be left waiting for an event.
        except Exception as error:
            get_logger().exception("kv_staging_failed", error=repr(error))
            reason = f"staging failed: {error!r}"
        finally:
            self.close()
            if self.sender is not None:
                self.sender.close()
            # The last reference to the memory: the other objects form reference cycles.
            self.sender = None
            if has_room:
                self._room_for_memory.release()
            with self.changed:
                for push in self._pushes.values():
                    push.reading = False
                left = tuple(self._pushes.values())
                events = [self._end(push, PushFailed(push.transfer_id, reason)) for push in left]
            for push, event in zip(left, events, strict=True):
                if event is not None:
                    self._report(push, event)

    def _report(self, push: StagedPush, event: PushAccepted | PushFailed) -> None:
        # A listener's error must not end all other pushes.
        try:
            push.listener(event)
        except Exception:
            get_logger().exception("kv_listener_failed")

    def _next_turn(self) -> Callable[[], None] | None:
        # Round robin over pushes.
        with self.changed:
            while not self._closing:
                for push in self._pushes.values():
                    turn = self._turn_of(push)
                    if turn is not None:
                        # After all others.
                        self._pushes[push.transfer_id] = self._pushes.pop(push.transfer_id)
                        return turn
                self.changed.wait()
            return None

    def _turn_of(self, push: StagedPush) -> Callable[[], None] | None:
        if push.outcome is not None:
            return None
        if not push.opened:
            push.opened = True
            return lambda: self._open(push)
        for layer in push.due:
            count = min(self._room(push, layer), push.complete[layer] - push.staged[layer])
            if count:
                return self._take(push, layer, count)
        if push.marks and push.marks[0][0] <= min(push.staged):
            block_count, mark_note = push.marks.popleft()
            return lambda: self._sender.mark(push.transfer_id, block_count, mark_note)
        if push.note is not None and not push.finished and push.all_staged:
            push.finished = True
            note = push.note
            return lambda: self._sender.finish(push.transfer_id, note)
        return None

    def _room(self, push: StagedPush, layer: int) -> int:
        # Staging blocks that the push's receiver may take now.
        free = len(self._blocks.free[layer])
        held = self._blocks.held[push.receiver, layer]
        # n more held means n fewer free: held + n <= free - n, but one for a receiver that has none.
        return (free - held + 1) // 2 if free > held else 0

    def _take(self, push: StagedPush, layer: int, count: int) -> Callable[[], None]:
        free = self._blocks.free[layer]
        self._blocks.held[push.receiver, layer] += count
        # Prefer adjacent blocks: longer runs are faster to copy and to send.
        free.sort(reverse=True)
        staging_ids = tuple(free[: -count - 1 : -1])
        del free[-count:]
        push.held[layer].update(staging_ids)
        first_index = push.staged[layer]
        push.staged[layer] += count
        if push.staged[layer] == push.complete[layer]:
            del push.due[layer]
        push.reading = True
        return lambda: self._stage(push, layer, first_index, staging_ids)

    def _stage(self, push: StagedPush, layer: int, first_index: int, staging_ids: Sequence[int]) -> None:
        push.copy(self._source, self._sender.pool, layer, first_index, staging_ids)
        with self.changed:
            push.reading = False
            event = self._end(push, push.outcome) if push.outcome is not None else None
        if event is not None:
            self._report(push, event)
            return
        # Failed since: ignored there.
        self._sender.write_layers(push.transfer_id, range(layer, layer + 1), first_index, staging_ids)

    def _open(self, push: StagedPush) -> None:
        try:
            self._sender.open(replace(push.ticket, layout=self._shape))
        except TransferFailed as error:
            self._on_event(PushFailed(push.transfer_id, error.reason))
            return
        with self.changed:
            aborted = push.aborted
        if aborted:
            self._sender.abort(push.transfer_id)

    # Callbacks of the sender, on its threads.

    def _on_local_done(self, transfer_id: bytes, layer: int, staging_ids: Sequence[int]) -> None:
        with self.changed:
            push = self._pushes.get(transfer_id)
            if push is not None and push.outcome is None:
                push.held[layer].difference_update(staging_ids)
                self._give_back(push, layer, staging_ids)
                self.changed.notify()

    def _on_event(self, event: PushEvent) -> None:
        told: PushEvent | None = None
        with self.changed:
            push = self._pushes.get(event.transfer_id)
            if push is not None and isinstance(event, PushEnd):
                told = self._end(push, event)
            elif push is not None and push.outcome is None:
                if isinstance(event, PushExtended):
                    push.granted_count = event.block_count
                told = event
        if push is not None and told is not None:
            push.listener(told)

    def _end(self, push: StagedPush, event: PushAccepted | PushFailed) -> PushAccepted | PushFailed | None:
        # The sender reads nothing of this push any more. The caller holds the lock.
        if self._pushes.get(push.transfer_id) is not push:
            return None
        push.outcome = push.outcome or event
        if push.reading:
            return None
        del self._pushes[push.transfer_id]
        for layer, held in enumerate(push.held):
            self._give_back(push, layer, held)
        self.changed.notify()
        return push.outcome

    def _give_back(self, push: StagedPush, layer: int, staging_ids: Collection[int]) -> None:
        held, key = self._blocks.held, (push.receiver, layer)
        self._blocks.free[layer].extend(staging_ids)
        held[key] -= len(staging_ids)
        if not held[key]:
            del held[key]
