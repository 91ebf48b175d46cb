"""`kaveri plan --from-cluster`: the workload that was observed, the cluster that runs, and when to change it."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kaveri.domain.view import (
    BOTH_PHASES,
    ClusterView,
    InstanceLoad,
    InstanceRecord,
    InstanceState,
    InstanceStatus,
    Phase,
    Role,
)
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.planner.catalog import read_hardware, read_model_shape
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.planner.observed_workload import (
    LEAST_COUNT,
    MOST_BURSTINESS,
    ObservedWorkload,
    RouterSample,
    observed_workload,
)
from kaveri.planner.parallelism import Parallelism, kv_tokens
from kaveri.planner.plan import ClusterPlan, plan
from kaveri.planner.plan_question import PlanQuestion
from kaveri.planner.replan import Advice, Replan, replan_json, replan_lines, verdict
from kaveri.planner.running_cluster import (
    RunningCluster,
    RunningInstances,
    parse_tps,
    running_attainment,
    running_cluster,
)
from kaveri.workload.requests import RequestLengths, gamma_arrivals
from tests.library.planner import test_plan

A100 = read_hardware("a100-80g")
OPT_13B = read_model_shape("opt-13b")
LENGTHS = RequestLengths(300, 200)
LAYOUT = KvLayout(
    model_fingerprint="m", layer_count=2, block_tokens=16, kv_head_count=2, head_dim=8, dtype="float32", order="2NHD"
)


def sample_of(**changes: Any) -> RouterSample:
    values: dict[str, Any] = {
        "observed_s": 100.0,
        "arrived_ago_s": [float(number) for number in range(1, 41)],
        "answered": [(float(number), LENGTHS) for number in range(1, 31)],
        "cut_short_ago_s": [],
        "running": [],
    }
    return RouterSample(**{**values, **changes})


def question_of(**changes: Any) -> PlanQuestion:
    return test_plan.question_of(**{"prefill": Parallelism(1, 1), **changes})


def instances_of(count: int, tp: int = 1) -> RunningInstances:
    return RunningInstances(count=count, tp=tp, pool_tokens=kv_tokens(OPT_13B, A100, Parallelism(tp, 1)))


def apart(prefill: int, decode: int) -> RunningCluster:
    return RunningCluster(prefill=instances_of(prefill), decode=instances_of(decode))


def view_of(*some: tuple[str, Sequence[Phase], int], **load: Any) -> ClusterView:
    """some: id, phases and KV blocks of each instance."""
    statuses = {
        name: InstanceStatus(
            InstanceRecord(name, 1, Role.ENGINE, "127.0.0.1:1", "m", layout=LAYOUT, phases=tuple(phases)),
            InstanceLoad(total_blocks=blocks, **load),
        )
        for name, phases, blocks in some
    }
    return ClusterView(statuses)


def test_arrivals_and_lengths_count_for_the_time_that_every_router_has_observed() -> None:
    late = sample_of(observed_s=20.0, arrived_ago_s=[float(number) / 2 for number in range(1, 40)])
    observed = observed_workload([sample_of(), late], 600.0, 2048)
    assert (observed.period_s, observed.arrival_count) == (20.0, 20 + 39)
    assert observed.rate_per_s == pytest.approx(59 / 20)
    assert len(observed.lengths) == 2 * 20
    assert observed.router_count == 2


def test_what_is_older_than_asked_for_does_not_count() -> None:
    observed = observed_workload([sample_of()], 25.0, 2048)
    assert (observed.period_s, observed.arrival_count, len(observed.lengths)) == (25.0, 25, 25)


def test_requests_that_run_or_were_cut_short_are_counted_and_left_out() -> None:
    running = [RequestLengths(9, 700), RequestLengths(9, 3)]
    cut_short_ago_s = [5.0] * 10 + [700.0]
    observed = observed_workload([sample_of(running=running, cut_short_ago_s=cut_short_ago_s)], 600.0, 2048)
    assert set(observed.lengths) == {LENGTHS}
    assert (observed.running_count, observed.longest_running_tokens, observed.cut_short_count) == (2, 700, 10)
    assert observed.cut_short_share == 10 / 40


def test_answers_without_a_token_count_with_one_and_those_that_do_not_fit_are_left_out() -> None:
    answered = [(1.0, RequestLengths(9, 0))] * 20 + [(1.0, RequestLengths(2048, 1))] * 3
    observed = observed_workload([sample_of(answered=answered)], 600.0, 2048)
    assert observed.lengths == (RequestLengths(9, 1),) * 20
    assert observed.too_long_count == 3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rate_and_bursts_are_those_that_arrivals_were_drawn_with(burstiness: float) -> None:
    times_s = gamma_arrivals(4000, 5.0, burstiness, random.Random(1))
    ages_s = [times_s[-1] + 0.1 - time_s for time_s in times_s]
    random.Random(2).shuffle(ages_s)
    observed = observed_workload([sample_of(observed_s=times_s[-1] + 0.1, arrived_ago_s=ages_s)], 1e6, 2048)
    assert observed.rate_per_s == pytest.approx(5.0, rel=0.1)
    assert observed.burstiness == pytest.approx(burstiness, rel=0.2)
    assert observed.demand(None, None).burstiness == observed.burstiness
    assert observed.demand(7.0, 1.0) == ExpectedLoad(lengths=observed.lengths, rate_per_s=7.0, burstiness=1.0)


def test_a_pause_in_the_traffic_is_not_planned_for_as_bursts() -> None:
    rng = random.Random(3)
    before_s, after_s = gamma_arrivals(200, 3.0, 1.0, rng), gamma_arrivals(200, 3.0, 1.0, rng)
    ages_s = [time_s + 300 + before_s[-1] for time_s in after_s] + before_s
    observed = observed_workload([sample_of(observed_s=600.0, arrived_ago_s=ages_s)], 600.0, 2048)
    assert observed.burstiness > MOST_BURSTINESS
    with pytest.raises(ConfigError, match=r"with a gap of 300 s between two requests; above 10 .* --last-s, or give"):
        observed.demand(None, None)
    assert observed.demand(None, 1.0).rate_per_s == observed.rate_per_s
    without = observed_workload([sample_of(observed_s=600.0, arrived_ago_s=before_s)], before_s[-1], 2048)
    assert without.demand(None, None).burstiness == pytest.approx(1.0, rel=0.4)


def test_recorded_arrivals_are_those_of_all_routers_and_their_lengths_are_drawn() -> None:
    times_s = gamma_arrivals(100, 2.0, 4.0, random.Random(4))
    end_s = times_s[-1] + 30.0
    short = RequestLengths(9, 9)
    answered = [(1.0, LENGTHS)] * 20 + [(1.0, short)] * 20
    two_routers = [
        sample_of(observed_s=end_s, arrived_ago_s=[end_s - time_s for time_s in times_s[first::2]], answered=answered)
        for first in range(2)
    ]
    observed = observed_workload(two_routers, 600.0, 2048)
    demand = observed.recorded_demand(None, 0)
    assert demand.recorded_s == pytest.approx(times_s)
    assert demand.rate_per_s == pytest.approx(99 / (times_s[-1] - times_s[0]))
    assert set(demand.lengths) == {LENGTHS, short}
    assert observed.recorded_demand(7.0, 0) == dataclasses.replace(demand, rate_per_s=7.0)


def test_arrivals_at_one_time_cannot_be_recorded() -> None:
    observed = observed_workload([sample_of(arrived_ago_s=[5.0] * 30)], 600.0, 2048)
    with pytest.raises(ConfigError, match="--recorded: finds 30 requests at one time"):
        observed.recorded_demand(None, 0)


def test_even_arrivals_can_still_be_drawn() -> None:
    demand = observed_workload([sample_of()], 600.0, 2048).demand(None, None)
    assert demand.draw(30, 2.0, 0)[-1].arrival_s > 0


def test_too_few_requests_are_refused_with_their_number() -> None:
    few = [1.0] * (LEAST_COUNT - 1)
    with pytest.raises(ConfigError, match=r"--from-cluster: has seen 19 requests that arrived in the last 100 s; 20"):
        observed_workload([sample_of(arrived_ago_s=few)], 600.0, 2048)
    with pytest.raises(ConfigError, match=r"has seen 19 requests that were answered in the last 100 s"):
        observed_workload([sample_of(answered=[(one, LENGTHS) for one in few])], 600.0, 2048)
    with pytest.raises(ConfigError, match=r"has answered no request that fits into 100 tokens"):
        observed_workload([sample_of()], 600.0, 100)


def test_instances_are_counted_by_the_phases_that_they_serve_and_the_smallest_pool_counts() -> None:
    view = view_of(("p0", [Phase.PREFILL], 50), ("d0", [Phase.DECODE], 100), ("d1", [Phase.DECODE], 80), ("r", [], 0))
    found = running_cluster(view, "m", ())
    assert found.prefill == RunningInstances(count=1, tp=1, pool_tokens=50 * 16)
    assert found.decode == RunningInstances(count=2, tp=1, pool_tokens=80 * 16)
    assert (found.colocated, found.gpus, found.is_current) == (None, 3, True)
    assert not running_cluster(dataclasses.replace(view, store_connected=False), "m", ()).is_current
    assert running_cluster(view, "m", (2, 4)).gpus == 2 + 2 * 4
    assert running_cluster(view, "m", (2,)).gpus == 3 * 2


def test_the_layout_says_how_many_ranks_an_instance_has() -> None:
    view = view_of(("c0", BOTH_PHASES, 100), ("c1", BOTH_PHASES, 100))
    record = view.instances["c0"].record
    split = dataclasses.replace(record, layout=dataclasses.replace(LAYOUT, tensor_ranks=2))
    statuses = {name: InstanceStatus(split, status.load) for name, status in view.instances.items()}
    found = running_cluster(ClusterView(statuses), "m", ())
    assert found.colocated == RunningInstances(count=2, tp=2, pool_tokens=1600)
    assert found.counts == "2 of both phases x TP 2"
    unlike = ClusterView({**view.instances, "c0": statuses["c0"]})
    with pytest.raises(
        ConfigError, match=r"has instances of both phases with TP 1 and TP 2; only equal ones .* give --"
    ):
        running_cluster(unlike, "m", ())
    assert running_cluster(unlike, "m", (1,)).gpus == 2


def test_clusters_that_answer_nothing_or_are_mixed_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="has no decode instance that takes requests for m"):
        running_cluster(view_of(("p0", [Phase.PREFILL], 50)), "m", ())
    draining = view_of(("p0", [Phase.PREFILL], 1), ("d0", [Phase.DECODE], 1), state=InstanceState.DRAINING)
    with pytest.raises(ConfigError, match="has no prefill instance that takes requests"):
        running_cluster(draining, "m", ())
    mixed = view_of(("p0", [Phase.PREFILL], 1), ("d0", [Phase.DECODE], 1), ("c0", BOTH_PHASES, 1))
    with pytest.raises(ConfigError, match="has 1 prefill, 1 decode instances and 1 of both phases"):
        running_cluster(mixed, "m", ())


@pytest.mark.parametrize("text", ["x", "0", "1,2,3", "2,"])
def test_degrees_of_parallelism_are_one_or_two_numbers_above_zero(text: str) -> None:
    with pytest.raises(ConfigError, match="--running-tp"):
        parse_tps(text)


def test_a_degree_that_the_model_cannot_have_is_refused() -> None:
    running = RunningCluster(prefill=instances_of(1), decode=instances_of(1, tp=3))
    with pytest.raises(ConfigError, match=r"--running-tp: is 3,1: TP must divide the 40 heads"):
        running_attainment(question_of(), running)


def test_a_stage_of_a_pipeline_that_runs_needs_no_room_for_the_whole_model() -> None:
    small = question_of(hardware=dataclasses.replace(A100, memory_bytes=20 * 10**9))
    stages = RunningInstances(count=2, tp=1, pool_tokens=20_000)
    assert running_attainment(small, RunningCluster(prefill=stages, decode=stages)).mean > 0.5
    unknown = dataclasses.replace(stages, pool_tokens=0)
    with pytest.raises(ConfigError, match="--running-tp: is 1,1: 1 GPUs of a100-80g leave no room for the weights"):
        running_attainment(small, RunningCluster(prefill=stages, decode=unknown))


def test_links_within_machines_count_for_what_runs_as_for_the_plan() -> None:
    slow = dataclasses.replace(A100, link_between_nodes=1e6)
    running = apart(5, 5)
    assert running.gpus > slow.gpus_per_node
    assert running_attainment(question_of(hardware=slow), running).high < 0.9
    assert running_attainment(question_of(hardware=slow, same_node=True), running).low > 0.9


@pytest.fixture(scope="module")
def found() -> ClusterPlan:
    return plan(question_of())


@pytest.fixture(scope="module")
def observed() -> ObservedWorkload:
    return observed_workload([sample_of()], 600.0, 2048)


def compared(found: ClusterPlan, observed: ObservedWorkload, running: RunningCluster) -> Replan:
    attainment = running_attainment(found.question, running)
    return Replan(observed=observed, running=running, attainment=attainment, plan=found)


def test_a_cluster_that_runs_as_planned_is_judged_as_the_plan_and_kept(
    found: ClusterPlan, observed: ObservedWorkload
) -> None:
    both = compared(found, observed, apart(found.cluster.prefill_count, found.cluster.decode_count))
    assert both.attainment == found.attainment
    assert both.advice is Advice.KEEP
    assert "what runs meets 90%" in both.reason
    lines = replan_lines(both)
    assert lines[-1].startswith("keep: ")
    assert not any("store" in line for line in lines)
    away = dataclasses.replace(both, running=dataclasses.replace(both.running, is_current=False))
    assert "the cluster's store cannot be reached: instances that have died since are counted too" in replan_lines(away)


def test_instances_of_both_phases_are_judged_as_the_plan_judges_them(observed: ObservedWorkload) -> None:
    question = question_of(prefill=None, decode=None, gpus=2, ttft_s=1.0)
    both = compared(plan(question), observed, RunningCluster(colocated=instances_of(1)))
    assert both.plan.colocated is not None
    assert both.attainment == both.plan.colocated.attainment
    assert (both.fewest_gpus, both.advice) == (1, Advice.KEEP)


def test_a_cluster_with_more_gpus_than_are_needed_is_to_change(found: ClusterPlan, observed: ObservedWorkload) -> None:
    needed = found.cluster.gpus
    both = compared(found, observed, apart(found.cluster.prefill_count + 2, found.cluster.decode_count))
    assert both.attainment.low >= 0.9
    assert both.advice is Advice.CHANGE
    assert f"{needed} GPUs are enough, and {needed + 2} run: 9.26 USD an hour less" in both.reason
    document = replan_json(both)
    assert (document["advice"], document["running"]["gpus"]) == ("change", needed + 2)
    assert document["gpus"] == needed
    assert document["observed"]["arrivals"] == 40


def test_a_cluster_is_changed_when_it_is_shown_to_miss_and_kept_when_it_is_not_shown(
    found: ClusterPlan, observed: ObservedWorkload
) -> None:
    def advice(low: float, high: float) -> tuple[Advice, str]:
        shown = dataclasses.replace(found.attainment, mean=(low + high) / 2, low=low, high=high)
        running = apart(found.cluster.prefill_count, found.cluster.decode_count)
        both = Replan(observed=observed, running=running, attainment=shown, plan=found)
        return both.advice, both.reason

    assert advice(0.5, 0.89)[0] is Advice.CHANGE
    assert "what runs misses 90%" in advice(0.5, 0.89)[1]
    assert advice(0.85, 0.95)[0] is Advice.KEEP
    assert "neither met nor missed" in advice(0.85, 0.95)[1]
    assert verdict(dataclasses.replace(found.attainment, low=0.95, high=1.0), 0.9) == "what runs meets 90%"


def test_a_cluster_that_is_too_small_is_shown_to_miss() -> None:
    question = question_of(demand=ExpectedLoad(lengths=[LENGTHS], rate_per_s=12.0), tpot_s=0.04)
    assert running_attainment(question, apart(1, 1)).high < 0.9
