"""A process of a simulated cluster: its record, engine and heartbeats. Pure."""

import random
from typing import Protocol

from kaveri.domain.view import InstanceRecord, Phase
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.retry import Setback
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.engine import CountedEngine, EngineListener
from kaveri.simulator.member import BeatingMember, SimulatedLoad
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.table import RunTable
from kaveri.simulator.timeline import Timeline


class InstanceRouter(Protocol):
    """The router, as instances call it; see SimulatedRouter."""

    timeline: Timeline
    spec: ClusterSpec
    seeds: random.Random
    table: RunTable

    def started(self, attempt: SimulatedAttempt) -> None: ...
    def drew_first(self, attempt: SimulatedAttempt, drawn_s: float) -> None: ...
    def finished(self, attempt: SimulatedAttempt, first_step_s: float = -1.0, preemptions: int = 0) -> None: ...
    def decode_lost(self, attempt: SimulatedAttempt) -> None: ...
    def not_resumed(self, attempt: SimulatedAttempt) -> None: ...
    def resume_lost(self, attempt: SimulatedAttempt) -> None: ...
    def lost(
        self, attempt: SimulatedAttempt, error: KaveriError, setback: Setback = ..., retry_after_s: float = 0.0
    ) -> None: ...
    def wake_at_broadcast(self) -> None: ...


class SimulatedInstance(EngineListener):
    """One incarnation of an instance. It is alive from start() to die()."""

    member: BeatingMember

    def __init__(self, router: InstanceRouter, record: InstanceRecord) -> None:
        assert isinstance(record.layout, KvLayout)
        self._router = router
        self._timeline = router.timeline
        self._spec = router.spec
        self.record = record
        self.pool = (router.spec.prefill if record.phases == (Phase.PREFILL,) else router.spec.decode).engine
        self.engine = CountedEngine(router.timeline, self.pool, record.layout, router.spec.overheads, self)
        self._serial = 0
        self.is_dead = False

    def start(self, first_beat_s: float) -> None:
        """Send heartbeats from that time on."""
        self.member = BeatingMember(self._timeline, self.record, first_beat_s, self._load_at)

    def die(self) -> None:
        self.is_dead = True
        self.engine.stop()
        self.member.stop()

    def is_empty(self) -> bool:
        """True if nothing is left here."""
        return self.is_dead or self.engine.free_blocks == self.pool.total_blocks

    def before_step_ends(self) -> None:
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        """Load of the heartbeat of that time and number."""
        raise NotImplementedError
