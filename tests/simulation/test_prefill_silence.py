"""A prefill instance that hangs or is cut off is noticed by its silence, long before its lease ends."""

from collections.abc import Callable

import pytest

from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.schedule import ScheduleResult

Run = Callable[[Plan], ScheduleResult]


def _lines(result: ScheduleResult, *parts: str) -> list[str]:
    return [line for line in result.lines if all(part in line for part in parts)]


def _at_s(line: str) -> float:
    return float(line.split()[0])


def _prompts(result: ScheduleResult) -> int:
    return len(_lines(result, "start      /kaveri.v1.PrefillService/Submit ", 'request_id: "moved"'))


def _disturbed(fault: Fault) -> Plan:
    """A request at the only prefill instance, and a second instance that it can go to. Leases are long."""
    requests = [request("before", max_tokens=2), request("moved", 0.5, prompt_tokens=250, max_tokens=10)]
    instances = cluster(prefills=2, decodes=2, step_s=0.1, chunk_tokens=32)
    return story(instances, requests, [fault], lease_ttl_s=10.0, max_model_len=320)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": FaultKind.FREEZE, "lasts_s": 5.0},
        {"kind": FaultKind.CUT, "other": "router-0", "lasts_s": 5.0},
        {"kind": FaultKind.CUT_ONE_WAY, "other": "router-0", "lasts_s": 5.0},
        {"kind": FaultKind.ISOLATE, "lasts_s": 5.0},
    ],
    ids=lambda fault: str(fault["kind"]),
)
def test_a_prompt_is_placed_again_within_a_second_when_its_instance_falls_silent(
    run: Run, fault: dict[str, object]
) -> None:
    computing = "start /kaveri.v1.PrefillService/Submit"
    result = run(_disturbed(Fault(after=computing, after_count=2, at_s=0.3, target="prefill-0", **fault)))  # type: ignore[arg-type]
    if not _lines(result, "prefill-0", "start      /kaveri.v1.PrefillService/Submit ", 'request_id: "moved"'):
        result = run(_disturbed(Fault(after=computing, after_count=2, at_s=0.3, target="prefill-1", **fault)))  # type: ignore[arg-type]
    began_s = _at_s(next(line for line in result.lines if "fault:" in line))
    lost_s = _at_s(_lines(result, "attempt_lost", "moved")[0])
    assert 0.5 <= lost_s - began_s <= 1.0
    assert _prompts(result) == 2
    assert result.counts["outcome:length"] == 2 + 2


@pytest.mark.parametrize(
    "fault", [{"kind": FaultKind.FREEZE, "lasts_s": 0.3}, {"kind": FaultKind.RESET, "other": "router-0"}]
)
def test_a_prompt_is_computed_once_when_only_its_stream_breaks(run: Run, fault: dict[str, object]) -> None:
    computing = "start /kaveri.v1.PrefillService/Submit"
    for target in ("prefill-0", "prefill-1"):
        result = run(_disturbed(Fault(after=computing, after_count=2, at_s=0.3, target=target, **fault)))  # type: ignore[arg-type]
        assert _prompts(result) == 1
        assert result.counts["outcome:length"] == 2 + 2


def test_other_requests_avoid_an_instance_that_is_silent(run: Run) -> None:
    requests = [request("before", max_tokens=2)]
    requests += [request(f"r{number}", 0.5 + 0.05 * number, prompt_tokens=60, max_tokens=5) for number in range(80)]
    cut = Fault(kind=FaultKind.CUT, at_s=1.0, target="prefill-0", other="router-0", lasts_s=3.0)
    result = run(story(cluster(prefills=2, decodes=2), requests, [cut], lease_ttl_s=10.0))
    lost = _lines(result, "attempt_lost")
    cut_s = _at_s(_lines(result, "fault:cut")[0])
    assert lost
    assert all(_at_s(line) < cut_s + 1.0 for line in lost), "the silent instance got requests"
    assert _lines(result, "fault_end")
    healed_s = _at_s(_lines(result, "fault_end")[0])
    asked = _lines(result, "prefill-0", "start      /kaveri.v1.PrefillService/Submit ")
    assert any(_at_s(line) > healed_s for line in asked), "it is used again"
