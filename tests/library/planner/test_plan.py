"""`kaveri plan`: what fits, what is searched, what the plan promises, and what is refused."""

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kaveri.errors import ConfigError
from kaveri.latency.model import load_latency_model
from kaveri.planner.catalog import read_hardware, read_model_shape
from kaveri.planner.colocation import cheapest_colocated
from kaveri.planner.decode_phase import NO_TIME, Verdict, judge_decode, lane_pool
from kaveri.planner.expected_load import ExpectedLoad, parse_lengths
from kaveri.planner.node_unit import cheapest_unit
from kaveri.planner.parallelism import Parallelism, kv_tokens, parse_parallelism, possible_parallelisms
from kaveri.planner.placement_search import PhaseOption
from kaveri.planner.plan import ClusterPlan, SimulatedCluster, best_per_gpu, frontier, plan, search_each
from kaveri.planner.plan_file import summary_lines, to_json, to_toml
from kaveri.planner.plan_question import InstanceLimits, PlanQuestion, SimulationSettings, SloTarget
from kaveri.planner.prefill_phase import prefill_ends
from kaveri.planner.profiles import read_step_latencies, scaled_to_degree, scaled_to_model
from kaveri.policy.replication import ReplicationMode
from kaveri.programs import setting_sections
from kaveri.simulator.failures import FailureSpec
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec
from kaveri.simulator.spec_file import read_spec
from kaveri.workload.requests import PlannedRequest, RequestLengths, gamma_arrivals, plan_requests
from kaveri.workload.summary import Slo
from tests.library.planner.paper_equations import average_ttft_inter_op_s

A100 = read_hardware("a100-80g")
OPT_13B = read_model_shape("opt-13b")
TP2 = load_latency_model("opt-13b-a100-tp2")


def question_of(**changes: Any) -> PlanQuestion:
    values: dict[str, Any] = {
        "model": OPT_13B,
        "hardware": A100,
        "profiles": ["opt-13b-a100"],
        "gpus": 8,
        "ttft_s": 0.25,
        "tpot_s": 0.1,
        "attain": 0.9,
        "demand": ExpectedLoad(lengths=[RequestLengths(300, 200), RequestLengths(600, 150)], rate_per_s=2.0),
        "prefill": Parallelism(2, 1),
        "decode": Parallelism(1, 1),
        "request_count": 120,
    }
    values |= changes
    parts = {"target": SloTarget, "limits": InstanceLimits, "simulations": SimulationSettings}
    for name, kind in parts.items():
        given = [entry.name for entry in dataclasses.fields(kind) if entry.name in values]
        values[name] = kind(**{field: values.pop(field) for field in given})
    return PlanQuestion(**values)


@pytest.fixture(scope="module")
def found() -> ClusterPlan:
    return plan(question_of())


@pytest.mark.parametrize(
    ("model", "tp", "pp", "tokens"),
    [
        ("opt-13b", 1, 1, 66_144),
        ("opt-13b", 2, 1, 163_008),
        ("opt-66b", 4, 1, 78_496),
        ("opt-66b", 2, 2, 78_512),
        ("opt-175b", 3, 3, 76_192),
    ],
)
def test_as_many_tokens_fit_as_distserve_counted(model: str, tp: int, pp: int, tokens: int) -> None:
    """LLMServe/DistServe at 82831f1, simdistserve/estimators/profile_data/max_num_tokens.csv."""
    ours = kv_tokens(read_model_shape(model), A100, Parallelism(tp, pp))
    assert ours == pytest.approx(tokens, rel=0.02)


def test_only_what_divides_the_model_and_fits_is_tried() -> None:
    shape = read_model_shape("opt-66b")
    found = possible_parallelisms(shape, A100, 8)
    assert Parallelism(1, 1) not in found, "132 GB do not fit into 80 GB"
    assert Parallelism(5, 1) not in found, "5 does not divide 72 heads"
    assert Parallelism(2, 3) not in found, "3 does not divide 64 layers"
    assert {Parallelism(2, 1), Parallelism(2, 2), Parallelism(4, 1), Parallelism(8, 1)} <= set(found)


