"""Pushes to receivers whose block layout differs from the sender's, or that take only some layers or KV heads.

Split at the source, merged at the destination (DéjàVu, section 4.1.2): each receiver is an ordinary one and takes what
its own ticket says. All pushes to one foreign layout are run by staged_pushes.py.
"""

import threading
from dataclasses import replace
from functools import partial

from kaveri.errors import TransferFailed
from kaveri.kv.layout.block_map import map_blocks
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.push import OpenPush, PushAccepted, PushEnd, PushEvent, PushListener
from kaveri.kv.transfer.staged_pushes import MakeSender, StagedPush, StagedPushes
from kaveri.kv.transfer.ticket import Ticket

STAGING_BYTES = 64 * 2**20
"""Staging memory for one foreign layout; less if the source pool is smaller, more if four blocks need it."""
STAGINGS_MAX = 4
"""Max foreign layouts served at a time. An unused one is evicted for a new one."""


class MappedPushes:
    """A sender's pushes to layouts other than its pool's, converted in staging memory. Thread-safe, but a listener must
    not call close().

    Memory: at most STAGINGS_MAX * staging_bytes (see StagedPushes for very large blocks), and none while all receivers
    use the pool's layout; an evicted layout frees its own before another takes any. pushes: the sender's, by transfer
    id; those of other layouts are added here. make_sender: creates the sender of a staging pool.
    """

    def __init__(
        self, pool: KvPool, pushes: dict[bytes, OpenPush], make_sender: MakeSender, staging_bytes: int
    ) -> None:
        self._pool = pool
        self._pushes = pushes
        self._make_sender = make_sender
        self._staging_bytes = min(staging_bytes, pool.memory.nbytes)
        self._lock = threading.Lock()
        # By shape, the most recently used last.
        self._stagings: dict[KvLayout, StagedPushes] = {}
        self._given_up: list[StagedPushes] = []
        # Staging in memory, evicted ones included.
        self._room = threading.BoundedSemaphore(STAGINGS_MAX)
        self._closed = False

    def open(self, ticket: Ticket, listener: PushListener, *, part: bool) -> None:
        layout, own = ticket.layout, self._pool.layout
        if ticket.is_open:
            # Blocks are marked one by one, so a destination block must have the tokens and layers of one source block,
            # and may have a part of its heads.
            heads = (own.kv_head_count, own.first_kv_head) if part else (layout.kv_head_count, layout.first_kv_head)
            own.require_same(replace(layout, kv_head_count=heads[0], first_kv_head=heads[1]))
        if part:
            own.require_part(layout)
        else:
            own.require_mappable(layout)
        block_map = map_blocks(own, layout)
        with self._lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            staging = self._staging(layout)
            push = self._pushes[ticket.transfer_id] = StagedPush(
                ticket, block_map, staging, partial(self._on_staged, listener)
            )
        staging.open(push)

    def flow(self) -> SenderFlow:
        with self._lock:
            stagings = tuple(self._stagings.values())
        return SenderFlow.total(staging.flow() for staging in stagings)

    def close(self) -> None:
        """Fail all pushes and accept no more. Does not wait; see join(). Idempotent."""
        with self._lock:
            self._closed = True
        for staging in self._all():
            staging.close()

    def join(self) -> None:
        """Wait, after close(), until all staging memory is freed and threads have ended."""
        for staging in self._all():
            staging.join()

    def check_integrity(self) -> None:
        """Assert that every staging block (memory for converted blocks) is free or held by an active push."""
        with self._lock:
            stagings = tuple(self._stagings.values())
        for staging in stagings:
            staging.check_integrity()

    def _all(self) -> tuple[StagedPushes, ...]:
        with self._lock:
            return (*self._stagings.values(), *self._given_up)

    def _staging(self, layout: KvLayout) -> StagedPushes:
        # The caller holds the lock.
        shape = replace(layout, first_layer=0, first_kv_head=0)
        staging = self._stagings.pop(shape, None)
        if staging is None or staging.is_closed:
            if staging is not None:
                self._give_up(staging)
            self._make_room()
            staging = StagedPushes(
                self._pool,
                shape,
                make_sender=self._make_sender,
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
        # Evicts what has been idle for longest. The caller holds the lock.
        if len(self._stagings) < STAGINGS_MAX:
            return
        # A copy: others than mapped ones come and go meanwhile.
        busy = {push.staging for push in tuple(self._pushes.values()) if isinstance(push, StagedPush)}
        idle = next((shape for shape, staging in self._stagings.items() if staging not in busy), None)
        if idle is None:
            raise TransferFailed(f"KV goes to {STAGINGS_MAX} other layouts already")
        self._give_up(self._stagings.pop(idle))

    def _give_up(self, staging: StagedPushes) -> None:
        staging.close()
        self._given_up = [each for each in self._given_up if each.is_alive]
        self._given_up.append(staging)

    def _on_staged(self, listener: PushListener, event: PushEvent) -> None:
        if isinstance(event, PushEnd):
            with self._lock:
                self._pushes.pop(event.transfer_id, None)
        if isinstance(event, PushAccepted):
            event = replace(event, transport=f"{event.transport} mapped")
        listener(event)
