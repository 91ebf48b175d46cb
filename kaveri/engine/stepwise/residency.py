"""Blocks and batch places of decode sequences: growth, preemption, resumption. No I/O, no locks.

The containers, in the order in which they give blocks up::

    landed    KV here, not admitted yet          the latest landing first
    waiting   admitted, outside the batch        the latest admission first
    running   in the batch                       the latest admission first
    reserved  leased to a transfer               never: it lands, fails or expires
    stopped   on its way to another instance     never: it leaves, or goes on after a while

No request starves: the earliest admitted sequence is the last to give its blocks up and the first to get them back;
while any admitted sequence lacks blocks no new reservation is taken, so the ones before it are finitely many; and a
sequence alone in the pool fits by construction.
"""

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from kaveri.engine.stepwise.sequence import Sequence, SequencePhase
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import BlockAllocator

_admission = attrgetter("admission")


class Residency:
    """The decode side's sequences between reserve() and their last token. The caller serialises all calls."""

    def __init__(self, allocator: BlockAllocator, layout: KvLayout, max_batch: int) -> None:
        self.landed: dict[Sequence, None] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stopping: dict[Sequence, None] = {}
        self.allocator = allocator
        self._layout = layout
        self._max_batch = max_batch
        self._admission_count = 0

    @property
    def short_of_blocks(self) -> bool:
        """True if an admitted sequence waits for blocks that it has given up."""
        return any(not sequence.block_ids for sequence in self.waiting)

    def land(self, sequence: Sequence) -> None:
        """Record that the KV of a reserved sequence has landed."""
        sequence.phase = SequencePhase.LANDED
        self.landed[sequence] = None

    def make_whole(self, sequence: Sequence) -> list[Sequence]:
        """Give a sequence outside the batch the block of its next token, or take all that it has and return it."""
        wanted = self._layout.block_count(len(sequence.token_ids)) - len(sequence.block_ids)
        preempted: list[Sequence] = []
        if wanted > self.allocator.free_count:
            self._give_up_blocks(sequence, preempted)
        elif wanted > 0:
            sequence.block_ids += self.allocator.allocate(sequence, wanted)
        return preempted

    def admit(self, sequence: Sequence) -> None:
        """Let a landed sequence run. It waits for a place in the batch after those admitted before."""
        del self.landed[sequence]
        sequence.phase = SequencePhase.WAITING
        sequence.admission = self._admission_count
        self._admission_count += 1
        self.waiting.append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop a sequence: it joins no further step. It keeps its blocks."""
        self.remove(sequence)
        sequence.phase = SequencePhase.STOPPING
        self.stopping[sequence] = None

    def stopped(self, sequence: Sequence) -> None:
        """Record that a sequence has stopped, and its blocks are complete."""
        del self.stopping[sequence]
        sequence.phase = SequencePhase.STOPPED

    def go_on(self, sequence: Sequence) -> list[Sequence]:
        """Put a stopped sequence back in its place. Returns it if it had to give up its blocks, since there was none
        for its next token."""
        self.remove(sequence)
        if sequence.in_step:
            # Its seat is still free: the batch changes between steps only.
            sequence.phase = SequencePhase.RUNNING
            insort(self.running, sequence, key=_admission)
            return []
        if sequence.admission < 0:
            self.land(sequence)
        else:
            sequence.phase = SequencePhase.WAITING
            insort(self.waiting, sequence, key=_admission)
        # The caller makes it whole once its blocks are not read any more.
        return [] if sequence.is_saving else self.make_whole(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; the caller releases its blocks."""
        if sequence.phase is SequencePhase.LANDED:
            del self.landed[sequence]
        elif sequence.phase is SequencePhase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is SequencePhase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is SequencePhase.STOPPING:
            del self.stopping[sequence]

    def prepare_step(self) -> list[Sequence]:
        """Give every running sequence blocks for all of its tokens, and fill the batch. Returns those that gave up
        their blocks for it.

        Called between steps only: blocks that are given up here are free at once.
        """
        preempted: list[Sequence] = []
        block_tokens = self._layout.block_tokens
        index = 0
        # The list shrinks at its end only, by preemption, so the index stays right.
        while index < len(self.running):
            sequence = self.running[index]
            if len(sequence.token_ids) > len(sequence.block_ids) * block_tokens:
                wanted = self._layout.block_count(len(sequence.token_ids)) - len(sequence.block_ids)
                if not self._make_room(wanted, sequence, preempted):
                    continue
                sequence.block_ids += self.allocator.allocate(sequence, wanted)
            index += 1
        # Fill the batch from those waiting, in order; only the first that lacks blocks may take some.
        blocked = False
        for sequence in self.waiting.copy():
            if len(self.running) >= self._max_batch:
                break
            if not sequence.block_ids and (blocked or not self._resume(sequence, preempted)):
                blocked = True
                continue
            self.waiting.remove(sequence)
            sequence.phase = SequencePhase.RUNNING
            insort(self.running, sequence, key=_admission)
        return preempted

    def clear(self) -> None:
        """Forget all sequences."""
        self.landed.clear()
        self.waiting.clear()
        self.running.clear()
        self.stopping.clear()

    def check_integrity(self, decodes: Iterable[Sequence]) -> None:
        """Assert that each of these, and no other, is reserved or in the one container of its phase."""
        counted = 0
        for sequence in decodes:
            phase = sequence.phase
            assert (sequence in self.landed) == (phase is SequencePhase.LANDED), f"{sequence.key}: {phase}"
            assert (sequence in self.waiting) == (phase is SequencePhase.WAITING), f"{sequence.key}: {phase}"
            assert (sequence in self.running) == (phase is SequencePhase.RUNNING), f"{sequence.key}: {phase}"
            assert (sequence in self.stopping) == (phase is SequencePhase.STOPPING), f"{sequence.key}: {phase}"
            counted += phase not in (SequencePhase.RESERVED, SequencePhase.STOPPED)
        containers = (self.landed, self.waiting, self.running, self.stopping)
        assert counted == sum(map(len, containers)), "an ended sequence is still here"

    def _make_room(self, wanted: int, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Preempt until `wanted` blocks are free. False if `sequence` itself was preempted."""
        while self.allocator.free_count < wanted:
            victim = self._latest_outside() or self.running[-1]
            if victim.phase is SequencePhase.RUNNING:
                self.running.pop()
                victim.phase = SequencePhase.WAITING
                insort(self.waiting, victim, key=_admission)
            self._give_up_blocks(victim, preempted)
            if victim is sequence:
                return False
        return True

    def _resume(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Give a preempted sequence blocks for all its tokens and the next, at the cost of later ones outside the
        batch. False, and nothing changed, when that is not enough."""
        wanted = self._layout.block_count(len(sequence.token_ids))
        # One spare block for each running sequence, or the next growth would preempt it again at once.
        spare = len(self.running)
        later = [other for other in self.waiting if other.block_ids and other.admission > sequence.admission]
        evictable = sum(len(other.block_ids) for other in self.landed) + sum(len(other.block_ids) for other in later)
        if self.allocator.free_count + evictable < wanted + spare:
            return False
        while self.allocator.free_count < wanted + spare:
            victim = self._latest_outside()
            assert victim is not None, "evictable blocks were counted wrong"
            self._give_up_blocks(victim, preempted)
        sequence.block_ids += self.allocator.allocate(sequence, wanted)
        return True

    def _latest_outside(self) -> Sequence | None:
        for sequence in reversed(self.landed):
            if sequence.block_ids:
                return sequence
        for sequence in reversed(self.waiting):
            if sequence.block_ids:
                return sequence
        return None

    def _give_up_blocks(self, victim: Sequence, preempted: list[Sequence]) -> None:
        assert not victim.touched, "blocks of a running step or an open transfer cannot be given up"
        self.allocator.release(victim)
        victim.block_ids = []
        victim.computed = victim.mirrored = 0
        victim.generation += 1
        victim.runner_unaware = False
        preempted.append(victim)
