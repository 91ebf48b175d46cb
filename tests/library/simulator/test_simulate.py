"""Simulated clusters: what is conserved, what they share with the services, what they refuse."""

import gc
import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kaveri.errors import ConfigError
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.latency.model import load_latency_model
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.levelling import queue_surplus
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import Candidates, DecodePlacementPolicy, PlacementPolicy, choose_prefill
from kaveri.policy.prompt_queue import prompt_fits
from kaveri.policy.room_search import RoomSearch
from kaveri.simulator import colocated, prefill, router
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import baseline_of, simulate_baseline
from kaveri.simulator.failures import Death, FailureSpec
from kaveri.simulator.report import report_of, requests_of, rows
from kaveri.simulator.simulate import Simulation, simulate
from kaveri.simulator.spec import ClusterSpec, CopySpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec, RouterSpec
from kaveri.simulator.table import RunTable
from kaveri.workload.requests import (
    PlannedRequest,
    RequestLengths,
    WorkloadClass,
    draw_lengths,
    gamma_arrivals,
    plan_requests,
)
from kaveri.workload.run_columns import RunColumns
from kaveri.workload.summary import Slo
from services.instance import service
from services.prefill import decode_placer
from services.router import request_placer
from services.router.recovery import losses
from tests.support.conservation import check_conservation

LATENCY = load_latency_model("opt-13b-a100-tp2")
NO_OTHERS = {"prefill_count": 0, "decode_count": 0, "colocated_count": 1}


def spec_of(total_blocks: int = 9000, **changes: Any) -> ClusterSpec:
    pool = PoolSpec(latency=LATENCY, total_blocks=total_blocks, max_model_len=min(4096, total_blocks * 16))
    spec = ClusterSpec(
        prefill_count=2, decode_count=2, prefill=PrefillSpec(engine=pool), decode=DecodeSpec(engine=pool)
    )
    return replace(spec, **changes)


def poisson(count: int, rate_per_s: float, seed: int = 1) -> list[PlannedRequest]:
    rng = random.Random(seed)
    lengths = draw_lengths(WorkloadClass.MIXED, count, rng, 1024, 512)
    return plan_requests(lengths, gamma_arrivals(count, rate_per_s, 1.0, rng))


def run_whole(spec: ClusterSpec, requests: list[PlannedRequest], concurrency: int | None = None) -> Simulation:
    """Run a simulation in which every request must be answered; check that tokens and blocks are conserved."""
    simulation = Simulation(spec, requests, concurrency)
    run = simulation.run().columns()
    check_conservation(simulation)
    assert run.answered.all()
    assert (run.tokens.received == run.tokens.planned).all(), "tokens drawn are not those asked for"
    assert (run.first_s >= run.due_s).all()
    assert (run.last_s >= run.first_s).all()
    drawn_after_another = int(run.tokens.planned.sum()) - len(requests)
    assert np.isfinite(run.gaps.seconds).all()
    assert int(run.gaps.counts.sum()) == drawn_after_another
    return simulation


def decoder_of(run: RunColumns, number: int = 0) -> str:
    return run.placements.instance_ids[int(run.placements.decode[number])]


def colocated_of(total_blocks: int = 9000, **changes: Any) -> ClusterSpec:
    return spec_of(total_blocks, **{"prefill_count": 0, "decode_count": 0, "colocated_count": 2, **changes})


