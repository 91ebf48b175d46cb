"""Blocks and batch membership of decode sequences: growth, preemption, resumption. No I/O, no locks.

The containers, in the order in which sequences are preempted::

    landed    KV here, not admitted yet          the latest landing first
    waiting   admitted, outside the batch        the latest admission first
    running   in the batch                       the latest admission first
    reserved  leased to a transfer               never: it lands, fails or expires
    stopped   on its way to another instance     never: it leaves, or continues after a while

No request starves: the earliest admitted sequence is preempted last and resumed first; while any admitted sequence
lacks blocks no new reservation is accepted, so finitely many are ahead of it; and a sequence alone in the pool always
fits.
"""

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from kaveri.engine.stepwise.sequence import Sequence, SequencePhase
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import BlockAllocator

_admission = attrgetter("admission")


class Residency:
    """Decode sequences from reserve() to their last token, and their KV blocks. The caller serializes all calls."""

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
        """True if an admitted sequence was preempted and waits for blocks."""
        return any(not sequence.block_ids for sequence in self.waiting)

    def land(self, sequence: Sequence) -> None:
        """Record that all KV of a reserved sequence has arrived."""
        sequence.phase = SequencePhase.LANDED
        self.landed[sequence] = None

    def make_whole(self, sequence: Sequence) -> list[Sequence]:
        """Allocate the block of a sequence's next token or, if none is free, preempt the sequence and return it in a
        list. For a sequence outside the batch."""
        wanted = self._layout.block_count(len(sequence.token_ids)) - len(sequence.block_ids)
        preempted: list[Sequence] = []
        if wanted > self.allocator.free_count:
            self._give_up_blocks(sequence, preempted)
        elif wanted > 0:
            sequence.block_ids += self.allocator.allocate(sequence, wanted)
        return preempted

    def admit(self, sequence: Sequence) -> None:
        """Queue a landed sequence for the running batch, after those admitted before."""
        del self.landed[sequence]
        sequence.phase = SequencePhase.WAITING
        sequence.admission = self._admission_count
        self._admission_count += 1
        self.waiting.append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Exclude a sequence from further steps. It keeps its blocks."""
        self.remove(sequence)
        sequence.phase = SequencePhase.STOPPING
        self.stopping[sequence] = None

    def stopped(self, sequence: Sequence) -> None:
        """Record that a sequence has stopped and its KV is complete in the host pool."""
        del self.stopping[sequence]
        sequence.phase = SequencePhase.STOPPED

    def go_on(self, sequence: Sequence) -> list[Sequence]:
        """Continue a stopped sequence, in its old order of admission. Returns it in a list if it was preempted, as no
        block was free for its next token."""
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
        """Remove a sequence from its container; the caller releases its blocks."""
        if sequence.phase is SequencePhase.LANDED:
            del self.landed[sequence]
        elif sequence.phase is SequencePhase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is SequencePhase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is SequencePhase.STOPPING:
            del self.stopping[sequence]

    def prepare_step(self) -> list[Sequence]:
        """Allocate blocks for the next token of all running sequences and fill the batch. Returns the sequences
        preempted for it. Called between steps only: their blocks are free at once."""
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
        """Remove all sequences from all containers."""
        self.landed.clear()
        self.waiting.clear()
        self.running.clear()
        self.stopping.clear()

    def check_integrity(self, decodes: Iterable[Sequence]) -> None:
        """Assert that the containers hold exactly `decodes`, by phase; reserved and stopped ones are in none."""
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
        """Preempt sequences until `wanted` blocks are free. Returns False if `sequence` itself was preempted."""
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
        """Allocate blocks for all tokens of a preempted sequence, and preempt later ones outside the batch for it.
        Returns False, with nothing changed, if that is not enough."""
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
