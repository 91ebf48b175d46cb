"""A receiver whose senders have a part of its KV each: by layers, by KV heads.

Merged at the destination (DéjàVu, section 4.1.2). Every sender gets a ticket of its own, for blocks that hold its part
alone; they land in staging here, verified as ever, and are copied to where they belong. A pool that one sender has all
the KV for needs none of this: KvReceiver.

Owns the staging and the account of parts. The blocks of the pool are written by this process only, so that nothing here
waits for a fence but the staging.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kaveri.errors import InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.block_map import merge_blocks
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.digest import DigestFactory, xxh3
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import KvReceiver, LandingListener, TransferLanded, TransferReleased
from kaveri.kv.regions import copy_regions
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport
from kaveri.telemetry.logs import get_logger

SHAPES_MAX = 8
"""Shapes of parts that are taken, each in a staging pool and behind a listener of its own."""


@dataclass(eq=False)
class _Merge:
    """One granted transfer. Guarded by the receiver's lock."""

    transfer_id: bytes
    block_ids: tuple[int, ...]
    token_count: int
    first_block: int
    left: dict[bytes, "_Stage"]
    """Parts that have neither landed nor been released."""
    layouts: dict[bytes, KvLayout]
    kv_bytes: int = 0
    notes: set[bytes] = field(default_factory=set)
    failure: str | None = None


class _Stage:
    """Parts of one shape: their pool, its account and its receiver."""

    def __init__(self, pool: KvPool, receiver: KvReceiver) -> None:
        self.pool = pool
        self.receiver = receiver
        self.allocator = BlockAllocator(pool.block_count)


