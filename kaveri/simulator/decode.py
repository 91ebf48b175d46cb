"""Simulated decode instances: KV reservations, their queue, and batch admission around a counted engine. Pure.

They mirror services/decode/instance.py and replicated.py, event by event.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kaveri.domain.view import InstanceRecord
from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.policy.admission import DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.policy.growth import BatchMember
from kaveri.simulator.copies import InstanceCopies
from kaveri.simulator.instance import InstanceRouter, SimulatedAttempt, SimulatedInstance
from kaveri.simulator.member import SimulatedLoad
from kaveri.simulator.sequence import CountedSequence

_LINE_LOOK_S = 0.05
"""Poll interval while requests wait for blocks: finds blocks no longer kept for requests that never arrive."""


Answer = Callable[[CountedSequence | KaveriError], object]
"""Called with the reserved sequence, or the reason why there is none."""
_COUNTED = BatchMember(0)
"""Placeholder for admission policies that only count the members of the batch."""


class DecodeSide(SimulatedInstance):
    """Decode half of a simulated instance: its decoding requests, and their KV copies at other instances."""

    def __init__(self, router: InstanceRouter, record: InstanceRecord) -> None:
        super().__init__(router, record)
        self._batch = DecodeBatch(self._spec.decode.decode_policy, self.pool.block_tokens, self.pool.max_batch)
        self.room = DecodeRoom(self.pool.total_blocks, self.pool.block_tokens, self._batch)
        self._keeps_blocks = self._batch.keeps_blocks
        self._gaps = router.gaps
        self._decoding: dict[int, CountedSequence] = {}
        """Sequences by number: reserved, waiting for the batch, or in it."""
        self._preemptions: Counter[int] = Counter()
        self._heavy_count = 0
        self.copies = InstanceCopies(router, self) if self._spec.decode.copies.is_on else None

    def die(self) -> None:
        self.touch()
        if self.copies is not None:
            self.copies.die()
        for sequence in self._decoding.values():
            self._lose(sequence)
        self._decoding.clear()
        super().die()

    def is_empty(self) -> bool:
        has_copies = self.copies is not None and not self.copies.is_empty()
        return super().is_empty() and not self._decoding and not has_copies

    # Requests that are resumed from copies.

    def reserve_resumed(self, attempt: SimulatedAttempt) -> CountedSequence | None:
        """Allocate blocks, ahead of waiting requests, to resume a request from a copy. None if too few are free."""
        self.touch()
        self._serial += 1
        attempt.heavy = self._spec.prefill.thresholds.is_heavy(None, attempt.request.prompt_tokens)
        try:
            needed_blocks = self.room.needed_blocks(attempt.token_count)
        except InvalidArgument:
            return None
        free, now_s = self._free_room(), self._timeline.now_s
        if not self.room.has_ahead_of_line(needed_blocks, free, now_s):
            return None
        remaining = attempt.request.output_tokens - attempt.generated
        sequence = CountedSequence(self._serial, attempt, attempt.token_count, remaining, SequencePhase.RESERVED)
        if not self.engine.open(sequence, attempt.token_count + 1):
            return None
        # Its router does not send the answer's expected length.
        member = member_of(attempt.token_count, attempt.generated, None, self._spec.decode.decode_range_end)
        self._batch.expect(self._serial, member, now_s)
        return sequence

    def let_go(self, sequence: CountedSequence) -> int:
        """End a running request here, as it moves to another instance; return its tokens."""
        self.touch()
        attempt: SimulatedAttempt = sequence.owner
        token_count = self.engine.token_count(sequence)
        attempt.sequence = None
        attempt.request.generated = token_count - attempt.request.prompt_tokens
        attempt.request.last_token_s = min(self._timeline.now_s, self.engine.step_began_s)
        self._forget(sequence)
        self._preemptions.pop(sequence.number, None)
        self.engine.end(sequence)
        return token_count

    def land_resumed(self, sequence: CountedSequence, held_tokens: int) -> None:
        """Start to decode a resumed request, ahead of others; its copy had the KV of `held_tokens` tokens."""
        self.touch()
        sequence.owner.decode = self
        self._decoding[sequence.number] = sequence
        self._heavy_count += sequence.owner.heavy
        self._batch.land(sequence.number, first=True)
        self.engine.land_partly(sequence, held_tokens)
        self._admit()

    # Events of the engine.

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        if self._keeps_blocks:
            self._batch.run(steps, [sequence.number for sequence in resting] if resting else ())
        if gap_count:
            self._gaps(step_s, gap_count)

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        self._batch.step({sequence.number for sequence in sequences})
        if gap_count:
            self._gaps(step_s, gap_count)

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        attempt: SimulatedAttempt = sequence.owner
        self._gaps(time_s - attempt.first_token_s, 1)
        if attempt.resumed_from is not None and attempt.request.losses is not None:
            attempt.request.losses.drew(time_s)

    def ended(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        if self.copies is not None:
            self.copies.owned.end(attempt)
        self._forget(sequence)
        preemptions = self._preemptions.pop(sequence.number, 0) if self._preemptions else 0
        self._router.finished(attempt, sequence.first_step_s, preemptions)

    def preempted(self, sequence: CountedSequence) -> None:
        self._preemptions[sequence.number] += 1
        self._batch.preempt(sequence.number)

    def touch(self) -> None:
        """Apply due heartbeats and engine steps, before blocks are taken or the load changes."""
        if self.is_dead:
            return
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)
        self.engine.sync(now_s)

    def _member_of(self, attempt: SimulatedAttempt) -> BatchMember:
        request, settings = attempt.request, self._spec.decode
        expected = expected_answer(
            request.length, request.prompt_tokens, request.output_tokens, settings.engine.max_model_len
        )
        return member_of(attempt.token_count, attempt.generated, expected, settings.decode_range_end)

    def _admit(self) -> None:
        if self._batch.ready_count:
            for number in self._batch.admissible(self.engine.free_blocks):
                self.engine.admit(self._decoding[number])
                self._batch.admit(number)

    def _forget(self, sequence: CountedSequence) -> None:
        del self._decoding[sequence.number]
        self._heavy_count -= sequence.owner.heavy
        self._batch.leave(sequence.number)

    def _lose(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        if attempt.landed_s < 0:
            self._timeline.post(attempt.prefill.push_failed, sequence)
            return
        attempt.sequence = None
        request, now_s = attempt.request, self._timeline.now_s
        request.generated = self.engine.token_count(sequence) - request.prompt_tokens
        has_drawn = sequence.first_step_s >= 0
        request.last_token_s = min(now_s, self.engine.step_began_s) if has_drawn else attempt.first_token_s
        self._timeline.post(self._router.decode_lost, attempt)

    def _free_room(self) -> FreeRoom:
        return FreeRoom(self.engine.blocks.free_count, 0, self.engine.admitted_count)

    def _decode_load(self, time_s: float, others: SimulatedLoad) -> SimulatedLoad:
        """Add the decoding requests to `others`, the rest of the instance's load at `time_s`, and return it."""
        engine = self.engine
        if self._keeps_blocks:
            # The policy has to know of the steps.
            engine.sync(time_s)
        free_blocks, others.context_tokens = engine.room_at(time_s)
        decoding, batch_size = len(self._decoding), self._batch.running_count
        others.waiting_requests += decoding - batch_size
        others.running_requests += batch_size
        others.free_blocks = self.room.shown_blocks(FreeRoom(free_blocks, 0, engine.admitted_count), time_s)
        others.heavy_requests, others.light_requests = self._heavy_count, decoding - self._heavy_count
        if self.copies is not None:
            held = self.copies.held
            others.replica_free_bytes, others.replica_total_bytes = held.free_bytes, held.total_bytes
        return others


