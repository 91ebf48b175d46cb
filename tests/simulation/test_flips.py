"""Orders to change a phase while a router, the instance, a link or the store fails: no answer changes, and the instance
serves what its newest order says."""

import pytest

from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind
from tests.simulation.cluster.schedule import ScheduleResult
from tests.simulation.conftest import Run

LOAD = [request(f"r{number}", 0.15 * number, prompt_tokens=60, max_tokens=60) for number in range(24)]
_ASKED, _ORDERED = "start /kaveri.v1.InstanceService/SetPhases", "log info phases_ordered"
_BESIDE: dict[str, Fault | None] = {
    "nothing": None,
    "a router killed as it is asked": Fault(
        kind=FaultKind.RESTART, after=_ASKED, at_s=0.0, target="router-0", lasts_s=1.0
    ),
    "the other router killed as it is asked": Fault(
        kind=FaultKind.RESTART, after=_ASKED, at_s=0.0, target="router-1", lasts_s=1.0
    ),
    "a router frozen as it is asked": Fault(
        kind=FaultKind.FREEZE, after=_ASKED, at_s=0.0, target="router-0", lasts_s=4.0
    ),
    "a router killed behind the order": Fault(
        kind=FaultKind.RESTART, after=_ORDERED, at_s=0.0, target="router-0", lasts_s=1.0
    ),
    "the instance killed behind the order": Fault(
        kind=FaultKind.RESTART, after=_ORDERED, at_s=0.01, target="decode-1", lasts_s=0.3
    ),
    "the instance frozen as it is asked": Fault(
        kind=FaultKind.FREEZE, after=_ASKED, at_s=0.0, target="decode-1", lasts_s=3.0
    ),
    "the instance cut off from a router": Fault(
        kind=FaultKind.CUT, after=_ASKED, at_s=0.0, target="decode-1", other="router-0", lasts_s=2.0
    ),
    "the answer lost": Fault(
        kind=FaultKind.CUT_ONE_WAY, after=_ORDERED, at_s=0.0, target="decode-1", other="router-0", lasts_s=1.5
    ),
    "the store away": Fault(kind=FaultKind.STORE_AWAY, at_s=0.7, lasts_s=2.0),
    "the store emptied": Fault(kind=FaultKind.STORE_EMPTIED, after=_ORDERED, at_s=0.0),
}


def lines(result: ScheduleResult, *parts: str) -> list[str]:
    return [line for line in result.lines if all(part in line for part in parts)]


@pytest.mark.parametrize("beside", _BESIDE)
@pytest.mark.parametrize("replicates", [False, True], ids=["no copies", "copies"])
def test_an_instance_flips_and_goes_back_whatever_fails_beside_it(run: Run, beside: str, replicates: bool) -> None:
    flip = Fault(kind=FaultKind.FLIP, at_s=0.8, target="decode-1", other="prefill", lasts_s=1.5)
    other = _BESIDE[beside]
    replication = {"replication": ReplicationMode.RING, "replica_min_tokens": 32} if replicates else {}
    result = run(
        story(
            cluster(routers=2, prefills=1, decodes=2, step_s=0.01),
            LOAD,
            [flip, *([other] if other is not None else [])],
            max_model_len=320,
            divergent=True,
            **replication,
        )
    )
    assert result.counts["outcome:length"] == len(LOAD) + 4
    assert len(lines(result, "flip accepted")) == 2
    ordered = lines(result, "phases_ordered", "decode-1")
    assert "prefill" in ordered[0]
    assert "decode" in ordered[-1]
