"""A simulated decode instance: the services' decisions about room, line and batch around a counted engine. Pure.

It mirrors services/decode/instance.py, event by event.
"""

from collections.abc import Callable

from kaveri.domain.view import InstanceRecord
from kaveri.engine.stepwise.phase import SequencePhase
from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.decode_batch import DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.policy.growth import BatchMember
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.engine import CountedEngine
from kaveri.simulator.member import BeatingMember, SimulatedLoad
from kaveri.simulator.router_side import RouterSide
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline

_LINE_LOOK_S = 0.05
"""Poll interval while requests wait for room. Freed blocks are noticed at once, so this only finds blocks that are no
longer kept for requests that do not land."""


_COUNTED = BatchMember(0)
"""Member of a batch whose policy only counts its members."""


class ReservedRequest:
    """One request at decode, from its Reserve call on."""

    __slots__ = ("answer", "attempt", "first_step_s", "member", "number", "preemptions", "sequence")

    def __init__(
        self, number: int, attempt: SimulatedAttempt, answer: Callable[["ReservedRequest | KaveriError"], object]
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.answer = answer
        """Called once, with itself when it has room."""
        self.member = _COUNTED
        self.sequence: CountedSequence
        self.first_step_s = -1.0
        self.preemptions = 0


class SimulatedDecode:
    """The EngineListener of its engine."""

    _engine_kind: type[CountedEngine] = CountedEngine

    def __init__(
        self, timeline: Timeline, spec: ClusterSpec, record: InstanceRecord, first_beat_s: float, router: RouterSide
    ) -> None:
        pool = spec.decode.engine
        layout = record.layout
        assert isinstance(layout, KvLayout)
        self._timeline = timeline
        self._spec = spec
        self._router = router
        batch = DecodeBatch(spec.decode.decode_policy, pool.block_tokens, pool.max_batch)
        self.room = DecodeRoom(pool.total_blocks, pool.block_tokens, batch)
        self._keeps_blocks = batch.keeps_blocks
        self._gaps = router.table.gaps
        self.engine = self._engine_kind.of_pool(timeline, pool, layout, spec.overheads, self)
        self._serial = 0
        self._in_line: dict[str, ReservedRequest] = {}
        self._by_serial: dict[int, ReservedRequest] = {}
        """Requests past the line."""
        self._heavy_count = 0
        self._looks_again = False
        self.is_dead = False
        self.member = BeatingMember(timeline, record, first_beat_s, spec.heartbeat_interval_s, self._load_at)

    # Calls of prefill instances.

    def reserve(
        self, attempt: SimulatedAttempt, waits: bool, answer: Callable[[ReservedRequest | KaveriError], object]
    ) -> ReservedRequest:
        """Ask for room. `answer` is called when there is some, or with the refusal; with `waits` perhaps later."""
        if self.is_dead:
            answer(_gone(self))
            return ReservedRequest(0, attempt, answer)
        self._touch()
        self._serial += 1
        reserved = ReservedRequest(self._serial, attempt, answer)
        try:
            needed_blocks = self.room.needed_blocks(attempt.token_count)
        except InvalidArgument as error:
            answer(error)
            return reserved
        if self._keeps_blocks:
            reserved.member = self._member_of(attempt)
        self._in_line[attempt.key] = reserved
        self.room.line.join(attempt.key, needed_blocks, attempt.token_count)
        self._give_room()
        if attempt.key in self._in_line and (not waits or self.room.line.is_over_limit()):
            refusal = self.room.refusal(self._free_room(), self._timeline.now_s)
            self.leave_line(attempt)
            answer(refusal)
        return reserved

    def _member_of(self, attempt: SimulatedAttempt) -> BatchMember:
        request, settings = attempt.request, self._spec.decode
        expected = expected_answer(
            request.length, request.prompt_tokens, request.output_tokens, settings.engine.max_model_len
        )
        return member_of(attempt.token_count, attempt.generated, expected, settings.decode_range_end)

    def leave_line(self, attempt: SimulatedAttempt) -> None:
        """Take a request that wants no more room out of the line. Idempotent."""
        if self._in_line.pop(attempt.key, None) is not None and not self.is_dead:
            self.room.line.leave(attempt.key)

    def give_back(self, reserved: ReservedRequest) -> None:
        """Release the room of a request that does not need it."""
        if reserved.number in self._by_serial and not self.is_dead:
            self._touch()
            self._forget(reserved)
            self.room.batch.leave(reserved.number)
            self.engine.end(reserved.sequence)
            self._give_room()

    def land(self, reserved: ReservedRequest) -> None:
        """Handle the landing of a request's KV."""
        self._touch()
        reserved.attempt.landed_s = self._timeline.now_s
        self.room.batch.land(reserved.number)
        # It may lose its blocks at once to a request that was admitted before.
        self.engine.land(reserved.sequence)
        self._admit()
        if self._in_line:
            self._give_room()

    def die(self) -> None:
        """Kill the process."""
        self._touch()
        now_s = self._timeline.now_s
        self.is_dead = True
        self.engine.stop()
        self.member.stop()
        placed, in_line = list(self._by_serial.values()), list(self._in_line.values())
        self._by_serial.clear()
        self._in_line.clear()
        for reserved in placed:
            attempt = reserved.attempt
            if attempt.landed_s < 0:
                self._timeline.after(self._spec.overheads.hop_s, attempt.prefill.push_failed, reserved)
                continue
            request = attempt.request
            request.generated = self.engine.token_count(reserved.sequence) - request.prompt_tokens
            has_drawn = reserved.first_step_s >= 0
            request.last_token_s = min(now_s, self.engine.step_began_s) if has_drawn else attempt.first_token_s
            self._timeline.after(self._spec.overheads.hop_s, self._router.decode_lost, attempt)
        for waiting in in_line:
            waiting.answer(_gone(self))

    # Events of the engine.

    def before_step_ends(self) -> None:
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)

    def prefill_started(self, sequence: CountedSequence) -> None: ...

    def prefill_advanced(self, sequence: CountedSequence) -> None: ...

    def first_token(self, sequence: CountedSequence) -> None: ...

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        if self._keeps_blocks:
            self.room.batch.run(steps, [sequence.number for sequence in resting] if resting else ())
        if gap_count:
            self._gaps(step_s, gap_count)

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        self.room.batch.step({sequence.number for sequence in sequences})
        if gap_count:
            self._gaps(step_s, gap_count)

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        reserved = self._by_serial[sequence.number]
        reserved.first_step_s = time_s
        self._gaps(time_s - reserved.attempt.first_token_s, 1)

    def ended(self, sequence: CountedSequence) -> None:
        reserved = self._by_serial[sequence.number]
        self._forget(reserved)
        self.room.batch.leave(sequence.number)
        self._router.finished(reserved.attempt, self._timeline.now_s, reserved.first_step_s, reserved.preemptions)

    def preempted(self, sequence: CountedSequence) -> None:
        self._by_serial[sequence.number].preemptions += 1
        self.room.batch.preempt(sequence.number)

    def stepped(self) -> None:
        self._admit()
        if self._in_line:
            self._give_room()

    def is_empty(self) -> bool:
        """True if nothing is left here."""
        is_whole = self.is_dead or self.engine.free_blocks == self.engine.blocks.total
        return is_whole and not self._in_line and not self._by_serial

    def _touch(self) -> None:
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)
        self.engine.sync(now_s)

    def _give_room(self) -> None:
        while self._in_line:
            request_id = self.room.next_to_ask(self._free_room(), self._timeline.now_s)
            if request_id is None or not self._ask(self._in_line[request_id]):
                break
        if self._in_line and not self._looks_again:
            self._looks_again = True
            self._timeline.after(_LINE_LOOK_S, self._look)

    def _look(self, _: None) -> None:
        self._looks_again = False
        if self._in_line:
            self._touch()
            self._give_room()

    def _ask(self, reserved: ReservedRequest) -> bool:
        attempt = reserved.attempt
        request = attempt.request
        self.room.line.asked(attempt.key)
        self.room.batch.expect(reserved.number, reserved.member, self._timeline.now_s)
        # Prefill draws the next token.
        remaining = request.output_tokens - attempt.generated - 1
        sequence = CountedSequence(reserved.number, None, attempt.token_count, remaining, SequencePhase.RESERVED)
        if not self.engine.open(sequence, attempt.token_count + 1):
            self.room.line.refused(attempt.key)
            self.room.batch.leave(reserved.number)
            return False
        reserved.sequence = sequence
        self._by_serial[reserved.number] = reserved
        self._heavy_count += attempt.heavy
        self.leave_line(attempt)
        reserved.answer(reserved)
        return True

    def _admit(self) -> None:
        batch = self.room.batch
        if not batch.ready_count:
            return
        for serial in batch.admissible(self.engine.free_blocks):
            self.engine.admit(self._by_serial[serial].sequence)
            batch.admit(serial)

    def _forget(self, reserved: ReservedRequest) -> None:
        del self._by_serial[reserved.number]
        self._heavy_count -= reserved.attempt.heavy

    def _free_room(self) -> FreeRoom:
        engine = self.engine
        return FreeRoom(engine.blocks.free_count, 0, engine.admitted_count)

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        # As DecodeRoom.load().
        engine = self.engine
        if self._keeps_blocks:
            # The policy has to know of the steps.
            engine.sync(time_s)
        free_blocks, context_tokens = engine.room_at(time_s)
        placed, running = len(self._by_serial), self.room.batch.running_count
        return SimulatedLoad(
            sequence_number,
            placed + len(self._in_line) - running,
            running,
            0,
            None,
            self.room.shown_blocks(FreeRoom(free_blocks, 0, engine.admitted_count), time_s),
            engine.blocks.total,
            context_tokens,
            self._heavy_count,
            placed - self._heavy_count,
        )


def _gone(instance: SimulatedDecode) -> Unavailable:
    return Unavailable(f"{instance.member.record.instance_id} cannot be reached")
