import asyncio
from dataclasses import replace

import pytest

from kaveri.cluster.membership import MAX_TICK_S, Membership
from kaveri.domain.view import FIRST_ORDER, WIRE, InstanceLoad, InstanceRecord, InstanceState, Phase, PhaseOrder, Role

_RECORD = InstanceRecord(
    "decode-0", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=1.0, phases=(Phase.DECODE,)
)


class MembershipClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _membership() -> tuple[MembershipClock, Membership]:
    clock = MembershipClock()
    membership = Membership(clock)
    membership.learn(_RECORD, InstanceLoad(5))
    return clock, membership


def _tick(clock: MembershipClock, membership: Membership, duration_s: float) -> None:
    for _ in range(round(duration_s / 0.1)):
        clock.now_s += 0.1
        membership.tick()


def _ids(membership: Membership) -> set[str]:
    return set(membership.view().instances)


def test_lease_ends_after_its_time_and_not_before() -> None:
    clock, membership = _membership()
    _tick(clock, membership, 0.9)
    assert _ids(membership) == {"decode-0"}
    _tick(clock, membership, 0.2)
    assert _ids(membership) == set()


def test_loaded_instance_has_what_was_left_of_its_lease() -> None:
    clock, membership = _membership()
    membership.learn(_RECORD, InstanceLoad(6), remaining_s=0.3)
    assert round(membership.view().instances["decode-0"].heartbeat_age_s, 6) == 0.7
    _tick(clock, membership, 0.4)
    assert _ids(membership) == set()


def test_pause_of_this_process_counts_as_one_tick() -> None:
    clock, membership = _membership()
    clock.now_s += 3600.0
    membership.tick()
    assert _ids(membership) == {"decode-0"}
    assert membership.view().instances["decode-0"].heartbeat_age_s == 3600.0
    _tick(clock, membership, 1.1 - MAX_TICK_S)
    assert _ids(membership) == set()


def test_nothing_ends_while_the_store_is_away_and_everybody_has_one_lease_after_its_return() -> None:
    clock, membership = _membership()
    _tick(clock, membership, 0.8)
    membership.store_lost()
    assert not membership.view().store_connected
    clock.now_s += 60.0
    membership.store_returned()
    assert membership.view().store_connected
    _tick(clock, membership, 0.9)
    assert _ids(membership) == {"decode-0"}
    _tick(clock, membership, 0.2)
    assert _ids(membership) == set()


async def test_end_of_a_lease_wakes_who_waits_for_a_change() -> None:
    clock, membership = _membership()
    await membership.wait_for_change(0.0)
    waiting = asyncio.create_task(membership.wait_for_change(60.0))
    _tick(clock, membership, 1.1)
    view = await asyncio.wait_for(waiting, 5.0)
    assert view.instances == {}


def test_late_heartbeat_of_the_same_life_is_ignored() -> None:
    _, membership = _membership()
    membership.learn(_RECORD, InstanceLoad(4, free_blocks=9))
    assert membership.view().instances["decode-0"].load == InstanceLoad(5)


def test_end_of_another_life_is_ignored() -> None:
    _, membership = _membership()
    membership.forget("decode-0", 2)
    membership.forget("unknown", 1)
    assert _ids(membership) == {"decode-0"}
    membership.forget("decode-0", 1)
    assert _ids(membership) == set()


def test_a_view_stays_the_same_object_while_only_loads_change_and_shows_them() -> None:
    clock, membership = _membership()
    view = membership.view()
    assert view.ready(Phase.DECODE, "kaveri-tiny") is view.ready(Phase.DECODE, "kaveri-tiny")
    membership.learn(_RECORD, InstanceLoad(6, free_blocks=3))
    clock.now_s += 0.5
    assert membership.view() is view
    (instance,) = view.ready(Phase.DECODE, "kaveri-tiny")
    assert instance.load.free_blocks == 3
    assert instance.heartbeat_age_s == 0.5


def test_a_view_is_a_new_one_when_an_instance_comes_drains_grows_serves_other_phases_or_goes() -> None:
    clock, membership = _membership()
    other = replace(_RECORD, instance_id="decode-1", model="other")
    seen = [membership.view()]

    def ready_ids(model: str | None = None) -> list[str]:
        assert all(membership.view() is not former for former in seen)
        seen.append(membership.view())
        return [instance.record.instance_id for instance in membership.view().ready(Phase.DECODE, model)]

    membership.learn(other, InstanceLoad(1))
    assert ready_ids() == ["decode-0", "decode-1"]
    membership.learn(other, InstanceLoad(2, total_blocks=9))
    assert ready_ids("other") == ["decode-1"]
    membership.learn(other, InstanceLoad(3, total_blocks=9, phases=(), phase_order=FIRST_ORDER))
    assert ready_ids("other") == []
    membership.learn(other, InstanceLoad(4, total_blocks=9, phases=(Phase.DECODE,), phase_order=PhaseOrder(1, 1)))
    assert ready_ids("other") == ["decode-1"]
    membership.learn(_RECORD, InstanceLoad(6, InstanceState.DRAINING))
    assert ready_ids() == ["decode-1"]
    membership.learn(replace(_RECORD, incarnation=2), InstanceLoad(1))
    assert ready_ids() == ["decode-0", "decode-1"]
    membership.forget("decode-1", 1)
    assert ready_ids() == ["decode-0"]
    _tick(clock, membership, 1.1)
    assert ready_ids() == []
    # Only whether the store can be reached: the instances are the same.
    membership.store_lost()
    assert membership.view().instances is seen[-1].instances


@pytest.mark.parametrize("role", [Role.ENGINE, Role.ROUTER])
def test_renewal_of_the_lease_alone_is_a_change_only_for_those_who_wait_for_a_routers_sign_of_life(role: Role) -> None:
    record = replace(_RECORD, role=role)
    clock, membership = _membership()
    membership.learn(record, InstanceLoad(5))
    membership.changed.clear()
    _tick(clock, membership, 0.9)
    membership.learn(record, InstanceLoad(5))
    assert membership.changed.is_set() is (role is Role.ROUTER)
    membership.changed.clear()
    membership.learn(record, InstanceLoad(6))
    assert membership.changed.is_set()


def test_an_instance_of_another_wire_number_is_shown_apart_and_never_among_those_that_take_requests() -> None:
    _, membership = _membership()
    stranger = replace(_RECORD, instance_id="decode-1", wire=WIRE + 1)
    membership.learn(stranger, InstanceLoad(1))
    view = membership.view()
    assert set(view.instances) == {"decode-0"}
    assert [shown.record for shown in view.incompatible.values()] == [stranger]
    membership.store_lost()
    assert set(membership.view().incompatible) == {"decode-1"}
    membership.learn(replace(stranger, incarnation=stranger.incarnation + 1, wire=WIRE), InstanceLoad(1))
    assert set(membership.view().instances) == {"decode-0", "decode-1"}
    assert not membership.view().incompatible
