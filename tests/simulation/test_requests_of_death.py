"""Requests that raise an exception wherever they are computed end alone, and at most two instances under each."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind, Plan, PlannedInstance, ScheduledRequest
from tests.simulation.cluster.schedule import ScheduleResult

Run = Callable[[Plan], ScheduleResult]

PROBES = 2


def _death(request_id: str, at_index: int, place: str = "forward") -> Fault:
    return Fault(kind=FaultKind.DEATH, at_s=0.0, target=request_id, other=place, amount=float(at_index))


def _ended_by(result: ScheduleResult) -> Counter[str]:
    """How many engines have raised, by the injected fault."""
    return Counter(line.split("error=")[1] for line in result.lines if " error engine_failed " in line)


def _check(run: Run, plan: Plan, deaths: int, *, broken: int) -> ScheduleResult:
    """Runs a plan in which all but the requests of death finish, and engines break at most that often."""
    result = run(plan)
    assert result.counts["outcome:EngineError"] == deaths
    assert result.counts["outcome:length"] == len(plan.requests) - deaths + PROBES * len(plan.routers)
    assert sum(_ended_by(result).values()) <= broken
    return result


def _load(count: int, until_s: float, max_tokens: int = 12) -> list[ScheduledRequest]:
    rng = random.Random(count)
    return [request(f"ordinary-{n}", until_s * n / count, max_tokens=rng.randint(2, max_tokens)) for n in range(count)]


def test_five_requests_of_death_beside_300_others_end_ten_instances_at_most(run: Run) -> None:
    deaths = [
        _death("deadly-0", 0),
        _death("deadly-1", 0, "draw"),
        _death("deadly-2", 1),
        _death("deadly-3", 7),
        _death("deadly-4", 5, "draw"),
    ]
    deadly = [request(f"deadly-{n}", 0.4 + 0.6 * n, max_tokens=12) for n in range(5)]
    plan = story(cluster(prefills=2, decodes=2, max_batch=8), [*_load(300, 4.0), *deadly], deaths)
    result = _check(run, plan, 5, broken=6)
    # Those that raise in their draw end no instance.
    assert {line.split("'")[1] for line in _ended_by(result)} == {f"an injected fault at token {n}" for n in (0, 1, 7)}


@pytest.mark.parametrize("at_index", [0, 1, 20])
@pytest.mark.parametrize("colocated", [False, True])
def test_a_request_that_raises_in_a_forward_pass_ends_two_instances(run: Run, colocated: bool, at_index: int) -> None:
    instances = cluster(prefills=0, decodes=0, colocated=3) if colocated else cluster(prefills=2, decodes=2)
    plan = story(instances, [request("deadly", max_tokens=40)], [_death("deadly", at_index)], max_model_len=320)
    assert sum(_ended_by(_check(run, plan, 1, broken=2)).values()) == 2


def _with_copies(faults: Sequence[Fault], *instances: PlannedInstance) -> Plan:
    return story(
        instances or cluster(prefills=2, decodes=3, step_s=0.02),
        [request("deadly", 0.2, prompt_tokens=100, max_tokens=120), *_load(20, 2.0, 60)],
        [_death("deadly", 60), *faults],
        max_model_len=320,
        replication=ReplicationMode.RING,
    )


def test_a_request_that_is_resumed_from_a_copy_is_a_suspect_there(run: Run) -> None:
    result = _check(run, _with_copies([]), 1, broken=2)
    assert any("request_resumed request_id=deadly" in line for line in result.lines)
    assert sum(_ended_by(result).values()) == 2


def test_a_request_that_has_moved_from_an_instance_that_drains_ends_two_instances(run: Run) -> None:
    drains = [Fault(kind=FaultKind.UNDRAIN, at_s=1.0, target=f"decode-{n}", lasts_s=0.3) for n in range(1)]
    _check(run, _with_copies(drains), 1, broken=2)


def test_a_client_that_reattaches_at_another_router_brings_the_suspicion_along(run: Run) -> None:
    """The router dies before it has placed the request again."""
    lost = "log warning attempt_lost request_id=deadly"
    router_dies = Fault(kind=FaultKind.KILL, after=lost, at_s=0.005, target="router-0")
    plan = story(
        cluster(routers=2, prefills=2, decodes=3, step_s=0.05),
        [request("deadly", 0.0, max_tokens=60)],
        [_death("deadly", 10), router_dies],
        max_model_len=320,
    )
    result = run(plan)
    assert result.counts["fault:kill"] == 1
    assert result.counts["outcome:EngineError"] == 1
    assert sum(_ended_by(result).values()) == 2


def test_many_suspects_are_cleared_while_a_request_of_death_ends(run: Run) -> None:
    """All of a full batch are suspects; each is computed without the others."""
    crowd = [request(f"ordinary-{n}", 0.01 * n, max_tokens=150) for n in range(24)]
    deadly = [request("deadly", 0.5, max_tokens=20), replace(request("second", 0.9, max_tokens=20))]
    plan = story(
        cluster(prefills=1, decodes=2, max_batch=32),
        [*crowd, *deadly],
        [_death("deadly", 5), _death("second", 9)],
        max_model_len=320,
    )
    _check(run, plan, 2, broken=4)
