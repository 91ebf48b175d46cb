"""Simulated instances as views show them."""

import pytest

from kaveri.domain.view import InstanceRecord, Role
from kaveri.simulator.member import BeatingMember, SimulatedLoad
from kaveri.simulator.timeline import Timeline


def test_the_last_heartbeat_of_a_dead_instance_grows_old() -> None:
    timeline = Timeline()

    def load_at(_: float, number: int) -> SimulatedLoad:
        return SimulatedLoad(number, 0, 0, 0, None, 8, 8, 0, 0, 0)

    record = InstanceRecord("decode-0", 1, Role.ENGINE, "h:1", "m", lease_ttl_s=1.0)
    member = BeatingMember(timeline, record, first_beat_s=0.0, load_at=load_at)
    timeline.now_s = 0.25
    assert (member.load.sequence_number, member.heartbeat_age_s) == (3, pytest.approx(0.05))
    member.stop()
    timeline.now_s = 10.0
    assert (member.load.sequence_number, member.heartbeat_age_s) == (3, pytest.approx(9.8))
