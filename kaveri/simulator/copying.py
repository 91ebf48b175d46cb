"""Simulated instances with copies: their requests are copied elsewhere, and requests resume here from copies. Pure.

They mirror services/decode/replicated.py and holder.py around the instances without copies.
"""

import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kaveri.domain.length import RangeEnd
from kaveri.domain.view import InstanceRecord
from kaveri.engine.stepwise.phase import SequencePhase
from kaveri.errors import InvalidArgument
from kaveri.policy.decode_batch import member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.colocated import SimulatedColocated
from kaveri.simulator.copies import OwnedCopies
from kaveri.simulator.decode import ReservedRequest, SimulatedDecode
from kaveri.simulator.held_copies import HeldCopies
from kaveri.simulator.member import BeatingMember, SimulatedLoad
from kaveri.simulator.resuming_engine import ResumingEngine
from kaveri.simulator.router_side import RouterSide
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline


class ResumingInstance(Protocol):
    """Interface of an instance that continues resumed requests."""

    engine: ResumingEngine
    member: BeatingMember

    def reserve_resumed(self, attempt: SimulatedAttempt) -> CountedSequence | None:
        """Take room ahead of all waiting requests. None: there is none."""

    def land_resumed(self, attempt: SimulatedAttempt, sequence: CountedSequence, held_tokens: int) -> None:
        """Handle the copy's arrival in the engine. It is admitted before those that wait for a place in the batch."""


class InstanceCopies:
    """Copies at and from one incarnation of an instance. begin() must follow."""

    owned: OwnedCopies
    _instance: ResumingInstance

    def __init__(self, timeline: Timeline, spec: ClusterSpec, record: InstanceRecord, router: RouterSide) -> None:
        self.record = record
        self.held = HeldCopies(timeline, spec.decode.copies, record, spec.overheads.hop_s)
        self._timeline = timeline
        self._spec = spec
        self._router = router
        self._resuming: dict[SimulatedAttempt, None] = {}
        """Attempts that have room, and whose copies are being moved into the engine."""
        self.is_dead = False

    def begin(self, instance: ResumingInstance, touch: Callable[[], None], rng: random.Random) -> None:
        """Connect the instance. touch: advances its engine to the steps that have ended."""
        self._instance = instance
        self.held.member = instance.member
        self.owned = OwnedCopies(self._timeline, self._spec, self.record, instance.engine, touch, rng)

    def load(self, load: SimulatedLoad) -> SimulatedLoad:
        """Add the free memory for copies to a load. Needed for the first heartbeat."""
        load.replica_free_bytes, load.replica_total_bytes = self.held.free_bytes, self.held.total_bytes
        return load

    def resume(self, attempt: SimulatedAttempt) -> None:
        """Resume a request from the copy in `attempt.replica`."""
        replica, held = attempt.replica, self.held.find(attempt.request.number)
        assert replica is not None
        if self.is_dead or held is None or replica.holder_incarnation != self.record.incarnation:
            self._refuse(attempt)
            return
        if held.is_growing:
            self.held.shut(held)
        held_tokens = self.held.usable_tokens(held, attempt.token_count)
        sequence = self._instance.reserve_resumed(attempt) if held_tokens else None
        if sequence is not None:
            self._resuming[attempt] = None
            resumed = (attempt, sequence, held_tokens)
            self._timeline.after(self._spec.overheads.push_tail_s, self._land, resumed)
        else:
            self._refuse(attempt)

    def die(self) -> None:
        """Kill the process."""
        self.is_dead = True
        self.owned.die()
        self.held.die()
        for attempt in self._resuming:
            self._timeline.after(self._spec.overheads.hop_s, self._router.resume_lost, attempt)
        self._resuming.clear()

    def is_empty(self) -> bool:
        """True if nothing is left here."""
        return self.owned.is_empty() and self.held.is_empty() and not self._resuming

    def _land(self, resumed: tuple[SimulatedAttempt, CountedSequence, int]) -> None:
        attempt, sequence, held_tokens = resumed
        if attempt not in self._resuming:
            return  # the process was killed
        del self._resuming[attempt]
        attempt.replica = None
        attempt.landed_s = self._timeline.now_s
        self._instance.land_resumed(attempt, sequence, held_tokens)
        held = self.held.find(attempt.request.number)
        if held is not None:
            self.held.drop(held)
        self._router.resumed(attempt, held_tokens)
        self.owned.follow(attempt, sequence)

    def _refuse(self, attempt: SimulatedAttempt) -> None:
        self._timeline.after(self._spec.overheads.hop_s, self._router.not_resumed, attempt)


class _ResumeRoom(NamedTuple):
    """Room for a resumed request."""

    room: DecodeRoom
    engine: ResumingEngine
    range_end: RangeEnd


def _reserve_resumed(
    where: _ResumeRoom, number: int, owner: object, attempt: SimulatedAttempt, now_s: float
) -> CountedSequence | None:
    room, engine = where.room, where.engine
    try:
        needed_blocks = room.needed_blocks(attempt.token_count)
    except InvalidArgument:
        return None
    free = FreeRoom(engine.blocks.free_count, 0, engine.admitted_count)
    if not room.has_ahead_of_line(needed_blocks, free, now_s):
        return None
    remaining = attempt.request.output_tokens - attempt.generated
    sequence = CountedSequence(number, owner, attempt.token_count, remaining, SequencePhase.RESERVED)
    if not engine.open(sequence, attempt.token_count + 1):
        return None
    # Its router does not send the answer's expected length.
    room.batch.expect(number, member_of(attempt.token_count, attempt.generated, None, where.range_end), now_s)
    return sequence


