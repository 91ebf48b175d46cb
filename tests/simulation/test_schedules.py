"""Whole schedules: without faults, with every kind of fault, and the seeds that once failed."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest

from kaveri.policy.prediction import PredictionMode
from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.draw import draw_plan
from tests.simulation.cluster.loop import SimulatedLoop, SimulatedProcess
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.schedule import ScheduleResult, run_schedule

Run = Callable[[Plan], ScheduleResult]

LOAD = [request(f"r{number}", 0.05 * number, max_tokens=30) for number in range(20)]
FAULTS = {
    FaultKind.KILL: Fault(kind=FaultKind.KILL, at_s=0.3, target="decode-0"),
    FaultKind.RESTART: Fault(kind=FaultKind.RESTART, at_s=0.3, target="prefill-0", lasts_s=0.2),
    FaultKind.FREEZE: Fault(kind=FaultKind.FREEZE, at_s=0.3, target="decode-1", lasts_s=1.5),
    FaultKind.CUT: Fault(kind=FaultKind.CUT, at_s=0.3, target="router-0", other="decode-0", lasts_s=17.0),
    FaultKind.CUT_ONE_WAY: Fault(
        kind=FaultKind.CUT_ONE_WAY, at_s=0.3, target="decode-0", other="prefill-1", lasts_s=1.0
    ),
    FaultKind.ISOLATE: Fault(kind=FaultKind.ISOLATE, at_s=0.3, target="prefill-1", lasts_s=2.0),
    FaultKind.SLOW: Fault(kind=FaultKind.SLOW, at_s=0.3, target="prefill-0", other="router-0", amount=0.3, lasts_s=1.0),
    FaultKind.RESET: Fault(kind=FaultKind.RESET, at_s=0.3, target="router-0", other="decode-0"),
    FaultKind.CLOCK: Fault(kind=FaultKind.CLOCK, at_s=0.3, target="router-0", amount=20.0),
    FaultKind.STORE_AWAY: Fault(kind=FaultKind.STORE_AWAY, at_s=0.3, lasts_s=2.0),
    FaultKind.STORE_LOST: Fault(kind=FaultKind.STORE_LOST, at_s=0.3, lasts_s=2.0),
    FaultKind.STORE_EMPTIED: Fault(kind=FaultKind.STORE_EMPTIED, at_s=0.3),
    FaultKind.STORE_REFUSES: Fault(kind=FaultKind.STORE_REFUSES, at_s=0.3, lasts_s=2.0),
    FaultKind.DRAIN: Fault(kind=FaultKind.DRAIN, at_s=0.3, target="decode-0", lasts_s=0.5),
    FaultKind.UNDRAIN: Fault(kind=FaultKind.UNDRAIN, at_s=0.3, target="decode-0", lasts_s=0.5),
    FaultKind.ENGINE: Fault(kind=FaultKind.ENGINE, at_s=0.3, target="decode-0", lasts_s=0.5),
    FaultKind.STUCK: Fault(kind=FaultKind.STUCK, at_s=0.3, target="decode-0", lasts_s=0.5),
    FaultKind.DAMAGE: Fault(kind=FaultKind.DAMAGE, at_s=0.0, target="prefill-0", other="decode-0", lasts_s=1.0),
    FaultKind.CLIENT: Fault(kind=FaultKind.CLIENT, at_s=0.3, target="client-0"),
    FaultKind.DEATH: Fault(kind=FaultKind.DEATH, at_s=0.0, target="r3"),
    FaultKind.SWITCH: Fault(kind=FaultKind.SWITCH, at_s=0.3, target="prefill-1", other="decode", lasts_s=0.5),
    FaultKind.FLIP: Fault(kind=FaultKind.FLIP, at_s=0.3, target="prefill-1", other="decode", lasts_s=0.5),
}


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_happens_and_is_survived(run: Run, kind: FaultKind) -> None:
    result = run(story(cluster(prefills=2, decodes=2), LOAD, [FAULTS[kind]]))
    assert result.counts[f"fault:{kind}"] == 1
    assert result.counts["phase:rest"] == 1


def test_an_instance_that_begins_at_anothers_address_is_not_taken_for_that_one(run: Run) -> None:
    """Routers know the former owner of the address for a second more, and ask there."""
    takes_over = Fault(kind=FaultKind.RESTART, at_s=0.3, target="decode-1", other="decode-0", lasts_s=0.05)
    late = Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.25, target="store", other="router-0", lasts_s=1.0)
    result = run(story(cluster(prefills=2, decodes=2), LOAD, [takes_over, late], divergent=True))
    assert result.counts["phase:rest"] == 1
    assert result.counts["outcome:length"] == len(LOAD) + 2


def test_a_colocated_cluster_serves_through_the_death_of_an_instance(run: Run) -> None:
    kill = Fault(kind=FaultKind.KILL, at_s=0.3, target="colocated-0")
    result = run(story(cluster(prefills=0, decodes=0, colocated=2), LOAD, [kill]))
    assert result.counts["outcome:length"] == len(LOAD) + 2


@pytest.mark.parametrize("seed", range(3))
def test_instances_that_switch_phases_under_load_answer_every_request_exactly(run: Run, seed: int) -> None:
    # In turn one computes prompts and the other decodes; the third does both.
    switches = [
        Fault(kind=FaultKind.SWITCH, at_s=at_s, target=target, other=other, lasts_s=0.3)
        for at_s, first, second in ((0.1, "prefill", "decode"), (0.6, "decode", "prefill"))
        for target, other in (("colocated-0", first), ("colocated-1", second))
    ]
    instances = cluster(prefills=0, decodes=0, colocated=3)
    load = [request(f"r{number}", 0.025 * number, max_tokens=30) for number in range(50)]
    result = run(story(instances, load, switches, seed=seed))
    assert result.counts["fault:switch"] == len(switches)
    assert result.counts["outcome:length"] == len(load) + 2


@pytest.mark.parametrize("seed", range(3))
def test_prefill_and_decode_instances_exchange_phases_twice_under_load(run: Run, seed: int) -> None:
    switches = [
        Fault(kind=FaultKind.SWITCH, at_s=at_s, target=target, other=other, lasts_s=0.3)
        for at_s in (0.1, 0.7)
        for target, other in (("prefill-1", "decode"), ("decode-1", "prefill"))
    ]
    load = [request(f"r{number}", 0.025 * number, max_tokens=30) for number in range(50)]
    result = run(story(cluster(prefills=2, decodes=2), load, switches, seed=seed))
    assert result.counts["fault:switch"] == len(switches)
    assert result.counts["outcome:length"] == len(load) + 2


@pytest.mark.parametrize("mode", [PredictionMode.PARALLEL, PredictionMode.SEQUENTIAL])
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.ISOLATE])
def test_a_predictor_that_is_lost_costs_no_request(run: Run, mode: PredictionMode, kind: FaultKind) -> None:
    lost = Fault(kind=kind, at_s=0.4, target="predictor-0", lasts_s=0.5)
    # The length of an answer that goes on past the end of sequence is known.
    load = [replace(each, params=replace(each.params, ignore_eos=False)) for each in LOAD]
    result = run(story(cluster(prefills=2, decodes=2, predictors=1), load, [lost], prediction=mode))
    assert any("LengthPredictorService/Predict OK" in line for line in result.lines), "predictions are asked for"
    assert result.counts["outcome:length"] == len(LOAD) + 2
    how = {FaultKind.FREEZE: "frozen", FaultKind.ISOLATE: "cut off"}.get(kind, "killed")
    assert result.counts[f"row:predictor: {how}"] == 1


def test_orders_that_meet_a_frozen_instance_are_carried_out_one_after_the_other(run: Run) -> None:
    # Both had one number, and the later one was refused: the only instance decoded for ever. Seed 601276 found it.
    freeze = Fault(kind=FaultKind.FREEZE, at_s=0.3, target="colocated-0", lasts_s=1.0)
    switch = Fault(kind=FaultKind.SWITCH, at_s=0.4, target="colocated-0", other="decode", lasts_s=0.3)
    result = run(story(cluster(prefills=0, decodes=0, colocated=1), LOAD, [freeze, switch]))
    assert result.counts["outcome:length"] == len(LOAD) + 2


def test_one_small_pool_has_the_time_that_one_request_after_the_other_takes(run: Run) -> None:
    # 28 requests with 2,061 tokens to draw, and an engine that has room for two of them at most.
    assert not run(draw_plan(605021)).violations


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_nobody_sees_an_error(run: Run, seed: int) -> None:
    """Deadlines and cancellations of the clients' own aside."""
    result = run(draw_plan(seed, faults=False))
    assert not result.counts["outcome:Unavailable"] + result.counts["outcome:NoCapacity"]