class _Waiting(NamedTuple):
    number: int
    attempt: SimulatedAttempt
    member: BatchMember
    answer: Answer


class SimulatedDecode(DecodeSide):
    """Simulated decode instance. Prefill instances reserve blocks (a sequence), then push KV into them."""

    def __init__(self, router: InstanceRouter, record: InstanceRecord) -> None:
        super().__init__(router, record)
        self._in_line: dict[str, _Waiting] = {}
        self._looks_again = False

    # Calls of prefill instances.

    def reserve(self, attempt: SimulatedAttempt, waits: bool, answer: Answer) -> None:
        """Reserve KV blocks for a request and call `answer` with their sequence or an error. If too few are free, queue
        when `waits` is True, otherwise fail."""
        if self.is_dead:
            answer(self._unreachable())
            return
        self.touch()
        self._serial += 1
        try:
            needed_blocks = self.room.needed_blocks(attempt.token_count)
        except InvalidArgument as error:
            answer(error)
            return
        member = self._member_of(attempt) if self._keeps_blocks else _COUNTED
        self._in_line[attempt.key] = _Waiting(self._serial, attempt, member, answer)
        self.room.join(attempt.key, needed_blocks, attempt.token_count)
        self._give_room()
        if attempt.key in self._in_line and (not waits or self.room.is_over_limit()):
            refusal = self.room.refusal(self._free_room(), self._timeline.now_s)
            self.leave_line(attempt)
            answer(refusal)

    def leave_line(self, attempt: SimulatedAttempt) -> None:
        """Remove a request from the queue for KV blocks. Idempotent."""
        if self._in_line.pop(attempt.key, None) is not None and not self.is_dead:
            self.room.leave_line(attempt.key)

    def give_back(self, reserved: CountedSequence) -> None:
        """Release KV blocks reserved for a request that does not need them."""
        if reserved.number in self._decoding and not self.is_dead:
            self.touch()
            self._forget(reserved)
            self.engine.end(reserved)
            self._give_room()

    def land(self, reserved: CountedSequence) -> None:
        """Start to decode a request whose KV has arrived in its reserved blocks."""
        self.touch()
        reserved.owner.landed_s = self._timeline.now_s
        self._batch.land(reserved.number)
        # It may lose its blocks at once to a request that was admitted before.
        self.engine.land(reserved)
        self._admit()
        if self._in_line:
            self._give_room()
        if self.copies is not None:
            self.copies.owned.follow(reserved.owner, reserved)

    def die(self) -> None:
        super().die()
        in_line = list(self._in_line.values())
        self._in_line.clear()
        for waiting in in_line:
            waiting.answer(self._unreachable())

    def stepped(self) -> None:
        self._admit()
        if self._in_line:
            self._give_room()

    def is_empty(self) -> bool:
        return super().is_empty() and not self._in_line

    def _give_room(self) -> None:
        while self._in_line:
            request_id = self.room.next_to_ask(self._free_room(), self._timeline.now_s)
            if request_id is None or not self._offer_room(self._in_line[request_id]):
                break
        if self._in_line and not self._looks_again:
            self._looks_again = True
            self._timeline.after(_LINE_LOOK_S, self._look_at_line)

    def _look_at_line(self, _: None) -> None:
        self._looks_again = False
        if self._in_line:
            self.touch()
            self._give_room()

    def _offer_room(self, waiting: _Waiting) -> bool:
        attempt = waiting.attempt
        self.room.asked(attempt.key)
        self._batch.expect(waiting.number, waiting.member, self._timeline.now_s)
        # Prefill draws the next token.
        remaining = attempt.request.output_tokens - attempt.generated - 1
        sequence = CountedSequence(waiting.number, attempt, attempt.token_count, remaining, SequencePhase.RESERVED)
        if not self.engine.open(sequence, attempt.token_count + 1):
            self.room.refused(attempt.key)
            self._batch.leave(waiting.number)
            return False
        self._decoding[waiting.number] = sequence
        self._heavy_count += attempt.heavy
        self.leave_line(attempt)
        waiting.answer(sequence)
        return True

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        in_line, total = len(self._in_line), self.pool.total_blocks
        return self._decode_load(time_s, SimulatedLoad(sequence_number, in_line, 0, 0, None, 0, total))

    def _unreachable(self) -> Unavailable:
        return Unavailable(f"{self.record.instance_id} cannot be reached")
