"""Copies of other instances' KV in a simulated instance's memory, with evictions when it is full. Pure.

It mirrors services/decode/holder.py and kaveri/kv/replicas, with blocks that are counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kaveri.errors import KaveriError, NoCapacity, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.replication import HeldCopy, copy_bytes, drop_first
from kaveri.policy.waits import COPY_MADE_ROOM_RETRY_S, COPY_STARVED_S
from kaveri.simulator.instance import SimulatedInstance
from kaveri.simulator.member import ALMOST_ALL
from kaveri.simulator.spec import CopySpec
from kaveri.simulator.timeline import Timeline

_FULL_RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class HeldKv:
    """A copy, in this instance's memory, of the KV of another instance's request."""

    holder: "HeldCopies"
    on_lost: Callable[["HeldKv"], object]
    """Called when the copy accepts no more blocks although its owner has not dropped it."""
    number: int
    blocks: int
    """Allocated blocks."""
    sent_blocks: int = 0
    """Blocks received so far."""
    token_count: int = 0
    """Tokens held once its owner has finished it, with the part-full last block; 0 before."""
    is_growing: bool = True
    """True while its owner may add blocks. Otherwise it is kept for orphan_grace_s, to resume the request from."""
    is_gone: bool = False
    starved_since_s: float = math.inf
    """Time since which memory lacks for the next block; infinite if there is some."""


class HeldCopies:
    """Copies of other instances' requests in one instance's memory, at most one per request."""

    def __init__(self, timeline: Timeline, spec: CopySpec, instance: SimulatedInstance, layout: KvLayout) -> None:
        self.record = instance.record
        self._instance = instance
        self._timeline = timeline
        self._spec = spec
        self._layout = layout
        self._held: dict[int, HeldKv] = {}
        self._free_blocks = spec.replica_blocks
        self._starved: dict[HeldKv, None] = {}
        self.is_dead = False
        self._is_drained = False

    @property
    def free_bytes(self) -> int:
        return 0 if self._is_drained else self._free_blocks * self._block_bytes

    @property
    def total_bytes(self) -> int:
        return self._spec.replica_blocks * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return self._layout.layer_count * self._layout.block_bytes

    def open(self, on_lost: Callable[["HeldKv"], object], number: int, token_count: int) -> "HeldKv | KaveriError":
        """Allocate a copy for a request of `token_count` tokens, in place of its former one. If memory is full, return
        NoCapacity and evict copies far cheaper to recompute. on_lost: called if the copy ends early."""
        if self.is_dead:
            return Unavailable("the holder cannot be reached")
        if self._is_drained:
            return Unavailable("the holder is draining")
        self._touch()
        if (former := self._held.get(number)) is not None:
            self.drop(former)
        needed_bytes = copy_bytes(self._layout, token_count)
        blocks = needed_bytes // self._block_bytes
        # Copies that wait for a block have priority for the next free one.
        if self._starved or blocks > self._free_blocks:
            copies = (
                HeldCopy(held, held.blocks * self._layout.block_tokens, held.blocks * self._block_bytes)
                for held in self._held.values()
                if held.is_growing
            )
            dropped = drop_first(copies, token_count, self.free_bytes, needed_bytes)
            for held in dropped or ():
                self.drop(held)
            if not dropped:
                return NoCapacity("replica", _FULL_RETRY_S, "the memory for copies is full")
            return NoCapacity("replica", COPY_MADE_ROOM_RETRY_S, "shorter copies were dropped to make room")
        self._free_blocks -= blocks
        held = self._held[number] = HeldKv(self, on_lost, number, blocks)
        return held

    def grow(self, held: HeldKv) -> bool:
        """Allocate memory for the block after the received ones. False if none is free; if that lasts too long, the
        copy is closed and its owner notified."""
        self._touch()
        wanted = held.sent_blocks + 1 - held.blocks
        taken = max(0, min(wanted, self._free_blocks))
        held.blocks += taken
        self._free_blocks -= taken
        if taken >= wanted:
            held.starved_since_s = math.inf
            self._starved.pop(held, None)
        elif held.starved_since_s == math.inf:
            held.starved_since_s = self._timeline.now_s
            self._starved[held] = None
            self._timeline.after(COPY_STARVED_S, self._shut_if_starved, held)
        return taken >= wanted

    def _shut_if_starved(self, held: HeldKv) -> None:
        is_late = self._timeline.now_s - held.starved_since_s >= COPY_STARVED_S * ALMOST_ALL
        if held.is_growing and not held.is_gone and is_late:
            self.shut(held)
            held.on_lost(held)

    def shut(self, held: HeldKv) -> None:
        """Accept no more blocks for a copy, and drop it after orphan_grace_s seconds."""
        held.is_growing = False
        held.starved_since_s = math.inf
        self._starved.pop(held, None)
        self._timeline.after(self._spec.orphan_grace_s, self.drop, held)

    def drain(self, is_drained: bool) -> None:
        """Take no copies, and no more of those that are here, while the instance does not decode."""
        self._is_drained = is_drained
        for held in tuple(self._held.values()) if is_drained else ():
            if held.is_growing and not held.is_gone:
                self.shut(held)
                self._timeline.post(held.on_lost, held)

    def find(self, number: int) -> HeldKv | None:
        return self._held.get(number)

    def usable_tokens(self, held: HeldKv, context_tokens: int) -> int:
        """Return how many of context_tokens have held KV that a resume can use: whole blocks, not the last token."""
        block_tokens = self._layout.block_tokens
        if held.token_count:
            return min(held.token_count, context_tokens - 1)
        return min(held.sent_blocks, (context_tokens - 1) // block_tokens) * block_tokens

    def finish(self, held: HeldKv, token_count: int) -> None:
        """Accept the rest of a request's KV, `token_count` tokens in all, for the request to go on here."""
        held.token_count = token_count
        self.shut(held)

    def drop(self, held: HeldKv) -> None:
        """Free a copy's memory. Idempotent."""
        if held.is_gone:
            return
        self._touch()
        held.is_gone = True
        self._starved.pop(held, None)
        self._free_blocks += held.blocks
        del self._held[held.number]
        if held.is_growing:
            self._timeline.post(held.on_lost, held)

    def die(self) -> None:
        """Drop all copies: the process has died."""
        self.is_dead = True
        for held in tuple(self._held.values()):
            self.drop(held)

    def is_empty(self) -> bool:
        return not self._held and not self._starved and self._free_blocks == self._spec.replica_blocks

    def _touch(self) -> None:
        """Record due heartbeats before the load changes."""
        self._instance.member.take_beats(self._timeline.now_s)
