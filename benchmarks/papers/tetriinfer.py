"""TetriInfer's measurements (arXiv 2401.11181) again, by arithmetic and in the simulator, over many seeds.

    figures 3 to 5   the seconds of steps that mix requests, by the latency model alone
    figure 16        a burst of ShareGPT's prompts at one prefill instance: order, chunks, a fixed batch of 16
    figure 18        256 answers on a small pool: reserving policies with predictions right or wrong, against greedy
    figure 19        bursts of half heavy answers on 2, 4 and 8 decode instances
    section 5.1      five workloads of 128 requests: one prefill and one decode instance (`--preset tetriinfer`) over a
                     link of 200 Gbps against half the GPUs: vLLM 0.2, prefill first, at most 16 requests, swapping,
                     and a better baseline, chunks beside a batch of 256

Latencies are DistServe's fits of OPT-13B on A100, where the paper has V100; TP 2, but TP 1 for figures 3 to 5. Pools of
38,400 tokens are those of two V100 of 32 GB. Lengths of the workloads are uniform within their classes.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.support.bursts import LATENCY_MODEL, SHAREGPT_PROMPT_TOKENS
from benchmarks.support.harness import Options, Report, run
from kaveri.domain.length import TokenRange
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.latency.model import load_latency_model
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import BaselineSpec, simulate_baseline
from kaveri.simulator.instance import SimulatedRequest
from kaveri.simulator.simulate import Simulation, simulate
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PoolSpec, PrefillSpec, RouterSpec
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths
from kaveri.workload.resource_time import resource_times
from kaveri.workload.run_columns import RunColumns

GAP_S = 0.001
LATENCY = load_latency_model(LATENCY_MODEL)
ONE_GPU = load_latency_model("opt-13b-a100-tp1")
SMALL_POOL_BLOCKS = 2400
"""38,400 tokens: 90 % of 64 GB, less 26 GB of weights, at 819,200 bytes a token."""
KV_TOKEN_BYTES = 819_200
LARGE_POOL_BLOCKS = 9000
SWAP_TOKEN_S = KV_TOKEN_BYTES / 2 / 12e9
"""To host memory and back: each of two GPUs moves half over PCIe 3, 12 GB/s."""
GRANULARITY = 200
PAPER_ACCURACY = 0.749
WORKLOADS = {
    WorkloadClass.LPLD: "TTFT -44 %, JCT -40 %",
    WorkloadClass.LPHD: "TTFT -97 %, JCT -47 %, resource time -38 %",
    WorkloadClass.HPLD: "TTFT -9 %, JCT -23 %, resource time +43 %",
    WorkloadClass.HPHD: "JCT -19 %, resource time +7 %",
    WorkloadClass.MIXED: "TTFT -85 %, JCT -50 %, resource time -21 %",
}


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    seeds = range(1, options.choose(60, 5) + 1)
    report.workload = {"engine": LATENCY_MODEL, "seeds": len(seeds)}
    _interference(report)
    _prefill_scheduling(seeds, report)
    _admission(range(1, options.choose(16, 2) + 1), report)
    _placement(seeds, report)
    for workload, paper in WORKLOADS.items():
        _workload(workload, paper, range(1, options.choose(16, 2) + 1), report)


# Figures 3 to 5.


def _interference(report: Report) -> None:
    alone_s = ONE_GPU.step_s([(0, 18)])
    for others, tokens, name in ((7, 18, "light"), (63, 18, "light"), (1, 512, "heavy"), (7, 512, "heavy")):
        beside_s = ONE_GPU.step_s([(0, 18), *[(0, tokens)] * others])
        report.ratio(f"light prompt beside {others} {name} / alone", beside_s / alone_s)
    # A light request in the middle of its answer.
    context = 18 + 30
    decode_s = ONE_GPU.mixed_step_s([], 1, context)
    report.ratio("decode step beside 1 heavy prompt / alone", ONE_GPU.mixed_step_s([(0, 512)], 1, context) / decode_s)
    rng = random.Random(1)
    steps: dict[int, list[float]] = {0: [], 64: []}
    for heavy, seconds in steps.items():
        for _ in range(1000):
            # In the middle of answers: heavy ones have 513 to 1,024 tokens, light ones 20 to 100.
            contexts = [18 + rng.uniform(0, rng.randint(513, 1024)) for _ in range(heavy)]
            contexts += [18 + rng.uniform(0, rng.randint(20, 100)) for _ in range(128 - heavy)]
            seconds.append(ONE_GPU.mixed_step_s([], 128, round(sum(contexts))))
    slower = statistics.fmean(steps[64]) / statistics.fmean(steps[0])
    report.ratio("decode step, 64 of 128 heavy / none", slower)
    report.ratio("throughput, 64 of 128 heavy / none", 1 / slower)


# Figure 16.


def _spec(**changes: Any) -> ClusterSpec:
    pool = PoolSpec(latency=LATENCY, total_blocks=LARGE_POOL_BLOCKS, max_batch=256, max_model_len=16_384)
    spec = ClusterSpec(
        prefill_count=1,
        decode_count=1,
        prefill=PrefillSpec(engine=pool, max_queue=10_000),
        decode=DecodeSpec(engine=pool),
        router=RouterSpec(placement_policy=PlacementPolicy.LEAST_LOADED),
    )
    return replace(spec, **changes)


def _prefill_scheduling(seeds: Sequence[int], report: Report) -> None:
    settings = {
        "fcfs 16": (OrderingPolicy.FCFS, 16),
        "sjf 16": (OrderingPolicy.SJF, 16),
        "sjf 128": (OrderingPolicy.SJF, 128),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*settings, "fixed 16")}
    for seed in seeds:
        rng = random.Random(seed)
        lengths = [RequestLengths(tokens, 2) for _ in range(8) for tokens in rng.sample(SHAREGPT_PROMPT_TOKENS, 16)]
        # All come while a long prompt is computed; times count from its end.
        burst = [PlannedRequest(number, 0.0, one) for number, one in enumerate([RequestLengths(8000, 2), *lengths])]
        for name, (policy, batch) in settings.items():
            spec = _spec(seed=seed)
            prefill = replace(spec.prefill, prefill_policy=policy, prefill_sched_batch=batch)
            done = simulate(replace(spec, prefill=prefill), burst).columns()
            ttft_s = float((done.first_s[1:] - done.first_s[0]).mean())
            prefill_s = float(done.server["prefill_s"][1:].mean())
            found[name].append((ttft_s - prefill_s, prefill_s, ttft_s))
        fixed = BaselineSpec(
            rule=BaselineRule.PREFILL_FIRST,
            latency=LATENCY,
            total_blocks=LARGE_POOL_BLOCKS,
            step_tokens=1 << 30,
            step_prompts=16,
        )
        alone = [
            PlannedRequest(number, 0.0, RequestLengths(one.prompt_tokens, 1)) for number, one in enumerate(lengths)
        ]
        first_s = simulate_baseline(fixed, alone).columns().first_s
        ends_s = np.unique(first_s)
        step_s = dict(zip(ends_s, np.diff(ends_s, prepend=0.0), strict=True))
        prefill_s = float(np.mean([step_s[one] for one in first_s]))
        found["fixed 16"].append((float(first_s.mean()) - prefill_s, prefill_s, float(first_s.mean())))

    def ratio(name: str, ours: str, theirs: str, column: int) -> float:
        pairs = zip(found[ours], found[theirs], strict=True)
        value = statistics.median(mine[column] / their[column] for mine, their in pairs)
        report.ratio(name, value)
        return value

    for setting, values in found.items():
        report.row("mean TTFT", [one[2] for one in values], "s", setting=setting)
    latency = ratio("mean prefill latency, chunks FCFS / fixed batch", "fcfs 16", "fixed 16", 1)
    ratio("mean TTFT, chunks FCFS / fixed batch", "fcfs 16", "fixed 16", 2)
    wait = ratio("mean wait, SJF / FCFS, batch 16", "sjf 16", "fcfs 16", 0)
    first = ratio("mean TTFT, SJF, batch 128 / 16", "sjf 128", "sjf 16", 2)
    report.compare("figure 16: chunks, SJF's wait, batch 128", "-86.4 %, -7.8 %, -46.5 %",
                   f"{latency - 1:+.1%}, {wait - 1:+.1%}, {first - 1:+.1%}")  # fmt: skip


# Figure 18.


class PredictedSimulation(Simulation):
    """Answers have predicted ranges of GRANULARITY tokens, right with the probability `accuracy`."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[PlannedRequest], accuracy: float) -> None:
        super().__init__(replace(spec, router=replace(spec.router, lengths_known=False)), requests)
        rng = random.Random(spec.seed)
        buckets = [one.lengths.output_tokens // GRANULARITY for one in requests]
        self._buckets = list(buckets)
        for number, bucket in enumerate(buckets):
            others = [other for other in buckets if other != bucket]
            if others and rng.random() >= accuracy:
                self._buckets[number] = rng.choice(others)

    def _request(self, number: int, planned: PlannedRequest, due_s: float) -> SimulatedRequest:
        request = super()._request(number, planned, due_s)
        low = GRANULARITY * self._buckets[number]
        request.length = TokenRange(low, low + GRANULARITY)
        return request


def _admission(seeds: Sequence[int], report: Report) -> None:
    greedy, static, dynamic = AdmissionPolicy
    settings = {("greedy", 1.0): greedy} | {
        (policy.value, accuracy): policy for policy in (static, dynamic) for accuracy in (1.0, PAPER_ACCURACY)
    }
    jct: dict[tuple[str, float], list[float]] = {key: [] for key in settings}
    preempted: dict[tuple[str, float], list[float]] = {key: [] for key in settings}
    for seed in seeds:
        rng = random.Random(seed)
        # Geometric, with a median of 128, as ShareGPT's in the paper.
        answers = [min(512, max(2, round(rng.expovariate(np.log(2) / 128)))) for _ in range(256)]
        burst = [
            PlannedRequest(number, number * GAP_S, RequestLengths(rng.choice(SHAREGPT_PROMPT_TOKENS), answer))
            for number, answer in enumerate(answers)
        ]
        for key, policy in settings.items():
            # Prompts wait for nothing, as many instances compute them.
            spec = _spec(prefill_count=2, seed=seed)
            engine = replace(spec.decode.engine, total_blocks=SMALL_POOL_BLOCKS)
            spec = replace(spec, decode=DecodeSpec(engine=engine, decode_policy=policy))
            table = PredictedSimulation(spec, burst, key[1]).run()
            jct[key].append(float(table.columns().jct_s().mean()))
            preempted[key].append(float(sum(table.preemptions)))
    for key, values in jct.items():
        report.row("mean JCT", values, "s", policy=key[0], accuracy=key[1])
        report.row("preemptions", preempted[key], "times", policy=key[0], accuracy=key[1])
    for key in settings:
        if key[0] != "greedy":
            pairs = zip(jct[key], jct["greedy", 1.0], strict=True)
            shorter = statistics.median(ours / theirs for ours, theirs in pairs)
            report.ratio(f"mean JCT, {key[0]} at {key[1]:.1%} / greedy", shorter)


# Figure 19.


def _placement(seeds: Sequence[int], report: Report) -> None:
    policies = (
        DecodePlacementPolicy.HEAVY_LIGHT,
        DecodePlacementPolicy.RANDOM,
        DecodePlacementPolicy.IMBALANCE,
        DecodePlacementPolicy.POWER_OF_TWO,
    )
    for instances in (2, 4, 8):
        total: dict[DecodePlacementPolicy, list[float]] = {policy: [] for policy in policies}
        for seed in seeds:
            rng = random.Random(seed)
            lengths = [
                one
                for workload in (WorkloadClass.LPHD, WorkloadClass.LPLD)
                for one in draw_lengths(workload, instances * 16, rng, 512, 512)
            ]
            rng.shuffle(lengths)
            burst = [PlannedRequest(number, number * GAP_S, one) for number, one in enumerate(lengths)]
            for policy in policies:
                spec = _spec(prefill_count=instances, decode_count=instances, seed=seed)
                spec = replace(spec, prefill=replace(spec.prefill, decode_placement=policy))
                done = simulate(spec, burst).columns()
                total[policy].append(float(done.last_s.max() - done.first_s.min()))
        for policy, values in total.items():
            report.row("total decode time", values, "s", policy=policy.value, instances=instances)
        ours = total[policies[0]]
        for policy in policies[1:]:
            pairs = zip(total[policy], ours, strict=True)
            slower = statistics.fmean(theirs / mine for theirs, mine in pairs)
            report.ratio(f"total decode time, {policy} / heavy-light, {instances} instances", slower)


# Section 5.1.


def _workload(workload: WorkloadClass, paper: str, seeds: Sequence[int], report: Report) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in seeds:
        lengths = draw_lengths(workload, 128, random.Random(seed), 1024, 384)
        burst = [PlannedRequest(number, number * GAP_S, one) for number, one in enumerate(lengths)]
        spec = _tetriinfer(seed)
        done = simulate(spec, burst).columns()
        phases = dict.fromkeys(spec.prefill_ids, ("prefill",)) | dict.fromkeys(spec.decode_ids, ("decode",))
        busy_s = sum(one.busy_s for one in resource_times(done, phases).values())
        found.setdefault("TetriInfer", []).append(_figures(done, busy_s))
        no_link = simulate(replace(spec, link=None), burst).columns()
        found.setdefault("TetriInfer, no link", []).append(_figures(no_link, busy_s))
        for name, theirs in _BASELINES.items():
            other = simulate_baseline(theirs, burst).columns()
            found.setdefault(name, []).append(_figures(other, other.duration_s))
    for system, values in found.items():
        for column, figure in enumerate(("mean TTFT", "mean JCT", "resource time")):
            report.row(figure, [one[column] for one in values], "s", system=system, workload=workload.value)
    for name in ("vLLM, 16 requests", "chunks beside 256"):
        changes = []
        for column, figure in enumerate(("mean TTFT", "mean JCT", "resource time")):
            pairs = zip(found["TetriInfer"], found[name], strict=True)
            value = statistics.median(mine[column] / their[column] for mine, their in pairs)
            report.ratio(f"{figure}, TetriInfer / {name}, {workload.value}", value)
            changes.append(f"{figure} {value - 1:+.0%}")
        report.compare(f"{workload.value} against {name}", paper, ", ".join(changes))


_BASELINES = {
    "vLLM, 16 requests": BaselineSpec(
        rule=BaselineRule.PREFILL_FIRST,
        latency=LATENCY,
        total_blocks=SMALL_POOL_BLOCKS,
        max_batch=16,
        step_tokens=2048,
        swap_token_s=SWAP_TOKEN_S,
    ),
    "chunks beside 256": BaselineSpec(
        rule=BaselineRule.BESIDE, latency=LATENCY, total_blocks=SMALL_POOL_BLOCKS, step_tokens=512
    ),
}


def _tetriinfer(seed: int) -> ClusterSpec:
    """`--preset tetriinfer`, with one instance of each phase."""
    spec = _spec(seed=seed, link=LinkSpeed(25e9, token_bytes=KV_TOKEN_BYTES))
    pool = replace(spec.prefill.engine, total_blocks=SMALL_POOL_BLOCKS, chunk_tokens=512, max_model_len=2048)
    prefill = PrefillSpec(
        engine=pool,
        layer_count=40,
        prefill_policy=OrderingPolicy.SJF,
        prefill_sched_batch=16,
        decode_placement=DecodePlacementPolicy.HEAVY_LIGHT,
    )
    decode = DecodeSpec(engine=pool, decode_policy=AdmissionPolicy.RESERVE_DYNAMIC)
    return replace(spec, prefill=prefill, decode=decode)


def _figures(done: RunColumns, busy_s: float) -> tuple[float, float, float]:
    return float(done.ttft_s().mean()), float(done.jct_s().mean()), busy_s


if __name__ == "__main__":
    run("papers.tetriinfer", measure, description=__doc__)