@pytest.mark.parametrize(("busy", "stages"), [(0.3, 1), (0.6, 1), (0.6, 2)])
def test_a_prefill_instance_is_the_queue_of_the_papers_equations(busy: float, stages: int) -> None:
    """DistServe, section 3.1, equations 1 and 2: prompts of one length, one in a step."""
    tokens = 512
    service_s = TP2.step_s([(0, tokens)])
    rate = busy * stages / service_s
    arrivals = gamma_arrivals(500_000, rate, 1.0, random.Random(3))
    times_s = _queue_times_s(arrivals, service_s, stages)
    # Request by request it is the queue, and so many requests of the queue have the mean of the equations.
    first = arrivals[:2_000]
    requests = plan_requests([RequestLengths(tokens, 1)] * len(first), first)
    ours = [end_s - request.arrival_s for request, end_s in prefill_ends(requests, TP2, stages, tokens)]
    assert ours == pytest.approx(times_s[: len(first)], abs=1e-9)
    assert sum(times_s) / len(times_s) == pytest.approx(average_ttft_inter_op_s(rate, service_s, stages), rel=0.01)


def _queue_times_s(arrivals: Sequence[float], service_s: float, stages: int) -> list[float]:
    """Seconds from each arrival to its end, in a queue with one server (Lindley's recursion)."""
    times_s, free_s = [], 0.0
    for arrival_s in arrivals:
        begins_s = max(arrival_s, free_s)
        free_s = begins_s + service_s / stages
        times_s.append(begins_s + service_s - arrival_s)
    return times_s


@pytest.mark.parametrize("seed", range(4))
def test_a_prefill_instance_by_itself_is_that_of_the_simulated_cluster(seed: int) -> None:
    rng = random.Random(seed)
    chunk_tokens = rng.choice((128, 512, 1024))
    requests = random_requests(rng, 80, rate_per_s=rng.uniform(4, 14))
    decode = PoolSpec(latency=TP2, total_blocks=1 << 20, max_batch=1000)
    prefill = PoolSpec(latency=TP2, total_blocks=1 << 20, chunk_tokens=chunk_tokens)
    spec = ClusterSpec(
        prefill_count=1, decode_count=1, prefill=PrefillSpec(engine=prefill), decode=DecodeSpec(engine=decode)
    )
    run = Simulation(spec, requests).run().columns()
    alone = {request.number: end_s for request, end_s in prefill_ends(requests, TP2, 1, chunk_tokens)}
    assert [alone[number] for number in range(len(requests))] == pytest.approx(run.first_s.tolist(), abs=1e-9)


def test_a_pipeline_of_stages_takes_as_long_alone_and_more_at_once() -> None:
    requests = [PlannedRequest(number, 0.0, RequestLengths(512, 1)) for number in range(8)]
    one, four = ([end_s for _, end_s in prefill_ends(requests, TP2, stages, 512)] for stages in (1, 4))
    assert four[0] == pytest.approx(one[0])
    assert four[-1] == pytest.approx(one[0] * (1 + 7 / 4))


