"""DistServe's comparisons (arXiv 2401.09670, section 6) in the simulator: rates, SLOs, table 2, transfers.

--data FOLDER, which holds anywhere below it: sharegpt_8k_filtered_stats_llama2_tokenizer.csv (sarathi-serve),
profiler-a100-80g.vllm.json (DistServe's repository), AzureLLMInferenceTrace_code.csv, HumanEval.jsonl.gz.

DistServe is one prefill and one decode instance of table 3's placements, the baselines one instance of the parallelism
that the paper gives them. Goodput is the highest rate at which 90 % of requests meet both of table 1's SLOs, per GPU.
vLLM 0.2 computes whole prompts first; DeepSpeed-MII mixes chunks into steps of as many tokens as saturate the GPU.
Latencies are DistServe's fits on A100, those of vLLM its fits of vLLM. OPT-175B is an estimate from OPT-66B.

HumanEval's tokens are its characters divided by 3. LongBench's lengths are not at hand: the summaries here have those
of the Azure code trace, which are about as long in prompts (at most 2,048 tokens together), and shorter in answers.
"""

import csv
import gzip
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import Options, Report, run
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.planner.catalog import ModelShape, read_hardware, read_model_shape
from kaveri.planner.decode_phase import lane_pool
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.planner.parallelism import Parallelism, kv_tokens
from kaveri.planner.profiles import StepLatency, read_step_latencies, saturating_tokens, scaled_to_model
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import BaselineSpec, simulate_baseline
from kaveri.simulator.simulate import simulate
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PrefillSpec, RouterSpec
from kaveri.workload.goodput import GoodputSearch, Probe
from kaveri.workload.requests import PlannedRequest, RequestLengths
from kaveri.workload.run_columns import RunColumns
from kaveri.workload.summary import Slo
from kaveri.workload.traces import read_trace

A100 = read_hardware("a100-80g")
ATTAIN = 0.9
MAX_BATCH = 256
"""vLLM's default."""
PAPER = "DistServe (arXiv 2401.09670)"
TABLE_2 = {
    1.0: (0.970, 1.000),
    1.5: (0.655, 1.000),
    2.0: (0.528, 0.993),
    2.5: (0.449, 0.873),
    3.0: (0.367, 0.830),
    3.5: (0.278, 0.773),
    4.0: (0.236, 0.700),
}
"""Rate to the attainments of the real vLLM and the real DistServe-Low; OPT-66B, ShareGPT."""


@dataclass(frozen=True)
class Application:
    """One row of table 1, with the placements of table 3."""

    name: str
    model: str
    family: str
    slo: Slo
    lengths: str
    vllm_tp: int
    prefill: Parallelism
    decode: Parallelism
    paper_rate: str
    paper_slo: str


