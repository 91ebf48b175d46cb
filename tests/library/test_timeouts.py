from kaveri.timeouts import (
    ATTACH_SOON_S,
    ATTEMPT_REMEMBERED_S,
    BEAT_AFTER_S,
    BEAT_S,
    BROADCAST_LOST_AFTER_S,
    CALL_TIMEOUT_S,
    COMPLETE_COPY_S,
    CONNECT_GRACE_S,
    LEADER_LEASE_S,
    MOST_PATIENCE,
    REOPEN_GRACE_S,
    STRAGGLER_S,
    SUSPECT_AFTER_S,
    SUSPECT_UNHEARD_AFTER_S,
    TICK_S,
)


def test_the_times_are_in_order() -> None:
    assert TICK_S < BEAT_S < SUSPECT_AFTER_S, "a stream that beats is not suspected"
    assert BEAT_AFTER_S < SUSPECT_AFTER_S < SUSPECT_UNHEARD_AFTER_S, "a peer is asked before it is suspected"
    assert REOPEN_GRACE_S < CONNECT_GRACE_S, "a silent instance is given up before one that is not connected yet"
    assert ATTACH_SOON_S < CALL_TIMEOUT_S, "a replica is resumed before its owner's call is over"
    assert CALL_TIMEOUT_S < STRAGGLER_S < ATTEMPT_REMEMBERED_S, "no call of a former attempt is taken for a new one's"
    assert MOST_PATIENCE * SUSPECT_AFTER_S + REOPEN_GRACE_S < COMPLETE_COPY_S, "a copy outlives its owner's detection"
    assert LEADER_LEASE_S < BROADCAST_LOST_AFTER_S, "another router broadcasts before instances stop waiting for it"
