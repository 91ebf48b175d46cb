"""Times of the serving path that depend on one another, in seconds; check_order() asserts their order. A beat is a
message that only shows that its sender is alive."""

TICK_S = 0.05
"""Interval of checks for silent peers."""
BEAT_S = 0.1
"""Interval of beats on a stream without other messages."""
BEAT_AFTER_S = 0.15
"""Silence of a peer after which it is asked for a beat, and the interval between further ones."""
SUSPECT_AFTER_S = 0.5
"""Silence after which a peer is suspected to be dead, and calls waiting for it are retried elsewhere."""
MOST_PATIENCE = 5.0
"""Max factor by which the silence allowed to a peer is extended if its beats come late."""
MOST_PATIENCE_S = 2.5
"""Max silence to which it is extended."""
SUSPECT_UNHEARD_AFTER_S = 1.2
"""SUSPECT_AFTER_S of a peer that has not answered any beat yet: it may be distant or still connecting."""
REOPEN_GRACE_S = 0.25
"""Time for a silent instance to answer on a new stream, counted while this process runs; then its requests move."""
CONNECT_GRACE_S = 2.0
"""Time for an instance to open a token stream before requests placed there are placed elsewhere."""
CALL_TIMEOUT_S = 2.0
"""Deadline of unary calls that the peer answers at once."""
ATTACH_SOON_S = 0.5
"""Replaces CALL_TIMEOUT_S for attaching to a request if an instance with a copy of its KV can resume it."""
COMPLETE_COPY_S = 3.0
"""Time that a KV copy outlives its complete answer, whose end the router may have missed if the owner died."""
STRAGGLER_S = 5.0
"""Time that an instance refuses late calls of ended attempts. Short, because clients may use a request id again."""
ATTEMPT_REMEMBERED_S = 60.0
"""Time that a router remembers the number of placements (attempts) of a request id."""
DRAIN_RETRY_S = 1.0
"""Retry time told to requests that a draining instance refuses."""
LEASE_S = 2.0
"""Default lease of an instance: long enough for a process that is busy or has little CPU to renew it."""
LEADER_LEASE_S = 2.0
"""Lease of the router that leads as cluster monitor and broadcasts loads."""
BROADCAST_LOST_AFTER_S = 3.0
"""Time without a broadcast after which processes follow all heartbeats instead."""


def check_order() -> None:
    """Assert the order in which the protocols rely on these times."""
    assert TICK_S < BEAT_S < SUSPECT_AFTER_S, "a stream that beats is not suspected"
    assert BEAT_AFTER_S < SUSPECT_AFTER_S < SUSPECT_UNHEARD_AFTER_S, "a peer is asked before it is suspected"
    assert REOPEN_GRACE_S < CONNECT_GRACE_S, "a silent instance is given up before one that is not connected yet"
    assert ATTACH_SOON_S < CALL_TIMEOUT_S, "a replica is resumed before its owner's call is over"
    assert CALL_TIMEOUT_S < STRAGGLER_S < ATTEMPT_REMEMBERED_S, "no call of a former attempt is taken for a new one's"
    assert MOST_PATIENCE_S + REOPEN_GRACE_S < COMPLETE_COPY_S, "a copy outlives its owner's detection"
    assert LEADER_LEASE_S < BROADCAST_LOST_AFTER_S, "another router broadcasts before instances stop waiting for it"
