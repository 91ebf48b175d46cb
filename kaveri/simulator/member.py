"""Simulated instances as views show them: loads as of the last heartbeat, worked out when they are read. Pure.

An instance beats at fixed intervals. Nothing has to happen at a beat: before the instance changes, and when its load is
read, what the last beat has said is noted.
"""

from collections.abc import Callable
from dataclasses import replace

from kaveri.domain.view import InstanceLoad, InstanceRecord
from kaveri.simulator.timeline import Timeline

_ALMOST_ALL = 1 - 1e-6
"""Part of an interval after which rounding may count it as over."""


class BeatingMember:
    """A ViewedInstance whose heartbeats are heard at once."""

    def __init__(
        self,
        timeline: Timeline,
        record: InstanceRecord,
        first_beat_s: float,
        interval_s: float,
        load_at: Callable[[float, int], InstanceLoad],
    ) -> None:
        """load_at: the load at a time, with the number of the heartbeat that says it. Not called with a time before the
        instance's last change."""
        self.record = record
        self._timeline = timeline
        self._first_beat_s = first_beat_s
        self._interval_s = interval_s
        self._load_at = load_at
        self._beat = 0
        self._load = load_at(first_beat_s, 1)
        self._former = self._load
        self.next_beat_s = first_beat_s + interval_s
        self.last_beat_s = first_beat_s
        """Of an instance that has died."""

    @property
    def load(self) -> InstanceLoad:
        """As of its last heartbeat."""
        if self._timeline.now_s >= self.next_beat_s:
            self.take_beats(self._timeline.now_s)
        return self._load

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since that heartbeat."""
        return self._timeline.now_s - (self.next_beat_s - self._interval_s)

    def stop(self) -> None:
        """There are no more heartbeats."""
        self.take_beats(self._timeline.now_s)
        self.last_beat_s = self.next_beat_s - self._interval_s
        self.next_beat_s = float("inf")

    def take_beats(self, until_s: float) -> None:
        """Notes what the last heartbeat until then has said."""
        if until_s < self.next_beat_s:
            return
        beat = int((until_s - self._first_beat_s) / self._interval_s)
        beat_s = self._first_beat_s + beat * self._interval_s
        if beat_s > until_s:
            beat -= 1
            beat_s = self._first_beat_s + beat * self._interval_s
        self._beat = max(beat, self._beat + 1)
        self._former = self._load
        self._load = self._load_at(max(beat_s, self.next_beat_s), self._beat + 1)
        self.next_beat_s = self._first_beat_s + (self._beat + 1) * self._interval_s

    def load_as_of(self, time_s: float) -> InstanceLoad:
        """What the last heartbeat until then has said. That was at most one heartbeat ago."""
        self.take_beats(time_s)
        return self._load if self.next_beat_s - self._interval_s <= time_s else self._former


class Broadcasts:
    """The cluster monitor's: when the last one was made, and how many there were."""

    def __init__(self, timeline: Timeline, interval_s: float) -> None:
        self._timeline = timeline
        self._interval_s = interval_s
        self._last_s = 0.0
        self._count = 1
        self._none_before_s = 0.0
        """There is surely no other one before then."""

    def last(self) -> tuple[float, int]:
        """The time of the last one, and its number."""
        if self._timeline.now_s >= self._none_before_s:
            missed = int((self._timeline.now_s - self._last_s) / self._interval_s)
            if missed > 0:
                self._last_s += missed * self._interval_s
                self._count += missed
            self._none_before_s = self._last_s + _ALMOST_ALL * self._interval_s
        return self._last_s, self._count

    def next_s(self) -> float:
        """When the next one is due."""
        return self.last()[0] + self._interval_s

    def make(self) -> None:
        """One is made at once; the next is due an interval later."""
        self.last()
        if self._timeline.now_s > self._last_s:
            self._last_s = self._timeline.now_s
            self._none_before_s = self._last_s + _ALMOST_ALL * self._interval_s
            self._count += 1


class HeardMember:
    """A ViewedInstance as the cluster monitor's last broadcast has shown it."""

    def __init__(self, source: BeatingMember, broadcasts: Broadcasts) -> None:
        self.record = source.record
        self._source = source
        self._broadcasts = broadcasts
        self._taken_count = 1
        self._behind = 0
        """Heartbeats that no broadcast has brought, since another one came before the next broadcast."""
        self._newest = self._load = source.load

    @property
    def load(self) -> InstanceLoad:
        """As of the last broadcast. Its number rises with each broadcast that brought a newer heartbeat, as that of
        kaveri.cluster.monitored_membership does."""
        time_s, count = self._broadcasts.last()
        if count != self._taken_count:
            newest = self._source.load_as_of(time_s)
            beats = newest.sequence_number - self._newest.sequence_number
            self._behind += max(0, beats - (count - self._taken_count))
            if beats:
                self._newest = newest
                number = newest.sequence_number - self._behind
                self._load = replace(newest, sequence_number=number) if self._behind else newest
            self._taken_count = count
        return self._load

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the heartbeat that the broadcast has told of, or a little less."""
        return self._source.heartbeat_age_s
