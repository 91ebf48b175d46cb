"""What must hold of every schedule, beside the bounds of schedule.py and the answers themselves."""

from collections.abc import Callable

from kaveri.errors import DeadlineExceeded, EngineError, NoCapacity, RequestAlreadyExists, RequestCancelled, Unavailable
from tests.simulation.cluster.answer_checks import (
    check_answers,
    check_attempts,
    check_kv,
    check_requests_of_death,
    check_reservations,
    check_router_deaths,
    check_stale_draws,
)
from tests.simulation.cluster.network import KEEPALIVE_S
from tests.simulation.cluster.outcomes import RequestOutcome
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.store import STORE_NAME
from tests.simulation.cluster.world import World

Check = Callable[[World], list[str]]
"""Returns what is wrong, as sentences."""

_AT_ONE_INSTANCE = (
    FaultKind.KILL,
    FaultKind.RESTART,
    FaultKind.FREEZE,
    FaultKind.DRAIN,
    FaultKind.UNDRAIN,
    FaultKind.ENGINE,
)
_SILENCE_S = 0.7
"""A router's suspicion comes so long after the last message that could have come, at most."""
_BETWEEN_TWO = (FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.SLOW)
_STOPPING = (FaultKind.FREEZE, FaultKind.ISOLATE, FaultKind.CLOCK, FaultKind.STUCK, FaultKind.KILL, FaultKind.RESTART)
_AT_THE_STORE = (
    FaultKind.STORE_AWAY,
    FaultKind.STORE_LOST,
    FaultKind.STORE_EMPTIED,
    FaultKind.STORE_REFUSES,
)
_WAITED_FOR_S = 5.0
"""An instance that is back so soon is waited for, also where it is the only one of its role."""
_CLAIM_MARGIN_S = 1.5
_CUT_OFF_S = KEEPALIVE_S + 2.0
"""So long a router may not know that a client is gone."""
_CLOCK_ERROR_S = 0.05
_NEVER_SENT = ("was expected", "behind the end of the answer", "of a former version")
"""In the SDK's words for responses that do not fit what it has received."""


def errors_are_explained(world: World) -> list[str]:
    """Clients see errors only that a fault, a limit or their own doing explains."""
    found = []
    for outcome in world.outcomes:
        reason = _unexplained(world, outcome)
        if reason is not None:
            found.append(f"{outcome.request_id}, sent to {outcome.router}: {outcome.error!r} {reason}")
    return found


def _unexplained(world: World, outcome: RequestOutcome) -> str | None:
    error = outcome.error
    match error:
        case None:
            return None
        case DeadlineExceeded():
            assert outcome.ended_s is not None
            jumped_s = sum(abs(fault.amount) for fault in world.plan.faults if fault.kind is FaultKind.CLOCK)
            early_s = outcome.started_s + outcome.timeout_s - outcome.ended_s
            return "before its deadline" if early_s > _CLOCK_ERROR_S + jumped_s else None
        case RequestCancelled():
            return None if outcome.cancelled_s is not None else "although its client did not cancel it"
        case RequestAlreadyExists():
            if outcome.chunks and not _may_lose_claims(world.plan):
                return "although the id was its own"
            return None if _may_be_in_flight(world, outcome) else "although no living router has it"
        case EngineError(reason=reason):
            is_named = outcome.request_id in world.draws.deaths and repr(outcome.request_id) in reason
            return None if is_named else "although it has raised no exception"
        case Unavailable(reason=reason) if any(found in reason for found in _NEVER_SENT):
            return "is of a response that no router may send"
        case Unavailable() | NoCapacity():
            return None if not is_survivable(world.plan) else "although others could serve it"
        case _:
            return "is no error that a client should see"


def _may_be_in_flight(world: World, outcome: RequestOutcome) -> bool:
    """Whether a router that lives, or died too recently for others to know, was sent the same id."""
    now_s = outcome.ended_s
    assert now_s is not None
    known_s = world.plan.lease_ttl_s + _CLAIM_MARGIN_S
    for other in world.outcomes:
        if other is outcome or other.request_id != outcome.request_id or other.started_s > now_s:
            continue
        if isinstance(other.error, RequestAlreadyExists):
            continue
        died_s, ended_s = other.process.died_s, other.ended_s
        if now_s - died_s < known_s if died_s is not None else ended_s is None or now_s - ended_s < _CUT_OFF_S:
            return True
    return False


def _may_lose_claims(plan: Plan) -> bool:
    """Return True if the plan's faults can give another router an id that is in flight: the store loses the claim or
    considers its router dead, or the other router cannot reach the store."""
    return any(
        fault.kind in (*_AT_THE_STORE, *_STOPPING) or STORE_NAME in (fault.target, fault.other) for fault in plan.faults
    )


def is_survivable(plan: Plan) -> bool:
    """Whether no request may fail: nothing happens, or only to the store, or one fault at one of several instances."""
    if all(fault.kind in (*_AT_THE_STORE, FaultKind.DEATH) for fault in plan.faults):
        return True
    return len(plan.faults) == 1 and _is_spare(plan, plan.faults[0])


def _is_spare(plan: Plan, fault: Fault) -> bool:
    if fault.kind not in _AT_ONE_INSTANCE:
        return False
    phases = next((instance.phases for instance in plan.instances if instance.name == fault.target), ())
    if len(phases) != 1:
        return False
    soon_back = fault.kind is FaultKind.RESTART and fault.lasts_s <= _WAITED_FOR_S
    return soon_back or sum(instance.phases == phases for instance in plan.instances) > 1


def may_be_suspected(plan: Plan, router: str, instance: str, now_s: float) -> bool:
    """Whether a fault can have kept the instance's messages from the router just now, or either from running."""
    for fault in plan.faults:
        ends = {fault.target, fault.other}
        is_over = not fault.after and fault.at_s + fault.lasts_s + fault.amount + _SILENCE_S < now_s
        if fault.kind in _BETWEEN_TWO and ends == {router, instance} and not is_over:
            return True
        if fault.kind in _STOPPING and ends & {router, instance}:
            return True
    return False


CHECKS: tuple[Check, ...] = (
    errors_are_explained,
    check_answers,
    check_attempts,
    check_requests_of_death,
    check_reservations,
    check_kv,
    check_stale_draws,
    check_router_deaths,
)
