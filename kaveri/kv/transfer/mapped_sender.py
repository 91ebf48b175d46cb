"""A sender whose receivers may keep KV in other blocks, or each a part of it: by layers, by KV heads.

    ticket.layout                                  goes
    the pool's own                                 directly, block by block (KvSender)
    other block_tokens, or the other known order   mapped, through staging (staged_pushes)
    some of the layers, or of the heads            mapped, when the caller asks for a part
    anything else                                  LayoutMismatch, before a byte moves

Split at the source, merged at the destination (DéjàVu, section 4.1.2): receivers are ordinary ones, each takes what its
own ticket says.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

from kaveri.errors import TransferFailed
from kaveri.kv.layout.block_map import map_blocks
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory, xxh3
from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed, PushListener
from kaveri.kv.transfer.staged_pushes import StagedPush, StagedPushes
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import Transport, require_note

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
        transports: Sequence[Transport],
        digest: DigestFactory = xxh3,
        idle_s: float = 60.0,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.pool = pool
        self._listener = listener
        self._transports = tuple(transports)
        self._digest = digest
        self._idle_s = idle_s
        self._staging_bytes = min(staging_bytes, pool.memory.nbytes)
        self._direct = KvSender(pool, listener, transports=self._transports, digest=digest, idle_s=idle_s)
        self._lock = threading.Lock()
        # By shape, the one used last at the end.
        self._stagings: dict[KvLayout, StagedPushes] = {}
        self._given_up: list[StagedPushes] = []
        # Staging that is in memory, that on its way out included.
        self._room = threading.BoundedSemaphore(STAGINGS_MAX)
        # By transfer: those that do not go directly.
        self._staged: dict[bytes, StagedPushes] = {}
        self._closed = False

    def open(self, ticket: Ticket, *, part: bool = False) -> None:
        """Begins a transfer to one receiver of all that `pool` holds. Raises LayoutMismatch, naming the field, when it
        cannot be mapped, and TransferFailed as KvSender.open does, except that a mapped push may report it by
        PushFailed.

        part: the ticket may be for some of the layers or of the KV heads. The caller sees to it that the others get
        theirs, by other tickets.
        """
        layout = ticket.layout
        if layout == self.pool.layout:
            self._direct.open(ticket)
            return
        if part:
            self.pool.layout.require_part(layout)
        else:
            self.pool.layout.require_mappable(layout)
        with self._lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            assert ticket.transfer_id not in self._staged, "the name of a transfer is used once"
            staging = self._staging(layout)
            self._staged[ticket.transfer_id] = staging
        staging.open(StagedPush(ticket, map_blocks(self.pool.layout, layout)))

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        """As KvSender.write: blocks of one layer of `pool`, in the order of tokens, each exactly once.

        first_index: of the first of them among those of the request's blocks that hold a token which the ticket asks
        for; see first_source_block. Layers that the ticket does not ask for are ignored. Never blocks on network or
        staging.
        """
        staging = self._staged.get(transfer_id)
        if staging is None:
            self._direct.write(transfer_id, layer, first_index, source_blocks)
            return
        self.pool.require_blocks("source_blocks", source_blocks)
        staging.write(transfer_id, layer, first_index, source_blocks)

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """As KvSender.finish."""
        # Checked here: an error on the staging thread would end all of its pushes.
        require_note(note)
        self._staged.get(transfer_id, self._direct).finish(transfer_id, note)

    def abort(self, transfer_id: bytes) -> None:
        """As KvSender.abort."""
        self._staged.get(transfer_id, self._direct).abort(transfer_id)

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

    def _staging(self, layout: KvLayout) -> StagedPushes:
        """Under the lock: what pushes to receivers of this layout. Raises TransferFailed."""
        shape = replace(layout, first_layer=0, first_kv_head=0)
        staging = self._stagings.pop(shape, None)
        if staging is None or staging.is_closed:
            if staging is not None:
                self._give_up(staging)
            self._make_room()
            staging = StagedPushes(
                self.pool,
                shape,
                self._on_staged,
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
        busy = set(self._staged.values())
        idle = next((shape for shape, staging in self._stagings.items() if staging not in busy), None)
        if idle is None:
            raise TransferFailed(f"KV goes to {STAGINGS_MAX} other layouts already")
        self._give_up(self._stagings.pop(idle))

    def _give_up(self, staging: StagedPushes) -> None:
        """Under the lock."""
        staging.close()
        self._given_up = [each for each in self._given_up if each.is_alive]
        self._given_up.append(staging)

    def _on_staged(self, event: PushAccepted | PushFailed) -> None:
        with self._lock:
            self._staged.pop(event.transfer_id, None)
        if isinstance(event, PushAccepted):
            event = replace(event, transport=f"{event.transport} mapped")
        self._listener(event)
