"""When a request goes to a prefill instance again after one has failed it, and to which. Pure: no clock, no I/O.

An instance that has failed a request rests for it: it is asked again after a pause that doubles, or at once when it has
begun a new life. Other instances may be asked meanwhile. Only what an instance took counts as an attempt. A full queue
is waited for until the request's deadline, an instance that cannot be reached until a time limit.

A push to a decode instance that failed is not the router's to repeat: see services/prefill/decode_placer.py.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kaveri.domain.view import ClusterView, InstanceRecord

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
LONGEST_RETRY_AFTER_S = 5.0
"""Of the delay that an instance asks for; a longer one, or one that is no number, is taken for this."""
_DOUBLINGS = 6
"""Of the first pause, until it is longer than the longest."""


class Setback(enum.Enum):
    """How a placement failed."""

    FULL = "full"
    """The instance refused the request: its queue is full."""
    UNREACHED = "unreached"
    """There was no connection: the instance knows nothing of the request."""
    LOST = "lost"
    """The instance had the request, and will not finish it."""
    BROKEN = "broken"
    """The instance had the request, and its engine has raised an exception. At most one of its requests is at fault,
    and that one is found by its next attempt: none of them is counted."""
    REFUSED = "refused"
    """The holder of its replica does not go on with it. It is placed at once."""


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Of one request."""

    max_attempts: int
    """Placements that may be lost, at least 1."""
    unavailable_after_s: float
    """Seconds for which instances that cannot be reached are asked again."""


@dataclass(frozen=True, slots=True)
class _Rest:
    incarnation: int
    until_s: float


@dataclass(frozen=True, slots=True)
class RetryState:
    """What has happened to one request so far. Times are seconds of one clock of the caller's."""

    lost_attempts: int = 0
    pause_until_s: float = 0.0
    """The request goes nowhere before."""
    _failures: int = 0
    """In a row; they double the pauses."""
    _unreached: int = 0
    """In a row."""
    _unreached_since_s: float = 0.0
    """When the first of those failed."""
    _rests: Mapping[str, _Rest] = field(default_factory=dict)

    def resting(self, view: ClusterView, now_s: float) -> dict[str, float]:
        """The instances of `view` that are not to be asked now, each with the time at which its rest ends."""
        return {
            instance_id: rest.until_s
            for instance_id, rest in self._rests.items()
            if rest.until_s > now_s and _is_same_life(view, instance_id, rest)
        }

    def failed(self, view: ClusterView) -> frozenset[str]:
        """The instances of `view` that have failed the request in their present life: taken when no other is left."""
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
    """What holds after a failed placement; None when the request fails now, with the error of that placement.

    at_fault: the prefill instance, unless it had done its part. jitter: random, in [0, 1). retry_after_s: what a full
    instance asked for; it rests for at least that long, for at most one and a half times that.

    A full queue never ends a request. Instances that cannot be reached end it when that happened at least
    `max_attempts` times in a row and the first time is `unavailable_after_s` ago. A refusal of a holder changes
    nothing.
    """
    if setback is Setback.REFUSED:
        return state
    failures = state._failures + 1
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, _DOUBLINGS)) * (0.5 + jitter / 2)
    after = replace(state, _failures=failures, _unreached=0)
    match setback:
        case Setback.FULL:
            # Nothing is wrong with the instance: the pauses of other failures do not grow by it.
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
    """A delay that another process asks for, as far as it is followed. One that is no time counts as the longest."""
    return retry_after_s if 0 <= retry_after_s <= LONGEST_RETRY_AFTER_S else LONGEST_RETRY_AFTER_S


def _is_same_life(view: ClusterView, instance_id: str, rest: _Rest) -> bool:
    status = view.instances.get(instance_id)
    return status is not None and status.record.incarnation == rest.incarnation
