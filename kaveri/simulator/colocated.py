"""A simulated instance of both phases: prompts are decoded where they are computed, on one engine and pool. Pure.

It mirrors services/instance around services/prefill and services/decode: prompts enter the pool next to the room that
the admission policy keeps for answers, and a computed prompt is adopted at once, without a push.
"""

import random
from collections import Counter

from kaveri.domain.view import InstanceRecord
from kaveri.policy.decode_batch import DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.policy.growth import BatchMember
from kaveri.policy.prompt_room import prompt_fits
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.member import SimulatedLoad
from kaveri.simulator.prefill import SimulatedPrefill
from kaveri.simulator.router_side import RouterSide
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline


class SimulatedColocated(SimulatedPrefill):
    """A prefill instance whose engine also decodes. It never asks for room elsewhere."""

    def __init__(
        self,
        timeline: Timeline,
        spec: ClusterSpec,
        record: InstanceRecord,
        first_beat_s: float,
        router: RouterSide,
        rng: random.Random,
    ) -> None:
        pool = spec.prefill.engine
        batch = DecodeBatch(spec.decode.decode_policy, pool.block_tokens, pool.max_batch)
        self._room = DecodeRoom(pool.total_blocks, pool.block_tokens, batch)
        self._batch = batch
        self._adopted: dict[int, CountedSequence] = {}
        """Sequences by number; they decode, or wait for the batch."""
        self._preemptions: Counter[int] = Counter()
        self._heavy_count = 0
        super().__init__(timeline, spec, record, first_beat_s, router, rng)

    def accept(self, attempt: SimulatedAttempt) -> None:
        self._touch()
        super().accept(attempt)

    def die(self) -> None:
        """Kill the process. Its decoding requests are computed again elsewhere: there are no copies."""
        self._touch()
        now_s, hop_s = self._timeline.now_s, self._spec.overheads.hop_s
        for sequence in self._adopted.values():
            attempt: SimulatedAttempt = sequence.owner
            request = attempt.request
            request.generated = self.engine.token_count(sequence) - request.prompt_tokens
            has_drawn = sequence.first_step_s >= 0
            request.last_token_s = min(now_s, self.engine.step_began_s) if has_drawn else attempt.first_token_s
            attempt.sequence = None
            self._timeline.after(hop_s, self._router.both_lost, attempt)
        self._adopted.clear()
        super().die()

    def is_empty(self) -> bool:
        return super().is_empty() and not self._adopted

    def _touch(self) -> None:
        """Advance the state before blocks are taken, or a load is changed."""
        if self.is_dead:
            return
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)
        self.engine.sync(now_s)

    def _submit_again(self, _: None) -> None:
        self._touch()
        super()._submit_again(None)

    def _has_room(self, attempt: SimulatedAttempt) -> bool:
        """Return True if there is room next to the share of answers."""
        computing = self._queue.computing
        first = next(iter(computing), None)
        kept = self._batch.kept_blocks(self._timeline.now_s, None if first is None else self._member_of(first))
        counts = (other.token_count for other in computing)
        block_tokens = self._spec.prefill.engine.block_tokens
        return prompt_fits(attempt.token_count, counts, kept, self.engine.free_blocks, block_tokens)

    def _member_of(self, attempt: SimulatedAttempt) -> BatchMember:
        request = attempt.request
        expected = expected_answer(
            request.length, request.prompt_tokens, request.output_tokens, self._spec.prefill.engine.max_model_len
        )
        return member_of(attempt.token_count, attempt.generated, expected, self._spec.decode.decode_range_end)

    # The hand-over.

    def _begin_search(self, attempt: SimulatedAttempt) -> None:
        """Do nothing before the first token: adoption always has room."""
        if attempt.first_token_s < 0:
            return
        sequence, now_s = attempt.sequence, self._timeline.now_s
        assert sequence is not None
        number = sequence.number
        self._live.discard(attempt)
        attempt.decode = self
        attempt.pushing_since_s = attempt.landed_s = now_s
        self._router.handed_over(attempt, now_s)
        self._batch.expect(number, self._member_of(attempt), now_s)
        self._adopted[number] = sequence
        self._heavy_count += attempt.heavy
        is_whole = self.engine.adopt(sequence)
        self._batch.land(number)
        if not is_whole:
            self.preempted(sequence)

    def _admit(self) -> None:
        if self._batch.ready_count:
            for number in self._batch.admissible(self.engine.free_blocks):
                self.engine.admit(self._adopted[number])
                self._batch.admit(number)

    def give_back(self, reserved: object) -> None:
        raise AssertionError("nothing is reserved at an instance of both phases")

    def land(self, reserved: object) -> None:
        raise AssertionError("nothing is pushed to an instance of both phases")

    # Events of the engine.

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        self._batch.run(steps, [sequence.number for sequence in resting])
        if gap_count:
            self._router.table.gaps(step_s, gap_count)

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        self._batch.step({sequence.number for sequence in sequences})
        if gap_count:
            self._router.table.gaps(step_s, gap_count)

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        self._router.table.gaps(time_s - sequence.owner.first_token_s, 1)

    def ended(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        del self._adopted[sequence.number]
        self._heavy_count -= attempt.heavy
        self._batch.leave(sequence.number)
        preemptions = self._preemptions.pop(sequence.number, 0)
        self._router.finished(attempt, self._timeline.now_s, sequence.first_step_s, preemptions)
        # They refer to one another: drop references that are not needed any more.
        attempt.sequence = None

    def preempted(self, sequence: CountedSequence) -> None:
        self._preemptions[sequence.number] += 1
        self._batch.preempt(sequence.number)

    def stepped(self) -> None:
        # As events reach an instance's two sides.
        self._submit()
        self._admit()

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        # As kaveri.hosting.served_phases combines the loads of both sides.
        engine, queue, batch = self.engine, self._queue, self._batch
        if batch.keeps_blocks:
            # The policy has to know of the steps.
            engine.sync(time_s)
        free_blocks, context_tokens = engine.room_at(time_s)
        return SimulatedLoad(
            sequence_number,
            self._waiting_count + len(self._adopted) - batch.running_count,
            len(self._live) - self._waiting_count + batch.running_count,
            queue.queued_tokens,
            queue.room,
            self._room.shown_blocks(FreeRoom(free_blocks, 0, engine.admitted_count), time_s),
            engine.blocks.total,
            context_tokens,
            self._heavy_count,
            len(self._adopted) - self._heavy_count,
        )
