"""DéjàVu's pipelines (arXiv 2403.01876, section 5.2, appendix B) by kaveri.planner: rates, depths, swapping.

Prompts of 1,000 tokens; all requests of a microbatch draw as many tokens. These numbers are drawn from the middles of
the sixteenths of ShareGPT's answers, because the paper's trace is not published. Requests never run out. Stages are
equal, links take no time but 5 % of prompts. Latencies are DistServe's fits of OPT-66B on A100; BLOOM-176B is an
estimate from them. Table 4 is left out: there is no fit of a V100.

    tables 2, 3, 5   the highest rate of each scheme, and its depths
    figure 8         the same with microbatches of 8
    figure 9         tokens/s with KV of two microbatches in GPU memory instead of all: 2 B with swapping against B, the
                     largest that fits; each stage's KV goes over PCIe 4 (25 GB/s for each GPU) beside another step
    table 6          extra time of a prompt's KV over links, in the simulator
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulator.speed import SHAREGPT_ANSWER_TOKENS
from benchmarks.support.harness import Options, Report, run
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.planner.catalog import ModelShape, read_hardware, read_model_shape
from kaveri.planner.parallelism import USABLE_SHARE
from kaveri.planner.pipeline_plan import PipelineQuestion, Scheme, pass_s, plan_pipelines
from kaveri.planner.profiles import read_step_latencies
from kaveri.simulator.simulate import simulate
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PoolSpec, PrefillSpec
from kaveri.workload.requests import PlannedRequest, RequestLengths

A100 = read_hardware("a100-80g")
BLOOM = ModelShape(
    name="bloom-176b",
    layers=70,
    hidden_size=14336,
    heads=112,
    kv_heads=112,
    ffn_size=57344,
    vocab_size=250_880,
    max_model_len=2048,
)
PROMPT_TOKENS = 1000
REQUESTS = [RequestLengths(PROMPT_TOKENS, tokens) for tokens in SHAREGPT_ANSWER_TOKENS]
SETUPS = {
    "table 2": (read_model_shape("opt-66b"), 2, {4: 2, 6: 2, 8: 3, 10: 4, 12: 5, 14: 5, 16: 6}),
    "table 3": (read_model_shape("opt-66b"), 4, {4: 2, 6: 3, 8: 4, 10: 5, 12: 6, 14: 7, 16: 8}),
    "table 5": (BLOOM, 4, {6: 3, 8: 4, 10: 5, 12: 6, 14: 8, 16: 10}),
}
"""Model, GPUs of a machine, and for each number of machines the paper's depth of the prompt pipeline."""
PCIE_BYTES_PER_S = 25e9
TABLE_6 = {100: 0.0, 80: 0.0, 60: 0.0, 40: 0.0, 20: 1.18, 10: 5.46, 1: 82.5}
"""Gbps to extra seconds; a prompt takes 3.1 s, its KV 10.7 GB."""
PROMPT_S, PROMPT_KV_BYTES = 3.1, 10.7e9


def question_of(model: ModelShape, gpus: int, machines: int) -> PipelineQuestion:
    """Machines of so many A100, which hold a stage each."""
    latency = read_step_latencies(["opt-66b-a100"], model, A100, [gpus])[gpus].latency
    return PipelineQuestion(
        model=model,
        hardware=A100,
        latency=latency,
        gpus_per_machine=gpus,
        machines=machines,
        requests=REQUESTS,
        alike=True,
    )


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    report.workload = {"prompt_tokens": PROMPT_TOKENS, "streaming": 1.05}
    _tables(options.choose(None, (4, 8)), report)
    _throughput(report)
    _swapping(report)
    _link(report)


def _best(question: PipelineQuestion) -> dict[str, Scheme]:
    return {scheme.name: scheme for scheme in plan_pipelines(question).schemes}


