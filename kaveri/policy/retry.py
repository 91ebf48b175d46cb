"""Decides when and where a request is retried after its placement at a prefill instance failed. Pure: no clock, no I/O.

An instance that failed a request is avoided for it during a backoff, which a restart of the instance ends. Others may
be tried meanwhile. Only accepted placements count as attempts. A full queue is retried until the request's deadline, an
unreachable instance until a time limit. Failed pushes to decode instances: services/prefill/decode_placer.py.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kaveri.domain.view import ClusterView, InstanceRecord

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
_LONGEST_REFUSAL_S = 0.5
"""Limit to which pauses grow while instances refuse a request again and again, as with an old view of their phases."""
LONGEST_RETRY_AFTER_S = 5.0
"""Max retry delay honoured; longer or invalid ones count as this."""
_DOUBLINGS = 6
"""Doublings of the first pause until it reaches the maximum."""


class Setback(enum.Enum):
    """Reason why the placement of a request at an instance failed."""

    FULL = "full"
    """The instance refused the request: its queue is full, or longer than another's."""
    UNREACHED = "unreached"
    """No connection: the instance did not receive the request."""
    LOST = "lost"
    """The instance had accepted the request, and cannot finish it."""
    BROKEN = "broken"
    """The instance had accepted the request, and its engine raised an exception. At most one of its requests is at
    fault, which its next attempt reveals, so this counts against none."""
    REFUSED = "refused"
    """The holder of the request's KV copy declined to resume it. The request is placed anew without a pause."""


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Limits on one request's retries."""

    max_attempts: int
    """Lost placements after which the request fails; at least 1."""
    unavailable_after_s: float
    """Seconds for which unreachable instances are retried."""


@dataclass(frozen=True, slots=True)
class _Rest:
    incarnation: int
    until_s: float


@dataclass(frozen=True, slots=True)
class RetryState:
    """Failed placements of one request. Times are in seconds of one clock."""

    lost_attempts: int = 0
    pause_until_s: float = 0.0
    """The request is not placed before this time."""
    _failures: int = 0
    """Failures other than a full queue; each doubles the pauses."""
    _refusals: int = 0
    """Refusals by full instances; each doubles the next one's pause up to _LONGEST_REFUSAL_S."""
    _unreached: int = 0
    """Consecutive placements that failed for lack of a connection."""
    _unreached_since_s: float = 0.0
    """Time of the first placement in the current series without a connection."""
    _rests: Mapping[str, _Rest] = field(default_factory=dict)

    def resting(self, view: ClusterView, now_s: float) -> dict[str, float]:
        """Return the ids of the instances in `view` that the request must avoid now, with the end of each backoff."""
        return {
            instance_id: rest.until_s
            for instance_id, rest in self._rests.items()
            if rest.until_s > now_s and _is_same_life(view, instance_id, rest)
        }

    def failed(self, view: ClusterView) -> frozenset[str]:
        """Return the ids of the instances in `view` that failed the request and have not restarted since."""
        return frozenset(name for name, rest in self._rests.items() if _is_same_life(view, name, rest))


def after_setback(
    state: RetryState,
    limits: RetryLimits,
    setback: Setback,
    at_fault: InstanceRecord | None,
    now_s: float,
    jitter: float,
    retry_after_s: float = 0.0,
) -> RetryState | None:
    """Return the state after a failed placement; None if the request fails now, with that placement's error.

    at_fault: the failed prefill instance; None if prefill had finished. jitter: random, in [0, 1). retry_after_s: delay
    requested by a full instance, which is avoided for 1 to 1.5 times as long, and longer after several refusals. 0: it
    may be used at once.

    A full queue never ends a request. Unreachable instances end it after at least `max_attempts` consecutive failures
    whose first is `unavailable_after_s` ago. A refusal by the holder of a KV copy changes nothing.
    """
    if setback is Setback.REFUSED:
        return state
    failures = state._failures + 1
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, _DOUBLINGS)) * (0.5 + jitter / 2)
    after = replace(state, _failures=failures, _unreached=0)
    match setback:
        case Setback.FULL:
            # A full instance is healthy: pauses for other failures do not grow.
            grown_s = min(_LONGEST_REFUSAL_S, FIRST_PAUSE_S * 2 ** min(state._refusals, _DOUBLINGS))
            pause_s = max(grown_s, bounded_retry_s(retry_after_s)) * (1 + jitter / 2)
            refusals = state._refusals + bool(retry_after_s)
            after = replace(after, _failures=state._failures, _refusals=refusals)
        case Setback.UNREACHED:
            since_s = state._unreached_since_s if state._unreached else now_s
            after = replace(after, _unreached=state._unreached + 1, _unreached_since_s=since_s)
            if after._unreached >= limits.max_attempts and now_s - since_s >= limits.unavailable_after_s:
                return None
        case Setback.LOST:
            after = replace(after, lost_attempts=state.lost_attempts + 1, pause_until_s=now_s + pause_s)
            if after.lost_attempts >= limits.max_attempts:
                return None
        case Setback.BROKEN:
            after = replace(after, pause_until_s=now_s + pause_s)
    if at_fault is None or (setback is Setback.FULL and not retry_after_s):
        return after
    rest = _Rest(at_fault.incarnation, now_s + pause_s)
    return replace(after, _rests={**state._rests, at_fault.instance_id: rest})


def bounded_retry_s(retry_after_s: float) -> float:
    """Clamp a retry delay, in seconds, requested by another process. An invalid one counts as the longest."""
    return retry_after_s if 0 <= retry_after_s <= LONGEST_RETRY_AFTER_S else LONGEST_RETRY_AFTER_S


def _is_same_life(view: ClusterView, instance_id: str, rest: _Rest) -> bool:
    status = view.instances.get(instance_id)
    return status is not None and status.record.incarnation == rest.incarnation