@pytest.mark.parametrize("is_both", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_and_every_block_comes_free(seed: int, is_both: bool) -> None:
    rng = random.Random(seed)
    pool = PoolSpec(
        latency=LATENCY,
        total_blocks=rng.choice((110, 300, 9000)),
        chunk_tokens=rng.choice((64, 512)),
        max_batch=rng.choice((4, 64)),
        max_model_len=1600,
    )
    counts = rng.randrange(1, 4), rng.randrange(1, 4)
    spec = ClusterSpec(
        prefill_count=0 if is_both else counts[0],
        decode_count=0 if is_both else counts[1],
        colocated_count=counts[0] if is_both else 0,
        prefill=PrefillSpec(
            engine=pool,
            max_queue=rng.choice((3, 256)),
            prefill_policy=rng.choice(list(OrderingPolicy)),
            decode_placement=rng.choice(list(DecodePlacementPolicy)),
        ),
        decode=DecodeSpec(engine=pool, decode_policy=rng.choice(list(AdmissionPolicy))),
        router=RouterSpec(placement_policy=rng.choice(list(PlacementPolicy)), lengths_known=rng.random() < 0.7),
        link=parse_link_speed("10Gbps,50us,800KiB/token") if rng.random() < 0.5 else None,
        overheads=Overheads(hop_s=0.002, decode_step_s=0.001) if rng.random() < 0.5 else Overheads(),
        seed=seed,
    )
    run = run_whole(spec, poisson(80, rng.choice((3.0, 40.0)), seed)).table.columns()
    if is_both:
        with_more = run.tokens.planned > 1
        assert (run.placements.decode == run.placements.prefill)[with_more].all()
        assert (run.server["kv_tail_s"] == 0).all()


def test_a_lone_request_takes_the_same_time_on_an_instance_of_both_phases() -> None:
    one = [PlannedRequest(0, 0.0, RequestLengths(300, 50))]
    apart, both = (simulate(spec, one).columns() for spec in (spec_of(), colocated_of()))
    assert both.first_s == pytest.approx(apart.first_s)
    assert both.last_s == pytest.approx(apart.last_s)


def test_an_instance_of_both_phases_works_like_the_baseline_with_chunks_beside_its_batch() -> None:
    requests = poisson(200, 6.0)
    spec = colocated_of(colocated_count=1)
    ours = simulate(spec, requests).columns()
    theirs = simulate_baseline(baseline_of(spec, BaselineRule.BESIDE), requests, 1).columns()
    # A request joins the batch with the step after the next one; the baseline's with the next one.
    for figure in ("ttft_s", "jct_s"):
        assert np.mean(getattr(ours, figure)()) == pytest.approx(np.mean(getattr(theirs, figure)()), rel=0.05)
    assert ours.duration_s == pytest.approx(theirs.duration_s, rel=0.02)


def test_the_load_of_an_instance_of_both_phases_counts_what_decodes_there() -> None:
    requests = [PlannedRequest(0, 0.0, RequestLengths(300, 200)), PlannedRequest(1, 0.0, RequestLengths(200, 200))]
    simulation = Simulation(colocated_of(colocated_count=1), requests)
    member = simulation.prefills["colocated-0"].member
    shown = []
    simulation.timeline.at(1.0, lambda _: shown.append(member.load), None)
    simulation.run()
    (load,) = shown
    assert (load.running_requests, load.waiting_requests, load.queued_prefill_tokens) == (2, 0, 0)
    assert load.context_tokens > 500
    assert load.free_blocks < load.total_blocks


def test_prompts_wait_for_what_the_admission_policy_keeps_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fits(token_count: int, computing: Any, kept_blocks: int, free_blocks: int, block_tokens: int) -> bool:
        asked.append(kept_blocks)
        return prompt_fits(token_count, computing, kept_blocks, free_blocks, block_tokens)

    monkeypatch.setattr(colocated, "prompt_fits", fits)
    run_whole(
        colocated_of(120, decode=replace(spec_of(120).decode, decode_policy=AdmissionPolicy.RESERVE_STATIC)),
        poisson(40, 20.0),
    )
    assert max(asked) > 0
    assert service.prompt_fits is prompt_fits, "the services' own function"


def test_a_closed_loop_has_no_more_requests_at_once_than_asked_for() -> None:
    run = run_whole(spec_of(), poisson(60, 1.0), concurrency=3).table.columns()
    for due_s in run.due_s:
        assert ((run.due_s <= due_s) & (run.last_s > due_s)).sum() <= 3


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    requests = poisson(80, 20.0)

    def report(seed: int) -> str:
        about: dict[str, Any] = {"model": "m", "seed": seed, "rate_per_s": 20.0, "lengths_known": True, "too_long": 0}
        tables = [simulate(spec_of(seed=seed), requests)]
        return json.dumps(report_of(tables, Slo(1.0, 0.1), {}, **about, all_rows=True))

    assert report(1) == report(1)
    assert report(1).replace('"seed": 1', "") != report(2).replace('"seed": 2', "")


def test_a_run_leaves_no_cycles_of_objects() -> None:
    """The garbage collector is off during a run."""
    simulation = Simulation(spec_of(), poisson(200, 20.0))
    gc.collect()
    simulation.run()
    assert gc.collect() < 200
    assert gc.isenabled()


def test_a_request_that_lost_its_blocks_gets_those_of_one_that_lands_later() -> None:
    pool = PoolSpec(latency=LATENCY, total_blocks=110, chunk_tokens=64, max_batch=4, max_model_len=1600)
    spec = ClusterSpec(
        prefill_count=2,
        decode_count=3,
        prefill=PrefillSpec(engine=pool, max_queue=3, prefill_policy=OrderingPolicy.SJF),
        decode=DecodeSpec(engine=pool, decode_policy=AdmissionPolicy.RESERVE_DYNAMIC),
        link=parse_link_speed("10Gbps,50us,800KiB/token"),
        router=RouterSpec(lengths_known=False),
        seed=32,
    )
    run_whole(spec, poisson(80, 40.0, 32))


def test_a_lone_request_takes_what_the_latency_model_says() -> None:
    run = run_whole(spec_of(), [PlannedRequest(0, 1.0, RequestLengths(600, 3))]).table.columns()
    chunks_s = LATENCY.step_s([(0, 512)]) + LATENCY.step_s([(512, 88)])
    steps_s = LATENCY.step_s([(600, 1)]) + LATENCY.step_s([(601, 1)])
    assert run.ttft_s()[0] == pytest.approx(chunks_s)
    assert run.jct_s()[0] == pytest.approx(chunks_s + steps_s)
    assert run.tpot_s()[0] == pytest.approx(steps_s / 2)


def test_a_push_that_is_slower_than_prefill_delays_the_second_token_only() -> None:
    link = parse_link_speed("1Gbps,1ms,1MiB/token")
    request = [PlannedRequest(0, 0.0, RequestLengths(500, 2))]
    spec = spec_of(link=link)
    run = run_whole(replace(spec, prefill=replace(spec.prefill, layer_count=40)), request).table.columns()
    prefill_s, link_s = LATENCY.step_s([(0, 500)]), 500 * 2**20 * 8 / 1e9
    assert run.ttft_s()[0] == pytest.approx(prefill_s)
    # The first layer's KV can be sent when that layer is computed.
    arrives_s = prefill_s / 40 + link_s + 0.001
    assert run.jct_s()[0] == pytest.approx(arrives_s + LATENCY.step_s([(500, 1)]))


def test_overheads_are_paid_at_every_hop_and_step() -> None:
    request = [PlannedRequest(0, 0.0, RequestLengths(100, 3))]
    plain = run_whole(spec_of(), request).table.columns()
    costs = Overheads(hop_s=0.001, prefill_step_s=0.01, decode_step_s=0.002, push_tail_s=0.005)
    run = run_whole(spec_of(overheads=costs), request).table.columns()
    # To the router, to prefill, and the token's way back.
    assert run.ttft_s()[0] - plain.ttft_s()[0] == pytest.approx(4 * 0.001 + 0.01)
    assert run.jct_s()[0] - plain.jct_s()[0] == pytest.approx(4 * 0.001 + 0.01 + 0.005 + 2 * 0.002)


def test_services_and_simulator_call_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert router.choose_prefill is request_placer.choose_prefill is choose_prefill  # type: ignore[attr-defined]
    assert router.after_setback is losses.after_setback  # type: ignore[attr-defined]
    assert prefill.RoomSearch is decode_placer.RoomSearch is RoomSearch  # type: ignore[attr-defined]
    requests = poisson(40, 20.0)

    def places(spec: ClusterSpec) -> tuple[set[int], set[int]]:
        run = simulate(spec, requests).columns()
        return set(run.placements.prefill.tolist()), set(run.placements.decode.tolist())

    before = places(spec_of())
    assert [len(found) for found in before] == [2, 2]

    def first_one(self: Candidates, *_: object) -> object:
        return self.first()

    assert prefill.queue_surplus is service.queue_surplus is queue_surplus  # type: ignore[attr-defined]
    monkeypatch.setattr(Candidates, "better_of_two", first_one)
    monkeypatch.setattr(prefill, "queue_surplus", lambda *_: 0)
    assert places(spec_of()) == ({0}, {2})


def test_a_request_that_fits_nowhere_fails_alone() -> None:
    requests = [PlannedRequest(0, 0.0, RequestLengths(5000, 10)), PlannedRequest(1, 0.0, RequestLengths(50, 10))]
    table = simulate(spec_of(), requests)
    failed, answered = rows(table)
    assert (failed["error"], answered["error"]) == ("InvalidArgument", None)
    assert "5000 + 10 tokens" in failed["reason"]
    assert failed["ttft_s"] is None


def test_the_requests_of_a_measured_run_are_simulated_at_their_times() -> None:
    table: RunTable = simulate(spec_of(), poisson(20, 5.0))
    again = requests_of({"rows": list(rows(table))})
    assert [(one.arrival_s, one.lengths) for one in again] == [(one.arrival_s, one.lengths) for one in poisson(20, 5.0)]


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"decode_count": 0}, "decode", "is 0"),
        ({"router": RouterSpec(monitor_interval_s=float("nan"))}, "monitor_interval_s", "nan"),
        (
            {"failures": FailureSpec(deaths=(Death(instance_id="decode-7", at_s=1.0),))},
            "fail",
            "names 'decode-7'; there are prefill-0",
        ),
        ({"prefill": PrefillSpec(engine=PoolSpec(latency=LATENCY), layer_count=0)}, "layer_count", "at least 1"),
        ({"colocated_count": 1}, "prefill", "is 2; beside instances of both phases there are no others"),
        (
            {**NO_OTHERS, "decode": DecodeSpec(engine=PoolSpec(latency=LATENCY, max_batch=3))},
            "colocated",
            "has two engines",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_limit(changes: dict[str, Any], name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of(**changes)
    assert error.value.field == name
    assert reason in error.value.reason


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        (CopySpec, {"replica_blocks": 0}, "replica_blocks: is 0; it must be a number of at least 1"),
        (CopySpec, {"replica_min_tokens": 0}, "replica_min_tokens: is 0"),
        (CopySpec, {"blocks_per_s": math.nan}, "blocks_per_s: is nan"),
        (CopySpec, {"orphan_grace_s": -1.0}, "orphan_grace_s: is -1.0"),
        (FailureSpec, {"mtbf_s": 0.0}, "mtbf: is 0.0"),
        (FailureSpec, {"mtbf_s": math.nan}, "mtbf: is nan"),
        (FailureSpec, {"repair_s": -1.0}, "repair: is -1.0"),
    ],
)
def test_parts_of_a_spec_refuse_what_cannot_be(kind: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(**given)


def test_requests_must_come_in_order_and_there_must_be_one() -> None:
    late_first = [PlannedRequest(0, 2.0, RequestLengths(5, 5)), PlannedRequest(1, 1.0, RequestLengths(5, 5))]
    with pytest.raises(ConfigError, match="before the one in front of it"):
        simulate(spec_of(), late_first)
    with pytest.raises(ConfigError, match="at least 1"):
        simulate(spec_of(), [])
