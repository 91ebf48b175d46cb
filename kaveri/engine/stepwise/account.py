"""Live requests of a stepwise engine and their blocks. No I/O, no locks: the engine's lock guards it."""

from collections import deque
from collections.abc import Callable

from kaveri.engine.contract import EngineKey, EngineStats
from kaveri.engine.stepwise.phase import SequencePhase
from kaveri.engine.stepwise.residency import Residency
from kaveri.engine.stepwise.sequence import Sequence
from kaveri.errors import NoCapacity, RequestAlreadyExists
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.blocks import BlockAllocator

_RETRY_AFTER_S = 0.1


class Account:
    """Requests from their submission until nothing can touch their blocks any more.

    on_free: called when blocks have become free.
    """

    def __init__(self, layout: KvLayout, total_blocks: int, max_batch: int, on_free: Callable[[], None]) -> None:
        self.prefills: dict[EngineKey, Sequence] = {}
        self.prefilling: deque[Sequence] = deque()
        """Requests of `prefills` that are not fully computed, in the order of submission."""
        self.decodes: dict[EngineKey, Sequence] = {}
        # Ended, but a step or a transfer can still touch their blocks.
        self._quarantined: set[Sequence] = set()
        self._layout = layout
        self._allocator = BlockAllocator(total_blocks)
        self._on_free = on_free
        self.residency = Residency(self._allocator, layout, max_batch)

    def open_prefill(self, sequence: Sequence) -> None:
        """Take the blocks of the prompt and queue it. Raises RequestAlreadyExists and NoCapacity."""
        self._open(self.prefills, "prefill", sequence, len(sequence.token_ids))
        self.prefilling.append(sequence)

    def open_decode(self, sequence: Sequence) -> None:
        """Take the blocks of the prompt and one more token. Raises RequestAlreadyExists and NoCapacity."""
        self._open(self.decodes, "decode", sequence, len(sequence.token_ids) + 1)

    def adopt(self, sequence: Sequence) -> list[Sequence]:
        """Turn a computed request of the prefill side into a landed one of the decode side, with its blocks.

        Returns it if it had to give them up, since there was none for its next token.
        """
        assert sequence.phase is SequencePhase.COMPUTED, "only a computed prompt can be decoded"
        if sequence.key in self.decodes:
            raise RequestAlreadyExists(sequence.key.request_id)
        self.decodes[sequence.key] = self.prefills.pop(sequence.key)
        sequence.source = None
        self.residency.land(sequence)
        return self.residency.make_whole(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a request: no event of it follows. Its blocks are freed once nothing can touch them."""
        sequence.done = True
        if sequence.phase in (SequencePhase.PREFILLING, SequencePhase.COMPUTED):
            del self.prefills[sequence.key]
            if sequence.phase is SequencePhase.PREFILLING:
                self.prefilling.remove(sequence)
        else:
            del self.decodes[sequence.key]
            self.residency.remove(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Free the blocks of an ended request, or keep them while a step or a transfer can touch them."""
        if sequence.touched:
            self._quarantined.add(sequence)
        else:
            self._quarantined.discard(sequence)
            self._allocator.release(sequence)
            self._on_free()

    def clear(self) -> None:
        """Free the whole pool. No step runs and no transfer is open any more."""
        for owner in self._allocator.owners():
            self._allocator.release(owner)
        self.prefills.clear()
        self.prefilling.clear()
        self.decodes.clear()
        self.residency.clear()
        self._quarantined.clear()

    def stats(self) -> EngineStats:
        """Snapshot of the engine; takes time in proportion to the live requests."""
        admitted = len(self.residency.running) + len(self.residency.waiting)
        held = (*self.prefills.values(), *self.decodes.values())
        return EngineStats(
            free_blocks=self._allocator.free_count,
            running_requests=len(self.prefilling) + admitted,
            waiting_requests=len(self.decodes) - admitted,
            pending_prefill_tokens=sum(sequence.pending for sequence in self.prefilling),
            context_tokens=sum(sequence.computed for sequence in held),
        )

    def check_integrity(self) -> None:
        """Assert that every block is free, held by a live request, or quarantined by a step or a transfer."""
        live = [*self.prefills.values(), *self.decodes.values(), *self._quarantined]
        self._allocator.check_integrity(live)
        for sequence in live:
            held = self._allocator.blocks_of(sequence)
            assert held == tuple(sequence.block_ids), f"{sequence.key}: blocks {sequence.block_ids}, account {held}"
        assert all(sequence.done and sequence.touched for sequence in self._quarantined), "quarantined without a reason"
        self.residency.check_integrity(self.decodes.values())

    def _open(self, table: dict[EngineKey, Sequence], role: str, sequence: Sequence, token_count: int) -> None:
        if sequence.key in table:
            raise RequestAlreadyExists(sequence.key.request_id)
        # New requests would take the blocks that a preempted one waits for.
        if self.residency.short_of_blocks:
            raise NoCapacity(role, _RETRY_AFTER_S, "a preempted request waits for blocks")
        try:
            sequence.block_ids += self._allocator.allocate(sequence, self._layout.block_count(token_count))
        except NoCapacity as error:
            raise NoCapacity(role, _RETRY_AFTER_S, error.reason) from error
        table[sequence.key] = sequence