def test_a_drawn_plan_prints_everything_that_it_holds() -> None:
    plan = next(plan for seed in range(100) if (plan := draw_plan(seed)).faults)
    shown = str(plan)
    for instance in plan.instances:
        assert instance.name in shown
    for each in (*plan.requests, *plan.routers):
        assert getattr(each, "request_id", None) or each.name in shown  # type: ignore[union-attr]
    for fault in plan.faults:
        assert str(fault) in shown


def test_what_the_store_keeps_for_a_time_is_judged_by_its_own_clock(run: Run) -> None:
    # The claim ends with its time to live, in the moment in which the client's deadline ends the request.
    hasty = [request("r0", 0.6, max_tokens=200, timeout_s=0.08)]
    jumped = Fault(kind=FaultKind.CLOCK, at_s=0.3, target="store", amount=20.0)
    assert not run(story(cluster(), hasty, [jumped])).violations


def test_a_claim_that_has_expired_stays_gone_when_the_stores_clock_jumps_back(run: Run) -> None:
    # The claim expires before the router closes it, in a batch. Seed 101622 found it.
    hasty = [request("r0", 0.2, max_tokens=200, timeout_s=0.08)]
    jumped = Fault(kind=FaultKind.CLOCK, at_s=0.6, target="store", amount=-20.0)
    assert not run(story(cluster(), hasty, [jumped])).violations


def test_nothing_of_a_simulated_cluster_is_left_when_its_schedule_has_ended(tokenizer: ModelTokenizer) -> None:
    run_schedule(draw_plan(600_000, faults=True), tokenizer)
    left = [each for each in gc.get_objects() if type(each) in (SimulatedLoop, SimulatedProcess)]
    assert not left
