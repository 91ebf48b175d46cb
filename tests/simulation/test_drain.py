"""Instances that drain: what has not begun goes elsewhere, what has begun goes on, and nothing counts as a failure."""

from collections.abc import Callable

import pytest

from kaveri.testing.simulation.directed import cluster, request, story
from kaveri.testing.simulation.plan import Fault, FaultKind, Plan
from kaveri.testing.simulation.schedule import ScheduleResult

Run = Callable[[Plan], ScheduleResult]


def _lines(result: ScheduleResult, *parts: str) -> list[str]:
    return [line for line in result.lines if all(part in line for part in parts)]


@pytest.mark.parametrize("prefills", [1, 2])
def test_a_draining_prefill_instance_gives_back_what_it_has_not_begun_if_there_is_another(
    run: Run, prefills: int
) -> None:
    # A prompt of 5 steps each; most of them wait when the drain begins.
    requests = [request(f"r{number}", 0.001 * number, prompt_tokens=160, max_tokens=2) for number in range(40)]
    drain = Fault(kind=FaultKind.DRAIN, at_s=0.2, target="prefill-0", lasts_s=20.0)
    instances = cluster(prefills=prefills, decodes=2, step_s=0.02, chunk_tokens=32)
    result = run(story(instances, requests, [drain], drain_timeout_s=30.0))
    assert result.counts["outcome:length"] == 40 + 2
    assert not _lines(result, "attempt_lost")
    given_back = _lines(result, "request_ended", "outcome=given_back")
    assert len(given_back) > 5 if prefills == 2 else not given_back
    computed = _lines(result, "request_ended", "outcome=handed_over")
    assert len(computed) == 40 + 2, "a prompt was computed twice"