@pytest.mark.parametrize("seed", range(4))
def test_a_verdict_that_stops_early_is_that_of_the_whole_run(seed: int) -> None:
    rng = random.Random(seed)
    lanes = rng.choice((1, 2))
    requests = random_requests(rng, 80, rate_per_s=rng.uniform(2, 60))
    pool = lane_pool(TP2, 20_000, lanes, 512, 64, 2048)
    tpot_s, target = rng.uniform(0.014, 0.03), 0.9
    verdict = judge_decode(requests, pool, lanes, tpot_s, target)
    spec = ClusterSpec(
        prefill_count=1,
        decode_count=lanes,
        prefill=PrefillSpec(
            engine=PoolSpec(latency=NO_TIME, total_blocks=1 << 40, chunk_tokens=1 << 30, max_model_len=2048),
            max_queue=80,
        ),
        decode=DecodeSpec(engine=pool),
    )
    met = Slo(tpot_s=tpot_s).met(Simulation(spec, requests).run().columns())
    assert verdict.holds == (met.sum() >= target * len(requests) - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_certain_stays_so(seed: int) -> None:
    rng = random.Random(seed)
    outcomes = [rng.random() < 0.85 for _ in range(rng.randrange(1, 60))]
    target = rng.choice((0.5, 0.9, 0.99))
    verdict, early = Verdict(len(outcomes), target), None
    for met in outcomes:
        verdict.note(met)
        if verdict.is_certain and early is None:
            early = verdict.holds
    assert verdict.is_certain
    assert early == verdict.holds == (sum(outcomes) >= target * len(outcomes) - 1e-9)


def test_an_estimate_of_what_was_measured_is_the_measurement() -> None:
    same = scaled_to_degree(scaled_to_model(TP2, OPT_13B, OPT_13B), 2, 2)
    assert same.prefill == TP2.prefill
    assert same.decode == TP2.decode
    assert "not measured" in same.source


def test_degrees_that_were_not_profiled_are_marked_as_estimates() -> None:
    steps = read_step_latencies(["opt-66b-a100"], read_model_shape("opt-175b"), A100, [3, 6])
    assert steps[3].is_estimate
    assert steps[6].latency.prefill.token_s < steps[3].latency.prefill.token_s
    own = read_step_latencies(["opt-13b-a100"], OPT_13B, A100, [2])
    assert not own[2].is_estimate
    assert own[2].latency == TP2


def test_the_plan_serves_the_rate_within_its_slos(found: ClusterPlan) -> None:
    assert found.attainment.low >= 0.9, "the mean alone is not enough"
    assert found.attainment.slo_scale is not None
    assert found.attainment.slo_scale <= 1.0
    assert found.attainment.low <= found.attainment.mean <= found.attainment.high
    assert found.cluster.gpus <= 8
    assert found.cluster.prefill_count * found.cluster.prefill.goodput_per_s >= 2.0
    assert not found.is_estimate
    assert found.colocated is None, "phases that were asked for apart stay apart"


def test_the_file_of_a_plan_is_the_cluster_that_was_planned(found: ClusterPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(found, {}))
    spec = read_spec(path, setting_sections()).spec
    spec = dataclasses.replace(spec, prefill=dataclasses.replace(spec.prefill, layer_count=OPT_13B.layers))
    planned = found.cluster.spec(0, spec.failures)
    assert dataclasses.replace(spec, link=None) == dataclasses.replace(planned, link=None)
    assert spec.link is not None
    assert planned.link is not None
    assert spec.link.bytes_per_s == pytest.approx(planned.link.bytes_per_s)
    assert spec.link.token_bytes == planned.link.token_bytes


def test_of_equal_options_the_one_of_fewest_gpus_is_taken(found: ClusterPlan) -> None:
    option = found.cluster.prefill

    def of(tp: int, per_gpu: float) -> PhaseOption:
        return dataclasses.replace(option, parallelism=Parallelism(tp, 1), goodput_per_s=tp * per_gpu)

    assert best_per_gpu([of(4, 5.1), of(2, 5.0), of(1, 4.0)]).parallelism.tp == 2
    assert best_per_gpu([of(4, 5.9), of(2, 5.0), of(1, 4.0)]).parallelism.tp == 4


def test_the_frontier_begins_with_the_cheapest_and_rises(found: ClusterPlan) -> None:
    gpus = [one.cluster.gpus for one in found.frontier]
    lows = [one.attainment.low for one in found.frontier]
    assert gpus == sorted(set(gpus))
    assert lows == sorted(set(lows))
    cheap = SimulatedCluster(cluster=found.cluster, attainment=found.attainment)
    dear = dataclasses.replace(found.cluster, decode_count=found.cluster.decode_count + 1)
    for low, length in ((0.5, 1), (found.attainment.low, 1), (1.1, 2)):
        attainment = dataclasses.replace(found.attainment, low=low)
        assert len(frontier([SimulatedCluster(cluster=dear, attainment=attainment), cheap])) == length


def configured(option: PhaseOption, tp: int, pp: int, goodput: float) -> PhaseOption:
    return dataclasses.replace(option, parallelism=Parallelism(tp, pp), goodput_per_s=goodput)


def test_a_unit_is_the_cheapest_whose_segments_fit_into_its_machines(found: ClusterPlan) -> None:
    prefill = [configured(found.cluster.prefill, 2, 1, 6.0), configured(found.cluster.prefill, 8, 1, 60.0)]
    decode = [configured(found.cluster.decode, 1, 1, 2.0), configured(found.cluster.decode, 1, 4, 50.0)]
    unit = cheapest_unit(prefill, decode[:1], 6.0, A100)
    assert (unit.prefill_count, unit.decode_count, unit.gpus, unit.machines) == (1, 3, 5, 1)
    assert (unit.prefill.parallelism, unit.decode.parallelism) == (Parallelism(2, 1), Parallelism(1, 1))
    assert unit.count(12.0) == 2
    with pytest.raises(ConfigError, match="--same-node: is given; no prefill and decode instance"):
        cheapest_unit(prefill[1:], decode, 6.0, A100)


@pytest.mark.parametrize(
    ("prefill", "decode", "machines"),
    [
        # Table 3's placements of OPT-66B and OPT-175B: unlike PP in one machine, unlike TP in three.
        ((4, 1), (2, 2), 1),
        ((3, 3), (4, 3), 3),
        ((2, 4), (1, 6), 2),
        # Parts of both would need 9 GPUs of one machine, or a machine would hold half a stage.
        ((3, 3), (6, 3), None),
        ((4, 2), (4, 3), None),
    ],
)
def test_phases_of_a_unit_have_a_common_number_of_machines_and_their_own_tp_and_pp(
    found: ClusterPlan, prefill: tuple[int, int], decode: tuple[int, int], machines: int | None
) -> None:
    options = [configured(found.cluster.prefill, *prefill, 1.0)], [configured(found.cluster.decode, *decode, 1.0)]
    if machines is None:
        with pytest.raises(ConfigError, match="--same-node"):
            cheapest_unit(*options, 1.0, A100)
        return
    unit = cheapest_unit(*options, 1.0, A100)
    assert (unit.machines, unit.prefill_count, unit.decode_count) == (machines, 1, 1)


def test_no_instance_is_tried_that_is_larger_than_a_cluster_that_carries_the_rate(found: ClusterPlan) -> None:
    tried: list[int] = []

    def search_one(parallelism: Parallelism) -> PhaseOption:
        tried.append(parallelism.gpus)
        goodput = 0.0 if parallelism.gpus == 1 else 0.5 * parallelism.gpus
        return dataclasses.replace(found.cluster.prefill, parallelism=parallelism, goodput_per_s=goodput)

    candidates = [Parallelism(tp, 1) for tp in (1, 2, 4, 8)]
    options = search_each(question_of(), candidates, search_one)
    assert tried == [1, 2, 4], "four GPUs carry 2 requests/s"
    assert best_per_gpu(options).parallelism.gpus == 2
    tried.clear()
    search_each(question_of(same_node=True), candidates, search_one)
    assert tried == [1, 2, 4, 8]


def test_colocate_is_the_answer_where_instances_of_both_phases_need_fewer_gpus() -> None:
    small = {"prefill": None, "decode": None, "gpus": 2, "ttft_s": 1.0}
    loose = plan(question_of(**small))
    assert loose.colocated is not None
    assert loose.colocated.gpus == 1 < loose.cluster.gpus
    assert loose.colocated.attainment.low >= 0.9
    assert any(line.startswith("colocate: 1 of both phases x (TP 1, PP 1)") for line in summary_lines(loose))
    assert to_json(loose)["colocated"]["gpus"] == 1


def test_instances_of_both_phases_are_no_answer_where_prompts_hold_answers_up_for_too_long() -> None:
    demand = ExpectedLoad(lengths=[RequestLengths(1500, 100)], rate_per_s=0.3)
    loose: dict[str, Any] = {"demand": demand, "ttft_s": 1.0, "request_count": 100}
    assert cheapest_colocated(question_of(**loose), 1) is not None
    assert cheapest_colocated(question_of(**loose), 0) is None, "no GPU, no instance"
    for dear in ({"tpot_s": 0.0215}, {"overheads": Overheads(decode_step_s=0.1)}, {"overheads": Overheads(hop_s=0.25)}):
        assert cheapest_colocated(question_of(**loose, **dear), 1) is None, "steps and messages take too long"


def test_copies_make_the_death_of_a_decode_instance_cost_less_and_are_in_the_plans_file(tmp_path: Path) -> None:
    # Half the answers are under way when it dies. The TPOT of one that is computed again is missed.
    demand = ExpectedLoad(lengths=[RequestLengths(1500, 200)], rate_per_s=4.0)
    changes: dict[str, Any] = {"demand": demand, "tpot_s": 0.03, "ttft_s": 2.0, "gpus": 8, "request_count": 60}
    without, copied = (
        plan(question_of(**changes, replication=mode)) for mode in (ReplicationMode.OFF, ReplicationMode.RING)
    )
    assert copied.cluster.decode_count == without.cluster.decode_count > 1
    assert copied.without_decode.mean > without.without_decode.mean
    assert any("dies for good, requests go on from copies (ring)" in line for line in summary_lines(copied))
    assert (to_json(without)["replication"], to_json(copied)["replication"]) == ("off", "ring")
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(copied, {}))
    read = read_spec(path, setting_sections())
    assert read.not_simulated == ()
    assert read.spec.decode == copied.cluster.spec(0, FailureSpec()).decode


