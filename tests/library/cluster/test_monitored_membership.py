from dataclasses import replace

from kaveri.cluster.membership import MAX_TICK_S
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceStatus, LoadBroadcast, Phase, Role
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.timeouts import BROADCAST_LOST_AFTER_S
from tests.library.cluster.test_membership import MembershipClock

_DECODE = InstanceRecord(
    "decode-0", 1, Role.ENGINE, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=1.0, phases=(Phase.DECODE,)
)
_OTHER = replace(_DECODE, instance_id="decode-1", address="127.0.0.1:2")
_PREFILL = replace(_DECODE, instance_id="prefill-0", address="127.0.0.1:3", phases=(Phase.PREFILL,))


def _broadcast(token: int, number: int, *names: InstanceRecord, heartbeat: int = 1) -> LoadBroadcast:
    statuses = tuple(InstanceStatus(record, InstanceLoad(heartbeat), 0.05) for record in names)
    return LoadBroadcast("router-0", token, number, statuses)


def _ids(membership: MonitoredMembership) -> set[str]:
    return set(membership.view().instances)


def test_older_token_and_older_broadcast_of_the_same_token_are_ignored() -> None:
    membership = MonitoredMembership(MembershipClock())
    assert membership.take_in(_broadcast(7, 5, _DECODE))
    assert not membership.take_in(_broadcast(6, 99, _OTHER))
    assert not membership.take_in(_broadcast(7, 5, _OTHER))
    assert not membership.take_in(_broadcast(7, 4, _OTHER))
    assert _ids(membership) == {"decode-0"}
    assert membership.take_in(_broadcast(8, 1, _DECODE, _OTHER))
    assert _ids(membership) == {"decode-0", "decode-1"}
    assert membership.fencing_token == 8


def test_whom_its_leader_stops_naming_leaves_at_once_but_not_in_a_new_life() -> None:
    membership = MonitoredMembership(MembershipClock())
    membership.take_in(_broadcast(1, 1, _DECODE, _OTHER))
    membership.take_in(_broadcast(1, 2, _OTHER))
    assert _ids(membership) == {"decode-1"}
    reborn = replace(_DECODE, incarnation=2, address="127.0.0.1:9")
    membership.take_in(_broadcast(1, 3, _DECODE, _OTHER))
    membership.take_in(_broadcast(1, 4, reborn, _OTHER))
    assert membership.view().instances["decode-0"].record == reborn


def test_whom_only_the_former_leader_named_stays_for_one_lease() -> None:
    clock = MembershipClock()
    membership = MonitoredMembership(clock)
    membership.take_in(_broadcast(1, 1, _DECODE, _OTHER))
    heard_s = 0.0
    for number in range(1, 20):
        clock.now_s += 0.1
        heard_s += 0.1
        membership.take_in(_broadcast(2, number, _OTHER, heartbeat=number + 1))
        assert ("decode-0" in _ids(membership)) == (heard_s < _DECODE.lease_ttl_s - 1e-6)
        assert "decode-1" in _ids(membership)


def test_nobody_is_lost_while_nobody_leads_however_long_that_is() -> None:
    clock = MembershipClock()
    membership = MonitoredMembership(clock)
    assert membership.is_silent()
    membership.take_in(_broadcast(1, 1, _DECODE))
    clock.now_s += BROADCAST_LOST_AFTER_S
    assert not membership.is_silent()
    clock.now_s += 3600.0
    assert membership.is_silent()
    assert membership.view().instances["decode-0"].heartbeat_age_s > 3600.0
    # The next leader knows no instance yet.
    membership.take_in(_broadcast(2, 1))
    assert _ids(membership) == {"decode-0"}
    assert not membership.is_silent()


def test_lease_shorter_than_the_time_between_two_broadcasts_does_not_end_in_between() -> None:
    clock = MembershipClock()
    membership = MonitoredMembership(clock)
    brief = replace(_DECODE, lease_ttl_s=MAX_TICK_S / 2)
    for number in range(1, 5):
        assert membership.take_in(_broadcast(1, number, brief, heartbeat=10 * number))
        assert membership.view().instances["decode-0"].load.sequence_number == 10 + number - 1, "it was lost meanwhile"
        clock.now_s += MAX_TICK_S


def test_a_store_that_was_away_makes_the_leader_unheard_and_ends_nobody() -> None:
    clock = MembershipClock()
    membership = MonitoredMembership(clock)
    membership.take_in(_broadcast(1, 1, _DECODE))
    membership.store_lost()
    assert membership.is_silent()
    clock.now_s += 60.0
    membership.store_returned()
    membership.tick()
    assert _ids(membership) == {"decode-0"}


def test_routers_are_no_members_of_an_instances_view() -> None:
    membership = MonitoredMembership(MembershipClock())
    router = replace(_PREFILL, instance_id="router-0", role=Role.ROUTER)
    membership.learn(router, InstanceLoad(1))
    membership.take_in(_broadcast(1, 1, router, _PREFILL, _DECODE))
    assert _ids(membership) == {"prefill-0", "decode-0"}


def test_work_sent_between_two_broadcasts_counts_until_one_shows_it() -> None:
    # decode-0 beats five times between two broadcasts. The work is sent when it has made its seventh heartbeat, and the
    # last that was heard is its fifth: the next broadcast shows the tenth, or, sent a moment before, the seventh.
    membership = MonitoredMembership(MembershipClock())
    sent: UnconfirmedWork[str] = UnconfirmedWork()
    membership.take_in(_broadcast(1, 1, _DECODE, heartbeat=5))
    sent.add("request", membership.view().instances["decode-0"], 7)
    membership.take_in(_broadcast(1, 2, _DECODE, heartbeat=7))
    assert sent.at(membership.view().instances["decode-0"]).amount == 7, "its seventh heartbeat does not show the work"
    membership.take_in(_broadcast(1, 3, _DECODE, heartbeat=7))
    assert sent.at(membership.view().instances["decode-0"]).amount == 7, "that was the same heartbeat again"
    membership.take_in(_broadcast(1, 4, _DECODE, heartbeat=12))
    assert sent.at(membership.view().instances["decode-0"]).amount == 0