def _was_granted(_: object) -> None:
    raise AssertionError("a resumed request waits in no line")


class CopyingDecode(SimulatedDecode):
    """A decode instance with copies."""

    _engine_kind = ResumingEngine
    engine: ResumingEngine

    def __init__(
        self,
        timeline: Timeline,
        spec: ClusterSpec,
        record: InstanceRecord,
        first_beat_s: float,
        router: RouterSide,
        rng: random.Random,
    ) -> None:
        self.copies = InstanceCopies(timeline, spec, record, router)
        super().__init__(timeline, spec, record, first_beat_s, router)
        self.copies.begin(self, self._touch, rng)

    def land(self, reserved: ReservedRequest) -> None:
        super().land(reserved)
        self.copies.owned.follow(reserved.attempt, reserved.sequence)

    def die(self) -> None:
        self._touch()
        self.copies.die()
        super().die()

    def is_empty(self) -> bool:
        return super().is_empty() and self.copies.is_empty()

    def reserve_resumed(self, attempt: SimulatedAttempt) -> CountedSequence | None:
        """Take room ahead of all waiting requests. None: there is none."""
        self._touch()
        self._serial += 1
        attempt.heavy = self._spec.thresholds.is_heavy(None, attempt.request.prompt_tokens)
        where = _ResumeRoom(self.room, self.engine, self._spec.decode.decode_range_end)
        return _reserve_resumed(where, self._serial, None, attempt, self._timeline.now_s)

    def land_resumed(self, attempt: SimulatedAttempt, sequence: CountedSequence, held_tokens: int) -> None:
        """Handle the copy's arrival in the engine. It is admitted before those that wait for a place in the batch."""
        self._touch()
        reserved = ReservedRequest(sequence.number, attempt, _was_granted)
        reserved.sequence = sequence
        self._by_serial[sequence.number] = reserved
        self._heavy_count += attempt.heavy
        attempt.decode = self
        self.room.batch.land(sequence.number, first=True)
        self.engine.land_partly(sequence, held_tokens)
        self._admit()

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        super().drew_first(sequence, time_s)
        attempt = self._by_serial[sequence.number].attempt
        if attempt.resumed_from is not None:
            self._router.goes_on(attempt, time_s)

    def ended(self, sequence: CountedSequence) -> None:
        self.copies.owned.end(self._by_serial[sequence.number].attempt)
        super().ended(sequence)

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        return self.copies.load(super()._load_at(time_s, sequence_number))


class CopyingColocated(SimulatedColocated):
    """An instance of both phases with copies."""

    _engine_kind = ResumingEngine
    engine: ResumingEngine

    def __init__(
        self,
        timeline: Timeline,
        spec: ClusterSpec,
        record: InstanceRecord,
        first_beat_s: float,
        router: RouterSide,
        rng: random.Random,
    ) -> None:
        self.copies = InstanceCopies(timeline, spec, record, router)
        super().__init__(timeline, spec, record, first_beat_s, router, rng)
        self.copies.begin(self, self._touch, rng)

    def die(self) -> None:
        self._touch()
        self.copies.die()
        super().die()

    def is_empty(self) -> bool:
        return super().is_empty() and self.copies.is_empty()

    def _begin_search(self, attempt: SimulatedAttempt) -> None:
        super()._begin_search(attempt)
        if attempt.first_token_s >= 0:
            assert attempt.sequence is not None
            self.copies.owned.follow(attempt, attempt.sequence)

    def reserve_resumed(self, attempt: SimulatedAttempt) -> CountedSequence | None:
        """Take room ahead of all waiting requests. None: there is none."""
        self._touch()
        self._serial += 1
        attempt.heavy = self._spec.thresholds.is_heavy(None, attempt.request.prompt_tokens)
        where = _ResumeRoom(self._room, self.engine, self._spec.decode.decode_range_end)
        return _reserve_resumed(where, self._serial, attempt, attempt, self._timeline.now_s)

    def land_resumed(self, attempt: SimulatedAttempt, sequence: CountedSequence, held_tokens: int) -> None:
        """Handle the copy's arrival in the engine. It is admitted before those that wait for a place in the batch."""
        self._touch()
        attempt.decode, attempt.sequence = self, sequence
        self._adopted[sequence.number] = sequence
        self._heavy_count += attempt.heavy
        self._batch.land(sequence.number, first=True)
        self.engine.land_partly(sequence, held_tokens)
        self._admit()

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        super().drew_first(sequence, time_s)
        if sequence.owner.resumed_from is not None:
            self._router.goes_on(sequence.owner, time_s)

    def ended(self, sequence: CountedSequence) -> None:
        self.copies.owned.end(sequence.owner)
        super().ended(sequence)

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        return self.copies.load(super()._load_at(time_s, sequence_number))
