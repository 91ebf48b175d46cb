"""Orders to change a phase while a router, the instance, a link or the store fails: no answer changes, and the instance
serves what its newest order says."""

from dataclasses import replace

import pytest

from kaveri.domain.view import DrainWay
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


_BURST = [request(f"b{number}", 0.01 * number, prompt_tokens=200, max_tokens=8) for number in range(24)] + [
    request(f"a{number}", 3.0 + 0.05 * number, prompt_tokens=20, max_tokens=90) for number in range(24)
]
"""Long prompts with short answers, then the other way round."""


@pytest.mark.parametrize(
    "beside",
    [
        "nothing",
        "a router killed behind the order",
        "the other router killed as it is asked",
        "a router frozen as it is asked",
        "the instance killed behind the order",
        "the store away",
        "the store emptied",
    ],
)
def test_phases_follow_the_load_whatever_fails_beside_it(run: Run, beside: str) -> None:
    other = _BESIDE[beside]
    result = run(
        story(
            cluster(routers=2, prefills=1, decodes=2, step_s=0.01),
            _BURST,
            [other] if other is not None else [],
            max_model_len=320,
            divergent=True,
            flip_targets=(0.1, 0.02, 0.3),
        )
    )
    assert result.counts["outcome:length"] == len(_BURST) + 4
    assert lines(result, "flip_decided", "prefill")
    assert lines(result, "phases_ordered")


def test_another_instance_takes_the_place_of_the_last_one_of_a_phase(run: Run) -> None:
    result = run(
        story(
            cluster(routers=1, prefills=1, decodes=2, step_s=0.01),
            LOAD,
            [Fault(kind=FaultKind.KILL, at_s=1.0, target="prefill-0")],
            max_model_len=320,
            flip_targets=(1000.0, 1000.0, 100.0),
        )
    )
    assert result.counts["outcome:length"] == len(LOAD) + 2
    assert lines(result, "flip_decided", "no instance serves prefill")


@pytest.mark.parametrize("way", DrainWay)
def test_an_order_says_what_becomes_of_answers_that_run(run: Run, way: DrainWay) -> None:
    long = [request(f"long{number}", 0.02 * number, prompt_tokens=60, max_tokens=150) for number in range(6)]
    flip = Fault(kind=FaultKind.FLIP, at_s=0.8, target="decode-0", other="prefill", lasts_s=60.0, drain=way)
    result = run(
        story(
            cluster(prefills=1, decodes=2, step_s=0.02),
            long,
            [flip],
            max_model_len=320,
            divergent=True,
            replication=ReplicationMode.SPREAD,
            replica_min_tokens=16,
        )
    )
    assert result.counts["outcome:length"] == len(long) + 2
    assert bool(lines(result, "decode-0", "request_let_go")) is (way is DrainWay.MIGRATE)


@pytest.mark.parametrize("way", DrainWay)
def test_an_order_says_what_becomes_of_prompts_that_wait(run: Run, way: DrainWay) -> None:
    flip = Fault(kind=FaultKind.FLIP, at_s=0.6, target="prefill-0", other="decode", lasts_s=60.0, drain=way)
    requests = [request(f"r{number}", 0.5, prompt_tokens=150, max_tokens=5) for number in range(8)]
    result = run(story(cluster(prefills=2, step_s=0.1), requests, [flip], max_model_len=320))
    assert result.counts["outcome:length"] == 8 + 2
    given_back = lines(result, "prefill-0", "request_ended", "outcome=given_back")
    assert bool(given_back) is (way is not DrainWay.FINISH)


_FAULTS_OF_MOVES: dict[str, Fault | None] = {
    "nothing": None,
    "the new instance killed": Fault(kind=FaultKind.RESTART, at_s=0.01, target="prefill-1", lasts_s=0.5),
    "the new instance frozen": Fault(kind=FaultKind.FREEZE, at_s=0.01, target="prefill-1", lasts_s=2.0),
    "the former instance killed": Fault(kind=FaultKind.RESTART, at_s=0.01, target="decode-0", lasts_s=0.5),
    "the two cut off from each other": Fault(
        kind=FaultKind.CUT, at_s=0.01, target="decode-0", other="prefill-1", lasts_s=1.0
    ),
    "the router killed": Fault(kind=FaultKind.RESTART, at_s=0.01, target="router-0", lasts_s=0.5),
    "the new instance flips back": Fault(
        kind=FaultKind.FLIP, at_s=0.01, target="prefill-1", other="prefill", lasts_s=60.0
    ),
    "the new instance drains": Fault(kind=FaultKind.UNDRAIN, at_s=0.01, target="prefill-1", lasts_s=1.0),
    "the former instance drains": Fault(kind=FaultKind.UNDRAIN, at_s=0.01, target="decode-0", lasts_s=1.0),
}


@pytest.mark.parametrize("after", ["batch_levelled", "request_let_go"])
@pytest.mark.parametrize("beside", _FAULTS_OF_MOVES)
@pytest.mark.parametrize("replica_min_tokens", [16, 1000], ids=["copies", "no copies before"])
def test_running_requests_move_onto_an_instance_that_begins_to_decode(
    run: Run, beside: str, replica_min_tokens: int, after: str
) -> None:
    long = [request(f"long{number}", 0.02 * number, prompt_tokens=60, max_tokens=220) for number in range(8)]
    short = [request(f"r{number}", 0.3 * number, prompt_tokens=30, max_tokens=4) for number in range(20)]
    flip = Fault(kind=FaultKind.FLIP, at_s=0.8, target="prefill-1", other="decode", lasts_s=60.0)
    fault = _FAULTS_OF_MOVES[beside]
    other = [] if fault is None else [replace(fault, after=f"log info {after}")]
    result = run(
        story(
            cluster(routers=2, prefills=2, decodes=2, step_s=0.02, block_count=100),
            [*long, *short],
            [flip, *other],
            max_model_len=320,
            divergent=True,
            replication=ReplicationMode.SPREAD,
            replica_min_tokens=replica_min_tokens,
            prefills_hold_copies=True,
        )
    )
    assert result.counts["outcome:length"] == len(long) + len(short) + 4
    assert lines(result, after, "prefill-1")
    let_go = lines(result, "request_let_go", "holder_id=prefill-1")
    if not other:
        changed = lines(result, "owner_changed", "outcome=resumed")
        assert len(changed) == len(let_go) < len(long)
        assert not lines(result, "attempt_lost")
        assert not lines(result, "resume_refused")
        assert all("recomputed_tokens=1 " in f"{line} " for line in changed), changed
