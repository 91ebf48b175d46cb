"""A process of a simulated cluster: its record, engine and heartbeats. Pure."""

from typing import TYPE_CHECKING

from kaveri.domain.view import InstanceRecord, Phase
from kaveri.kv.layout.layout import KvLayout
from kaveri.simulator.engine import CountedEngine, EngineListener
from kaveri.simulator.member import BeatingMember, SimulatedLoad

if TYPE_CHECKING:
    from kaveri.simulator.router import SimulatedRouter


class SimulatedInstance(EngineListener):
    """One incarnation of an instance. It is alive from start() to die()."""

    member: BeatingMember

    def __init__(self, router: "SimulatedRouter", record: InstanceRecord) -> None:
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
        self.member = BeatingMember(
            self._timeline, self.record, first_beat_s, self._spec.heartbeat_interval_s, self._load_at
        )

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
