"""Simulated instances in cluster views: loads as of the last heartbeat, computed when they are read. Pure.

Heartbeats are not events: the content of the last due one is recorded before the instance changes, and when its load is
read.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

from kaveri.domain.view import NO_ORDER, InstanceLoad, InstanceRecord, InstanceState, Phase, PhaseOrder
from kaveri.simulator.timeline import Timeline

HEARTBEAT_INTERVAL_S = 0.1
ALMOST_ALL = 1 - 1e-6
"""Share of an interval that counts as the whole, to absorb rounding."""


@dataclass(slots=True)
class SimulatedLoad:
    """Load of a simulated instance in one heartbeat, readable as an InstanceLoad. Cheap to make."""

    state: ClassVar[InstanceState] = InstanceState.READY
    replica_counts: ClassVar[None] = None
    partner_id: ClassVar[None] = None

    sequence_number: int
    waiting_requests: int
    running_requests: int
    queued_prefill_tokens: int
    queue_room: int | None
    free_blocks: int
    total_blocks: int
    context_tokens: int = 0
    heavy_requests: int = 0
    light_requests: int = 0
    replica_free_bytes: int = 0
    replica_total_bytes: int = 0
    phases: tuple[Phase, ...] = ()
    ending_phases: tuple[Phase, ...] = ()
    phase_order: PhaseOrder = NO_ORDER
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0

    def numbered(self, sequence_number: int) -> "SimulatedLoad":
        return SimulatedLoad(sequence_number, *_FIGURES(self))


_FIGURES = attrgetter(*(entry.name for entry in fields(SimulatedLoad)[1:]))


class BeatingMember:
    """A simulated instance as views show it (ViewedInstance), with heartbeats that arrive without delay."""

    def __init__(
        self,
        timeline: Timeline,
        record: InstanceRecord,
        first_beat_s: float,
        load_at: Callable[[float, int], SimulatedLoad],
    ) -> None:
        """load_at: returns the load at a time, for the heartbeat of the given number. The time is never before the
        instance's last change."""
        self.record = record
        self._timeline = timeline
        self._first_beat_s = first_beat_s
        self._load_at = load_at
        self._beat = 0
        self._extra_beats = 0
        self._load: Any = load_at(first_beat_s, 1)
        self._former = self._load
        self.next_beat_s = first_beat_s + HEARTBEAT_INTERVAL_S
        self.last_beat_s = first_beat_s
        """After death: time of the last heartbeat."""

    @property
    def load(self) -> InstanceLoad:
        """Load in the instance's last heartbeat."""
        now_s = self._timeline.now_s
        if now_s >= self.next_beat_s:
            self.take_beats(now_s)
        load: InstanceLoad = self._load
        return load

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the instance's last heartbeat."""
        beat_s = self.last_beat_s if self.next_beat_s == float("inf") else self.next_beat_s - HEARTBEAT_INTERVAL_S
        return self._timeline.now_s - beat_s

    def stop(self) -> None:
        self.take_beats(self._timeline.now_s)
        self.last_beat_s = self.next_beat_s - HEARTBEAT_INTERVAL_S
        self.next_beat_s = float("inf")

    def take_beats(self, until_s: float) -> None:
        """Record the last heartbeat due by `until_s`."""
        beat_s = self.next_beat_s
        if until_s < beat_s:
            return
        first_s, interval_s, next_beat = self._first_beat_s, HEARTBEAT_INTERVAL_S, self._beat + 1
        if until_s >= beat_s + interval_s:
            # There was more than one.
            beat = int((until_s - first_s) / interval_s)
            if first_s + beat * interval_s > until_s:
                beat -= 1
            if beat > next_beat:
                next_beat, beat_s = beat, first_s + beat * interval_s
        self._beat = next_beat
        self._former = self._load
        self._load = self._load_at(beat_s, next_beat + 1 + self._extra_beats)
        self.next_beat_s = first_s + (next_beat + 1) * interval_s

    def beat_now(self) -> None:
        """Send a heartbeat in addition to the periodic ones, after a change that others must know of."""
        now_s = self._timeline.now_s
        self.take_beats(now_s)
        self._extra_beats += 1
        self._load = self._load_at(now_s, self._beat + 1 + self._extra_beats)

    def load_as_of(self, time_s: float) -> SimulatedLoad:
        """Return the load in the last heartbeat by `time_s`, which is at most one heartbeat interval ago."""
        self.take_beats(time_s)
        load: SimulatedLoad = self._load if self.next_beat_s - HEARTBEAT_INTERVAL_S <= time_s else self._former
        return load


class Broadcasts:
    """Times and number of the cluster monitor's periodic broadcasts of instance loads."""

    def __init__(self, timeline: Timeline, interval_s: float) -> None:
        self.timeline = timeline
        self._interval_s = interval_s
        self._last_s = 0.0
        self.count = 1
        """Number of broadcasts as of the last call of last()."""
        self.none_before_s = 0.0
        """Time before which no further broadcast is due."""
        self.scheduled_s = -1.0
        """Time of the scheduled broadcast event; in the past if none is scheduled."""

    def last(self) -> tuple[float, int]:
        """Return the time of the last broadcast, and the number of broadcasts so far."""
        if self.timeline.now_s >= self.none_before_s:
            missed = int((self.timeline.now_s - self._last_s) / self._interval_s)
            if missed > 0:
                self._last_s += missed * self._interval_s
                self.count += missed
            self.none_before_s = self._last_s + ALMOST_ALL * self._interval_s
        return self._last_s, self.count

    def next_s(self) -> float:
        """Return the time at which the next broadcast is due."""
        return self.last()[0] + self._interval_s

    def make(self, *, anew: bool = False) -> None:
        """Broadcast now; the next broadcast is due an interval later. anew: also if one was made at this very time."""
        self.scheduled_s = -1.0
        self.last()
        if anew or self.timeline.now_s > self._last_s:
            self._last_s = self.timeline.now_s
            self.none_before_s = self._last_s + ALMOST_ALL * self._interval_s
            self.count += 1


class HeardMember:
    """A simulated instance as views show it (ViewedInstance), as of the cluster monitor's last broadcast."""

    def __init__(self, source: BeatingMember, broadcasts: Broadcasts) -> None:
        self.record = source.record
        self._source = source
        self._broadcasts = broadcasts
        self._taken_count = 1
        self._behind = 0
        """Heartbeats that a later one replaced before any broadcast."""
        self._newest: Any = source.load
        self._load: Any = self._newest

    @property
    def load(self) -> InstanceLoad:
        """Load as of the last broadcast. Its sequence number grows with each broadcast of a newer heartbeat, as in
        kaveri.cluster.monitored_membership."""
        broadcasts = self._broadcasts
        if broadcasts.count != self._taken_count or broadcasts.timeline.now_s >= broadcasts.none_before_s:
            self._hear()
        load: InstanceLoad = self._load
        return load

    def _hear(self) -> None:
        time_s, count = self._broadcasts.last()
        if count == self._taken_count:
            return
        newest = self._source.load_as_of(time_s)
        beats = newest.sequence_number - self._newest.sequence_number
        self._behind += max(0, beats - (count - self._taken_count))
        if beats:
            self._newest = newest
            self._load = newest.numbered(newest.sequence_number - self._behind) if self._behind else newest
        self._taken_count = count

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat, which may be newer than the broadcast one."""
        return self._source.heartbeat_age_s
