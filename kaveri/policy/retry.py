"""Decides when and where a request is retried after a failed placement at prefill. Pure: no clock, no I/O.

An instance that failed a request rests for it: it is retried after a pause that doubles, or at once when it has a new
incarnation. Other instances may be tried meanwhile. Only accepted placements count as attempts. A full queue is waited
for until the request's deadline, an unreachable instance until a time limit.

The router does not repeat a failed push to a decode instance: see services/prefill/decode_placer.py.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kaveri.domain.view import ClusterView, InstanceRecord

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
LONGEST_RETRY_AFTER_S = 5.0
"""Max retry delay honoured; longer or invalid ones count as this."""
_DOUBLINGS = 6
"""Doublings of the first pause until it reaches the maximum."""


class Setback(enum.Enum):
    """Reason why a placement failed."""

    FULL = "full"
    """The instance refused the request: its queue is full."""
    UNREACHED = "unreached"
    """No connection: the instance does not know the request."""
    LOST = "lost"
    """The instance had the request, and cannot finish it."""
    BROKEN = "broken"
    """The instance had the request, and its engine raised an exception. At most one of its requests is at fault, which
    its next attempt reveals: none is counted."""
    REFUSED = "refused"
    """The holder of its replica declined to resume it. It is placed at once."""


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
    """Placement history of one request. Times are seconds of one clock of the caller's."""

    lost_attempts: int = 0
    pause_until_s: float = 0.0
    """The request is not placed before this time."""
    _failures: int = 0
    """Failures other than a full queue; each doubles the pauses."""
    _unreached: int = 0
    """Consecutive placements that failed for lack of a connection."""
    _unreached_since_s: float = 0.0
    """Time of the first placement in the current series without a connection."""
    _rests: Mapping[str, _Rest] = field(default_factory=dict)

    def resting(self, view: ClusterView, now_s: float) -> dict[str, float]:
        """The instances of `view` to avoid now, with the time at which each rest ends."""
        return {
            instance_id: rest.until_s
            for instance_id, rest in self._rests.items()
            if rest.until_s > now_s and _is_same_life(view, instance_id, rest)
        }

    def failed(self, view: ClusterView) -> frozenset[str]:
        """The instances of `view` whose current incarnation failed the request; used only as a last resort."""
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
    """Return the state after a failed placement; None if the request fails now with that placement's error.

    at_fault: the prefill instance, unless it had done its part. jitter: random, in [0, 1). retry_after_s: requested by
    a full instance; it rests for 1 to 1.5 times as long.

    A full queue never ends a request. Unreachable instances end it after at least `max_attempts` consecutive failures
    whose first is `unavailable_after_s` ago. A refusal by a holder changes nothing.
    """
    if setback is Setback.REFUSED:
        return state
    failures = state._failures + 1
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, _DOUBLINGS)) * (0.5 + jitter / 2)
    after = replace(state, _failures=failures, _unreached=0)
    match setback:
        case Setback.FULL:
            # A full instance is healthy: pauses for other failures do not grow.
            pause_s = max(FIRST_PAUSE_S, bounded_retry_s(retry_after_s)) * (1 + jitter / 2)
            after = replace(after, _failures=state._failures)
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
    if at_fault is None:
        return after
    rest = _Rest(at_fault.incarnation, now_s + pause_s)
    return replace(after, _rests={**state._rests, at_fault.instance_id: rest})


def bounded_retry_s(retry_after_s: float) -> float:
    """Clamp a retry delay requested by another process. An invalid one counts as the longest."""
    return retry_after_s if 0 <= retry_after_s <= LONGEST_RETRY_AFTER_S else LONGEST_RETRY_AFTER_S


def _is_same_life(view: ClusterView, instance_id: str, rest: _Rest) -> bool:
    status = view.instances.get(instance_id)
    return status is not None and status.record.incarnation == rest.incarnation
