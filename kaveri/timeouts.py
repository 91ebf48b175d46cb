"""Interdependent times of the serving path, in seconds; check_order() asserts their order."""

TICK_S = 0.05
"""Interval at which silent peers are looked for."""
BEAT_S = 0.1
"""Interval of beats on a stream that has nothing to carry."""
BEAT_AFTER_S = 0.15
"""Silence after which a peer is sent a beat, and the interval between beats."""
SUSPECT_AFTER_S = 0.5
"""Silence after which a peer is suspected, and its waiting calls fail over."""
MOST_PATIENCE_S = 2.5
"""Upper bound of the silence that a late peer is allowed, unless every peer is allowed more."""
SUSPECT_UNHEARD_AFTER_S = 1.2
"""SUSPECT_AFTER_S for a peer that has answered no beat yet: it may be far away, or still connecting."""
REOPEN_GRACE_S = 0.25
"""How long an instance that went silent may take to answer a new stream, counted while this process runs. Then its
requests go on elsewhere."""
CONNECT_GRACE_S = 2.0
"""Max time of an attempt on an instance without an open stream; then the attempt is lost."""
CALL_TIMEOUT_S = 2.0
"""Deadline of unary calls that wait for nothing at the peer."""
ATTACH_SOON_S = 0.5
"""CALL_TIMEOUT_S of an attach where the holder of a replica can resume the request instead."""
COMPLETE_COPY_S = 3.0
"""How long a holder keeps the copy of a complete answer: a router may still find its owner lost, and the end not
received."""
STRAGGLER_S = 5.0
"""How long an instance refuses calls of attempts that are over. Not much longer: clients may use request ids again."""
ATTEMPT_REMEMBERED_S = 60.0
"""How long a router remembers the attempt number of a request id."""
LEASE_S = 2.0
"""Default lease of an instance. A process that is busy, or has little CPU, renews it in time."""
LEADER_LEASE_S = 2.0
"""Lease of the router that broadcasts the view."""
BROADCAST_LOST_AFTER_S = 3.0
"""Time without a broadcast after which instances follow heartbeats themselves."""


def check_order() -> None:
    """Assert the order in which the protocols rely on these times."""
    assert TICK_S < BEAT_S < SUSPECT_AFTER_S, "a stream that beats is not suspected"
    assert BEAT_AFTER_S < SUSPECT_AFTER_S < SUSPECT_UNHEARD_AFTER_S, "a peer is asked before it is suspected"
    assert REOPEN_GRACE_S < CONNECT_GRACE_S, "a silent instance is given up before one that is not connected yet"
    assert ATTACH_SOON_S < CALL_TIMEOUT_S, "a replica is resumed before its owner's call is over"
    assert CALL_TIMEOUT_S < STRAGGLER_S < ATTEMPT_REMEMBERED_S, "no call of a former attempt is taken for a new one's"
    assert MOST_PATIENCE_S + REOPEN_GRACE_S < COMPLETE_COPY_S, "a copy outlives its owner's detection"
    assert LEADER_LEASE_S < BROADCAST_LOST_AFTER_S, "another router broadcasts before instances stop waiting for it"