class MergedReceiver:
    """Takes pushes of parts into `pool`. Every method may be called from any thread, close() not from the listener.

    A granted transfer ends in exactly one event, as KvReceiver's: landed when all parts have and are copied, released
    when one was and no sender can write any more.

    listen: gives fresh addresses for one more listener, best first. staging_bytes: of each shape of parts; it bounds
    the parts that are under way at a time. epoch, transports, digest: as of KvReceiver.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: LandingListener,
        *,
        listen: Callable[[], Sequence[KvEndpoint]],
        epoch: int,
        staging_bytes: int,
        transports: Sequence[Transport] | None = None,
        digest: DigestFactory = xxh3,
    ) -> None:
        self.pool = pool
        self._listener = listener
        self._listen = listen
        self._epoch = epoch
        self._staging_bytes = staging_bytes
        self._transports = transports
        self._digest = digest
        self._lock = threading.Lock()
        self._stages: dict[KvLayout, _Stage] = {}
        self._merges: dict[bytes, _Merge] = {}
        self._merge_of: dict[bytes, _Merge] = {}
        self._closed = False

    def grant(
        self,
        block_ids: Sequence[int],
        token_count: int,
        parts: Sequence[KvLayout],
        expires_in_s: float,
        *,
        first_block: int = 0,
    ) -> tuple[bytes, tuple[Ticket, ...]]:
        """Leases the blocks to one transfer; returns its name, and a ticket for each part, in their order.

        parts: what each sender has of the pool's layers and heads, in the pool's block_tokens and order; all of it
        together (KvPlan.share_layout, for the shares to this rank). block_ids, first_block: as KvReceiver.grant.
        Raises NoCapacity when there is no staging free, LayoutMismatch, InvalidArgument, and TransferFailed when
        closed. Takes memory, and opens a listener, for parts of a shape that is new.
        """
        for part in parts:
            self.pool.layout.require_part(part)
            for name in ("block_tokens", "order"):
                if getattr(part, name) != getattr(self.pool.layout, name):
                    raise LayoutMismatch(name, getattr(self.pool.layout, name), getattr(part, name))
        self.pool.layout.require_whole(parts)
        assert all(0 <= block < self.pool.block_count for block in block_ids), "a block outside the pool"
        merge = _Merge(secrets.token_bytes(16), tuple(block_ids), token_count, first_block, {}, {})
        tickets: list[Ticket] = []
        with self._lock:
            if self._closed:
                raise TransferFailed("the receiver is closed")
            taken: list[tuple[_Stage, object, list[int]]] = []
            try:
                for part in parts:
                    stage, owner = self._stage(part), object()
                    taken.append((stage, owner, stage.allocator.allocate(owner, len(block_ids))))
            except BaseException:
                for stage, owner, _ in taken:
                    stage.allocator.release(owner)
                raise
            # Under the lock, so that no part ends before the transfer is known.
            for part, (stage, owner, staging_ids) in zip(parts, taken, strict=True):
                ticket = stage.receiver.grant(staging_ids, token_count, expires_in_s, first_block=first_block)
                stage.allocator.move(owner, ticket.transfer_id)
                merge.left[ticket.transfer_id] = stage
                merge.layouts[ticket.transfer_id] = part
                self._merge_of[ticket.transfer_id] = merge
                tickets.append(replace(ticket, layout=part))
            self._merges[merge.transfer_id] = merge
        return merge.transfer_id, tuple(tickets)

    def revoke(self, transfer_id: bytes) -> None:
        """As KvReceiver.revoke."""
        with self._lock:
            merge = self._merges.get(transfer_id)
            left = dict(merge.left) if merge is not None else {}
        for part_id, stage in left.items():
            stage.receiver.revoke(part_id)

    def close(self) -> None:
        """As KvReceiver.close."""
        with self._lock:
            self._closed = True
            stages = tuple(self._stages.values())
        for stage in stages:
            stage.receiver.close()

    def check_integrity(self) -> None:
        """Asserts that no staging block is held but by parts under way."""
        with self._lock:
            for stage in self._stages.values():
                stage.allocator.check_integrity(self._merge_of)

    def _stage(self, part: KvLayout) -> _Stage:
        """Under the lock."""
        shape = replace(part, first_layer=0, first_kv_head=0)
        stage = self._stages.get(shape)
        if stage is None:
            if len(self._stages) == SHAPES_MAX:
                raise InvalidArgument("parts", part, f"of at most {SHAPES_MAX} shapes over the receiver's life")
            pool = KvPool(shape, max(1, self._staging_bytes // (shape.layer_count * shape.block_bytes)))
            try:
                receiver = KvReceiver(
                    pool,
                    self._on_part,
                    listen=self._listen(),
                    epoch=self._epoch,
                    transports=self._transports,
                    digest=self._digest,
                )
            except RuntimeError as error:
                raise TransferFailed(f"no thread for a receiver: {error}") from error
            stage = self._stages[shape] = _Stage(pool, receiver)
        return stage

    def _on_part(self, event: TransferLanded | TransferReleased) -> None:
        with self._lock:
            merge = self._merge_of[event.transfer_id]
            stage = merge.left[event.transfer_id]
            failed_before = merge.failure is not None
        problem = event.reason if isinstance(event, TransferReleased) else None
        if problem is None and not failed_before:
            try:
                self._copy(merge, event.transfer_id, stage)
            except Exception as error:
                get_logger().exception("kv part not merged", transfer_id=merge.transfer_id.hex())
                problem = f"a part could not be merged: {error!r}"
        with self._lock:
            del self._merge_of[event.transfer_id], merge.left[event.transfer_id]
            stage.allocator.release(event.transfer_id)
            if isinstance(event, TransferLanded):
                merge.kv_bytes += event.kv_bytes
                merge.notes.add(event.note)
            if merge.failure is None:
                merge.failure = problem
            ended = not merge.left
            if ended:
                del self._merges[merge.transfer_id]
        if ended:
            self._listener(_outcome(merge))
        elif merge.failure is not None and not failed_before:
            self.revoke(merge.transfer_id)

    def _copy(self, merge: _Merge, part_id: bytes, stage: _Stage) -> None:
        """One part from staging to its place; its blocks are nobody else's."""
        part = merge.layouts[part_id]
        block_map = merge_blocks(part, self.pool.layout)
        first = merge.first_block * part.block_tokens
        staging_ids = stage.allocator.blocks_of(part_id)
        # All of the last block: its end is empty in staging too, or as the sender has it.
        tokens = range(first, first + len(staging_ids) * part.block_tokens)
        copies = block_map.copies(tokens, staging_ids, first, merge.block_ids, first)
        held = slice(part.first_layer - self.pool.layout.first_layer, None)
        layers = self.pool.memory[held][: part.layer_count]
        copy_regions(copies, stage.pool.memory.reshape(part.layer_count, -1), layers.reshape(part.layer_count, -1))


def _outcome(merge: _Merge) -> TransferLanded | TransferReleased:
    if merge.failure is None and len(merge.notes) > 1:
        merge.failure = "the parts carry different notes"
    if merge.failure is not None:
        return TransferReleased(merge.transfer_id, merge.failure)
    return TransferLanded(merge.transfer_id, merge.kv_bytes, next(iter(merge.notes)))
