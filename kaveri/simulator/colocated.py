"""A simulated colocated instance: prefill and decode share one engine and one pool of KV blocks. Pure.

It mirrors services/instance around services/prefill and services/decode. The admission policy keeps blocks for decoding
requests, and a computed prompt starts to decode at once, without a KV transfer.
"""

from kaveri.policy.prompt_queue import prompt_fits
from kaveri.simulator.decode import DecodeSide
from kaveri.simulator.instance import SimulatedAttempt
from kaveri.simulator.member import SimulatedLoad
from kaveri.simulator.prefill import SimulatedPrefill
from kaveri.simulator.sequence import CountedSequence


class SimulatedColocated(DecodeSide, SimulatedPrefill):
    """Simulated instance that prefills and decodes on one engine, without KV transfers."""

    def accept(self, attempt: SimulatedAttempt) -> None:
        self.touch()
        super().accept(attempt)

    def _submit_again(self, _: None) -> None:
        self.touch()
        super()._submit_again(None)

    def _has_room(self, attempt: SimulatedAttempt) -> bool:
        """Return True if the prompt fits next to the blocks kept for decoding requests."""
        computing = self._queue.computing
        first = next(iter(computing), None)
        kept = self._batch.kept_blocks(self._timeline.now_s, None if first is None else self._member_of(first))
        counts = (other.token_count for other in computing)
        block_tokens = self.pool.block_tokens
        return prompt_fits(attempt.token_count, counts, kept, self.engine.free_blocks, block_tokens)

    def _begin_search(self, attempt: SimulatedAttempt) -> None:
        """Start to decode a computed prompt here, instead of searching for a decode instance."""
        if attempt.first_token_s < 0:
            return
        sequence, now_s = attempt.sequence, self._timeline.now_s
        assert sequence is not None
        number = sequence.number
        self._live.discard(attempt)
        attempt.decode = self
        attempt.landed_s = now_s
        self._batch.expect(number, self._member_of(attempt), now_s)
        self._decoding[number] = sequence
        self._heavy_count += attempt.heavy
        is_whole = self.engine.adopt(sequence)
        self._batch.land(number)
        if not is_whole:
            self.preempted(sequence)
        if self.copies is not None:
            self.copies.owned.follow(attempt, sequence)

    # Events of the engine.

    def ended(self, sequence: CountedSequence) -> None:
        super().ended(sequence)
        # They refer to one another: drop references that are not needed any more.
        sequence.owner.sequence = None

    def stepped(self) -> None:
        # As events reach an instance's two sides.
        self._submit()
        self._admit()

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        # As kaveri.hosting.served_phases combines the loads of both sides.
        return self._decode_load(time_s, SimulatedPrefill._load_at(self, time_s, sequence_number))