def _tables(sizes: Sequence[int] | None, report: Report) -> None:
    ratios: dict[str, list[float]] = {}
    off: list[int] = []
    for table, (model, gpus, theirs) in SETUPS.items():
        for machines, prompt_depth in theirs.items():
            if sizes is not None and machines not in sizes:
                continue
            found = _best(question_of(model, gpus, machines))
            for name, scheme in found.items():
                report.row("rate", [scheme.requests_per_s], "requests/s", table=table, machines=machines, scheme=name)
            for ours, other in (("DéjàVu", "Baseline"), ("DéjàVu", "Baseline-DP"), ("Baseline-DP", "Baseline")):
                if ours in found and other in found:
                    higher = found[ours].requests_per_s / found[other].requests_per_s
                    ratios.setdefault(f"{ours} / {other}", []).append(higher)
            if "DéjàVu" in found:
                ours_depth = found["DéjàVu"].prompt_depth
                off.append(abs(ours_depth - prompt_depth))
                report.compare(f"{table}, {machines} machines: depth for prompts", f"{prompt_depth}", f"{ours_depth}")
    for name, values in ratios.items():
        report.ratio(f"rate, {name}, highest", max(values))
        report.ratio(f"rate, {name}, lowest", min(values))
    report.ratio("depths for prompts that are the paper's, share", sum(one == 0 for one in off) / len(off))
    report.ratio("depths for prompts within one of the paper's, share", sum(one <= 1 for one in off) / len(off))


def _throughput(report: Report) -> None:
    """Figure 8: as large clusters as the tables'."""
    for model, gpus, name in ((read_model_shape("opt-66b"), 2, "OPT-66B"), (BLOOM, 4, "BLOOM-176B, estimated")):
        best = 0.0
        for machines in (6, 8, 10, 12):
            question = question_of(model, gpus, machines)
            found = _best(replace(question, microbatch_sizes=(8,)))
            if "DéjàVu" in found and "Baseline" in found:
                gain = found["DéjàVu"].requests_per_s / found["Baseline"].requests_per_s
                report.row("throughput, DéjàVu / Baseline", [gain], "times", model=name, machines=machines)
                best = max(best, gain)
        report.ratio(f"throughput, DéjàVu / Baseline, at most, {name}", best)


def _swapping(report: Report) -> None:
    """Figure 9: pipelines of the fewest machines that hold the model, and twice as many."""
    best = 0.0
    for model, gpus, name in ((read_model_shape("opt-66b"), 2, "OPT-66B"), (BLOOM, 4, "BLOOM-176B, estimated")):
        memory = gpus * A100.memory_bytes * USABLE_SHARE
        least = math.ceil(model.weight_bytes / memory)
        for depth in (least, 2 * least):
            kv_bytes = (PROMPT_TOKENS + 1000) * model.kv_token_bytes / depth
            # A stage holds its share of the KV of as many microbatches as there are stages.
            fits = int((memory - model.weight_bytes / depth) / kv_bytes / depth)
            if fits < 1:
                continue
            question = question_of(model, gpus, depth)
            (_, plain_s), (_, twice_s) = pass_s(question, fits), pass_s(question, 2 * fits)
            mean_bytes = (PROMPT_TOKENS + 500) * model.kv_token_bytes / depth
            swap_s = 2 * fits * mean_bytes / (gpus * PCIE_BYTES_PER_S)
            gain = 2 * (plain_s / depth) / max(twice_s / depth, swap_s)
            labels = {"model": name, "machines": depth, "microbatch": fits}
            report.row("tokens/s with swapping / without", [gain], "times", **labels)
            best = max(best, gain)
    report.ratio("tokens/s with swapping / without, at most", best)


def _link(report: Report) -> None:
    tokens, layers = 1024, 70
    pool = PoolSpec(
        latency=LatencyModel(
            name="table 6",
            source="the paper's 3.1 s for a microbatch's prompts",
            prefill=PrefillLatency(step_s=0.0, token_s=PROMPT_S / tokens, token_squared_s=0.0),
            decode=(DecodeLatency(min_batch=1, step_s=0.02, context_token_s=0.0, request_s=0.0),),
        ),
        chunk_tokens=64,
    )
    spec = ClusterSpec(
        prefill_count=1,
        decode_count=1,
        prefill=PrefillSpec(engine=pool, layer_count=layers),
        decode=DecodeSpec(engine=pool),
    )
    request = [PlannedRequest(0, 0.0, RequestLengths(tokens, 4))]
    plain_s = float(simulate(spec, request).columns().last_s[0])
    for gbps, paper_s in TABLE_6.items():
        link = LinkSpeed(gbps * 1e9 / 8, token_bytes=round(PROMPT_KV_BYTES / tokens))
        slowed = simulate(replace(spec, link=link), request).columns()
        extra_s = float(slowed.last_s[0]) - plain_s
        report.ratio(f"extra time in prompt times, {gbps} Gbps", extra_s / PROMPT_S)
        report.compare(f"table 6, {gbps} Gbps", f"{paper_s:g} s", f"{extra_s:.2f} s")


if __name__ == "__main__":
    run("papers.dejavu", measure, description=__doc__)
