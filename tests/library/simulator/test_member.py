"""Simulated instances as views show them."""

import pytest

from kaveri.domain.view import InstanceRecord, Phase, Role
from kaveri.simulator.member import BeatingMember, Broadcasts, HeardMember, SimulatedLoad
from kaveri.simulator.timeline import Timeline

RECORD = InstanceRecord("decode-0", 1, Role.ENGINE, "h:1", "m", lease_ttl_s=1.0)


def test_the_last_heartbeat_of_a_dead_instance_grows_old() -> None:
    timeline = Timeline()

    def load_at(_: float, number: int) -> SimulatedLoad:
        return SimulatedLoad(number, 0, 0, 0, None, 8, 8, 0, 0, 0)

    member = BeatingMember(timeline, RECORD, first_beat_s=0.0, load_at=load_at)
    timeline.now_s = 0.25
    assert (member.load.sequence_number, member.heartbeat_age_s) == (3, pytest.approx(0.05))
    member.stop()
    timeline.now_s = 10.0
    assert (member.load.sequence_number, member.heartbeat_age_s) == (3, pytest.approx(9.8))


def test_a_change_of_phases_at_the_time_of_a_broadcast_is_broadcast_as_well() -> None:
    timeline, phases = Timeline(), (Phase.PREFILL,)

    def load_at(_: float, number: int) -> SimulatedLoad:
        return SimulatedLoad(number, 0, 0, 0, None, 8, 8, 0, 0, 0, phases=phases)

    member, broadcasts = BeatingMember(timeline, RECORD, 0.0, load_at), Broadcasts(timeline, 0.1)
    heard = HeardMember(member, broadcasts)
    timeline.now_s = 0.1
    assert heard.load.phases == (Phase.PREFILL,)
    phases = (Phase.DECODE,)
    member.beat_now()
    broadcasts.make(anew=True)
    assert heard.load.phases == (Phase.DECODE,)