def test_an_slo_that_no_number_of_gpus_meets_is_named() -> None:
    with pytest.raises(ConfigError, match=r"slo-ttft-s.*0\.001.*at any rate.*at most 0% of requests.*90% must"):
        plan(question_of(ttft_s=0.001))
    with pytest.raises(ConfigError, match=r"slo-tpot-s.*0\.001.*nothing else to do"):
        plan(question_of(tpot_s=0.001))


def test_too_few_gpus_are_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"--gpus: is 3; 30 requests/s need at least \d+: \d+ x prefill"):
        plan(question_of(gpus=3, demand=ExpectedLoad(lengths=[RequestLengths(300, 200)], rate_per_s=30.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttft_s": 0.0}, "--slo-ttft-s: is 0; it must be a number of seconds above 0"),
        ({"tpot_s": math.nan}, "--slo-tpot-s: is nan"),
        ({"attain": 1.0}, "--attain: is 1; it must be a share above 0 and below 1"),
        ({"gpus": 1}, "--gpus: is 1; prefill and decode need at least 1 each"),
        (
            {"demand": ExpectedLoad(lengths=[RequestLengths(2000, 100)], rate_per_s=1.0)},
            "2100 tokens; opt-13b takes at most 2048",
        ),
        ({"prefill": Parallelism(3, 1)}, "--prefill-tp-pp: is 3,1: TP must divide the 40 heads"),
        ({"decode": Parallelism(1, 3)}, "--decode-tp-pp: is 1,3: PP must divide the 40 layers"),
        ({"profiles": ["nothing"]}, "--profile: is 'nothing', which is no file and none of: opt-13b-a100"),
        ({"profiles": []}, "--profile: is not given"),
        ({"hardware": read_hardware("h100-80g")}, "measured on a100; --hardware h100-80g is H100"),
        ({"hardware": read_hardware("v100-16g"), "decode": Parallelism(1, 1)}, "no room for the weights"),
    ],
)
def test_a_bad_question_is_refused_with_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(question_of(**{"prefill": None, "decode": None, **changes}))
    assert message in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        ExpectedLoad(lengths=[RequestLengths(1, 1)], rate_per_s=rate)


@pytest.mark.parametrize("text", ["", "1", "a,b", "0,5", "5,-1"])
def test_lengths_and_parallelism_are_numbers_above_zero(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        parse_lengths(text)
    with pytest.raises(ConfigError, match="--prefill-tp-pp"):
        parse_parallelism(text, "--prefill-tp-pp")


def test_hardware_of_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('accelerator = "A100"\nmemory_bytes = -1\n')
    with pytest.raises(ConfigError, match=r"memory_bytes: is -1; it must be a number above 0"):
        read_hardware(str(path))
    path.write_text('accelerator = "A100"\n')
    with pytest.raises(ConfigError, match=r"memory_bytes: is not given"):
        read_hardware(str(path))
    path.write_text('colour = "blue"\n')
    with pytest.raises(ConfigError, match=r"colour: is no field"):
        read_hardware(str(path))


def random_requests(rng: random.Random, count: int, rate_per_s: float) -> list[PlannedRequest]:
    lengths = [RequestLengths(rng.randint(1, 1200), rng.randint(1, 60)) for _ in range(count)]
    return plan_requests(lengths, gamma_arrivals(count, rate_per_s, 1.0, rng))