APPLICATIONS = (
    Application(
        "chat, OPT-13B", "opt-13b", "opt-13b-a100", Slo(0.25, 0.1), "sharegpt", 1,
        Parallelism(tp=2, pp=1), Parallelism(tp=1, pp=1), "2.0 to 4.6", "1.8 to 3.2",
    ),
    Application(
        "chat, OPT-66B", "opt-66b", "opt-66b-a100", Slo(2.5, 0.15), "sharegpt", 4,
        Parallelism(tp=4, pp=1), Parallelism(tp=2, pp=2), "2.0 to 4.6", "1.8 to 3.2",
    ),
    Application(
        "chat, OPT-175B, estimated", "opt-175b", "opt-66b-a100", Slo(4.0, 0.2), "sharegpt", 8,
        Parallelism(tp=3, pp=3), Parallelism(tp=4, pp=3), "2.0 to 4.6", "1.8 to 3.2",
    ),
    Application(
        "code, OPT-66B", "opt-66b", "opt-66b-a100", Slo(0.125, 0.2), "humaneval", 4,
        Parallelism(tp=4, pp=1), Parallelism(tp=2, pp=2), "5.7", "1.4",
    ),
    Application(
        "summaries, OPT-66B", "opt-66b", "opt-66b-a100", Slo(15.0, 0.15), "azure-code", 4,
        Parallelism(tp=4, pp=1), Parallelism(tp=2, pp=2), "4.3", "12.6",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ComparedScheduler:
    """One of the systems, on its GPUs."""

    name: str
    gpus: int
    serve: Callable[[Sequence[PlannedRequest], int], RunColumns]
    """Takes the requests and a seed for its random draws; returns the columns of the run."""


def read_lengths(data: Path, most_tokens: int) -> dict[str, list[RequestLengths]]:
    """The data sets, cut to requests that the model takes."""
    with find_file(data, "sharegpt_8k_filtered_stats_llama2_tokenizer.csv").open() as file:
        chat = [
            RequestLengths(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
            for row in csv.DictReader(file)
        ]
    with gzip.open(find_file(data, "HumanEval.jsonl.gz"), "rt") as file:
        problems = [json.loads(line) for line in file]
    code = [
        RequestLengths(math.ceil(len(one["prompt"]) / 3), math.ceil(len(one["canonical_solution"]) / 3))
        for one in problems
    ]
    trace = read_trace(find_file(data, "AzureLLMInferenceTrace_code.csv"), 1_000_000)
    found = {"sharegpt": chat, "humaneval": code, "azure-code": trace.lengths}
    return {
        name: [one for one in lengths if one.prompt_tokens > 0 and one.prompt_tokens + one.output_tokens <= most_tokens]
        for name, lengths in found.items()
    }


def find_file(data: Path, name: str) -> Path:
    """The file of this name, anywhere below the folder."""
    return next(Path(folder) / name for folder, _, names in os.walk(data, followlinks=True) if name in names)


def vllm_latency(data: Path, model: str, tp: int) -> LatencyModel:
    """DistServe's fit of vLLM, of milliseconds."""
    entry = json.loads(find_file(data, "profiler-a100-80g.vllm.json").read_text())[f"facebook/{model}"][str(tp)]
    step, token, squared = (value / 1000 for value in entry["prefill"])
    large = entry["decoding_large_small_bs_threshold"]
    decode = tuple(
        DecodeLatency(min_batch=least, step_s=fit[0] / 1000, context_token_s=fit[1] / 1000, request_s=fit[2] / 1000)
        for least, fit in ((1, entry["decoding_smallbs"]), (large, entry["decoding_largebs"]))
    )
    prefill = PrefillLatency(step_s=step, token_s=token, token_squared_s=squared)
    return LatencyModel(name=f"vllm {model} tp{tp}", source="DistServe's repository", prefill=prefill, decode=decode)


def _baseline(
    name: str, rule: BaselineRule, shape: ModelShape, tp: int, latency: LatencyModel, step_tokens: int
) -> ComparedScheduler:
    tokens = kv_tokens(shape, A100, Parallelism(tp=tp, pp=1))
    spec = BaselineSpec(
        rule=rule, latency=latency, total_blocks=tokens // 16, max_batch=MAX_BATCH, step_tokens=step_tokens
    )
    return ComparedScheduler(name, tp, lambda requests, _: simulate_baseline(spec, requests).columns())


def distserve_spec(
    shape: ModelShape, prefill: Parallelism, decode: Parallelism, steps: dict[int, StepLatency]
) -> ClusterSpec:
    """One prefill and one decode instance, on one machine, or stage by stage on several (algorithm 2)."""

    def pool(one: Parallelism) -> Any:
        latency = steps[one.tp].latency
        chunk = saturating_tokens(latency)
        return lane_pool(latency, kv_tokens(shape, A100, one), one.pp, chunk, MAX_BATCH, shape.max_model_len)

    return ClusterSpec(
        prefill_count=prefill.pp,
        decode_count=decode.pp,
        prefill=PrefillSpec(
            engine=pool(prefill),
            max_queue=10_000,
            decode_placement=DecodePlacementPolicy.LEAST_LOADED,
            layer_count=shape.layers,
        ),
        decode=DecodeSpec(engine=pool(decode)),
        router=RouterSpec(placement_policy=PlacementPolicy.LEAST_LOADED, lengths_known=False),
        link=LinkSpeed(A100.link_in_node, token_bytes=shape.kv_token_bytes),
    )


def systems(application: Application, data: Path) -> list[ComparedScheduler]:
    """DistServe first."""
    shape = read_model_shape(application.model)
    degrees = sorted({application.prefill.tp, application.decode.tp, application.vllm_tp})
    steps = read_step_latencies([application.family], shape, A100, degrees)
    spec = distserve_spec(shape, application.prefill, application.decode, steps)
    tp = application.vllm_tp
    same = steps[tp].latency
    if application.model == "opt-175b":
        theirs = scaled_to_model(vllm_latency(data, "opt-66b", 8), read_model_shape("opt-66b"), shape)
    else:
        theirs = vllm_latency(data, application.model, tp)
    whole = shape.max_model_len
    return [
        ComparedScheduler(
            "DistServe",
            application.prefill.gpus + application.decode.gpus,
            lambda requests, seed: simulate(replace(spec, seed=seed), requests).columns(),
        ),
        _baseline("vLLM", BaselineRule.PREFILL_FIRST, shape, tp, theirs, whole),
        _baseline("vLLM, DistServe's engine", BaselineRule.PREFILL_FIRST, shape, tp, same, whole),
        _baseline("MII", BaselineRule.TOKEN_BUDGET, shape, tp, same, saturating_tokens(same)),
    ]


def scales(run_columns: RunColumns, slo: Slo) -> np.ndarray[Any, Any]:
    """The factor of both SLOs that each request needs."""
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    worst = np.fmax(run_columns.ttft_s() / slo.ttft_s, run_columns.tpot_s() / slo.tpot_s)
    return np.where(run_columns.answered, worst, math.inf)


def goodput(system: ComparedScheduler, load: ExpectedLoad, slo: Slo, count: int, seed: int) -> float:
    """Requests per second and GPU; 0: none."""
    found = GoodputSearch(0.5 * system.gpus, ATTAIN, 16, 0.02)
    while (rate := found.next_rate()) is not None:
        attained = float(slo.met(system.serve(load.draw(count, rate, seed), seed)).mean())
        found.note(Probe(rate, attained))
    return found.held.rate_per_s / system.gpus if found.held is not None else 0.0


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    if options.data is None:
        report.skip("needs --data FOLDER")
        return
    lengths = read_lengths(options.data, 2048)
    count, seeds = options.choose(200, 100), options.choose((1, 2), (1,))
    report.workload = {"requests": count, "seeds": len(seeds), "attainment": ATTAIN} | {
        f"{name}: mean tokens of prompts, answers": [
            round(statistics.fmean(one.prompt_tokens for one in some)),
            round(statistics.fmean(one.output_tokens for one in some)),
        ]
        for name, some in lengths.items()
    }
    with ProcessPoolExecutor(4) as pool:
        runs = {
            application.name: [
                pool.submit(_figures, application, lengths[application.lengths], options.data, count, seed)
                for seed in seeds
            ]
            for application in APPLICATIONS
        }
        for application in APPLICATIONS:
            _compare(application, [one.result() for one in runs[application.name]], report)
    _table_2(lengths["sharegpt"], options.data, count, seeds, report)
    _transfers(lengths["sharegpt"], count, report)


def _figures(
    application: Application, lengths: Sequence[RequestLengths], data: Path, count: int, seed: int
) -> dict[str, tuple[float, float]]:
    """By system: goodput per GPU, and how much tighter DistServe's SLO is at that rate; infinite for no rate."""
    load = ExpectedLoad(lengths=lengths, rate_per_s=1.0)
    ours, *others = systems(application, data)
    found = {ours.name: (goodput(ours, load, application.slo, count, seed), 1.0)}
    for other in others:
        rate = goodput(other, load, application.slo, count, seed)
        if not rate:
            found[other.name] = (0.0, math.inf)
            continue
        # At the rate per GPU that the other one just holds.
        needed = [
            np.sort(scales(one.serve(load.draw(count, rate * one.gpus, seed), seed), application.slo))
            for one in (ours, other)
        ]
        ours_at, theirs_at = (some[math.ceil(ATTAIN * len(some)) - 1] for some in needed)
        found[other.name] = (rate, float(theirs_at / ours_at))
    return found


def _compare(application: Application, runs: Sequence[dict[str, tuple[float, float]]], report: Report) -> None:
    """runs: _figures() of each seed."""
    name = application.name
    for system in runs[0]:
        report.row("goodput per GPU", [one[system][0] for one in runs], "requests/s", application=name, system=system)
    ours, *others = runs[0]
    for other in others:
        if not all(one[other][0] for one in runs):
            report.note(f"{name}: {other} meets the SLOs at no rate")
            continue
        ratio = statistics.median(one[ours][0] / one[other][0] for one in runs)
        report.ratio(f"rate, DistServe / {other}, {name}", ratio)
        report.ratio(f"SLO, {other} / DistServe, {name}", statistics.median(one[other][1] for one in runs))
    if f"rate, DistServe / vLLM, {name}" in report.ratios:
        report.compare(
            f"rate and SLO against vLLM, {name}",
            f"{application.paper_rate}, {application.paper_slo} times",
            f"{report.ratios[f'rate, DistServe / vLLM, {name}']:.2f}, "
            f"{report.ratios[f'SLO, vLLM / DistServe, {name}']:.2f} times",
        )


def _table_2(lengths: Sequence[RequestLengths], data: Path, count: int, seeds: Sequence[int], report: Report) -> None:
    """Attainment at the paper's rates, which are of a whole system: a GPU could do none of them."""
    application = APPLICATIONS[1]
    load = ExpectedLoad(lengths=lengths, rate_per_s=1.0)
    ours, vllm, *_ = systems(application, data)
    errors: dict[str, list[float]] = {"vLLM": [], "DistServe": []}
    for rate, real in TABLE_2.items():
        for system, measured in zip((vllm, ours), real, strict=True):
            shares = [
                float(application.slo.met(system.serve(load.draw(count, rate, seed), seed)).mean()) for seed in seeds
            ]
            found = report.row("attainment", shares, "share", system=system.name, rate=rate)
            errors[system.name].append(abs(found - measured) * 100)
    for name, points in errors.items():
        report.ratio(f"table 2, largest error in points, {name}", max(points))


def _transfers(lengths: Sequence[RequestLengths], count: int, report: Report) -> None:
    """Figure 10: the share of a request's time that its KV takes on the link, and the part of it that is waited for."""
    application = APPLICATIONS[2]
    shape = read_model_shape(application.model)
    steps = read_step_latencies(
        [application.family], shape, A100, sorted({application.prefill.tp, application.decode.tp})
    )
    spec = distserve_spec(shape, application.prefill, application.decode, steps)
    load = ExpectedLoad(lengths=lengths, rate_per_s=1.0)
    done = simulate(spec, load.draw(count, 1.0, 1)).columns()
    total_s = float(done.jct_s().sum())
    on_link_s = done.prompt_tokens * shape.kv_token_bytes / A100.link_in_node
    report.ratio("time of KV on the link / of all requests, percent", float(on_link_s.sum()) / total_s * 100)
    waited_s = float(np.nansum(done.server["kv_tail_s"]))
    report.ratio("time that requests wait for KV / of all requests, percent", waited_s / total_s * 100)
    report.ratio("95 % of transfers, ms", float(np.quantile(on_link_s, 0.95)) * 1000)


if __name__ == "__main__":
    run("papers.distserve", measure, description=__doc__)
