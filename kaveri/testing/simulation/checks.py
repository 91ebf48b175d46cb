"""What must hold of every schedule, beside the bounds of schedule.py and the answers themselves."""

from collections.abc import Callable

from kaveri.cluster.view import Role
from kaveri.errors import DeadlineExceeded, NoCapacity, RequestAlreadyExists, RequestCancelled, Unavailable
from kaveri.testing.simulation.answer_checks import check_answers, check_attempts, check_kv, check_stale_draws
from kaveri.testing.simulation.outcomes import RequestOutcome
from kaveri.testing.simulation.plan import Fault, FaultKind, Plan
from kaveri.testing.simulation.world import World

Check = Callable[[World], list[str]]
"""Returns what is wrong, as sentences."""

_AT_ONE_INSTANCE = (FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.DRAIN, FaultKind.ENGINE)
_CLOCK_ERROR_S = 0.05


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
            return None if outcome.send_number > 1 else "although it was sent for the first time"
        case Unavailable() | NoCapacity():
            return None if not is_survivable(world.plan) else "although others could serve it"
        case _:
            return "is no error that a client should see"


def is_survivable(plan: Plan) -> bool:
    """Whether no request may fail: nothing happens, or one fault at one of several instances that take no clients."""
    if not plan.faults:
        return True
    return len(plan.faults) == 1 and _is_spare(plan, plan.faults[0]) and plan.max_queue >= len(plan.requests)


def _is_spare(plan: Plan, fault: Fault) -> bool:
    if fault.kind not in _AT_ONE_INSTANCE:
        return False
    role = next(instance.role for instance in plan.instances if instance.name == fault.target)
    return role in (Role.PREFILL, Role.DECODE) and len(plan.of_role(role)) > 1


CHECKS: tuple[Check, ...] = (errors_are_explained, check_answers, check_attempts, check_kv, check_stale_draws)
