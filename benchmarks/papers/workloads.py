"""The five workloads, disaggregated against colocated: the same engine, the same number of instances.

TetriInfer's end-to-end comparison (arXiv 2401.11181, section 5.1): light or heavy in prefill (more than 512 prompt
tokens) and in decode (more than 128 of answer), and all four mixed; 128 requests of each in one burst. Real services on
the timed engine: 2 prefill and 2 decode instances against 4 colocated ones, where chunks of prompts ride in the decode
steps. Mixed also against what the paper compares with, half as many instances whose steps take whole prompts, and as a
Poisson stream at 0.7 of the burst's lowest throughput. Then Mixed on kaveri-tiny with a core for each instance:
1 prefill and 1 decode instance against 2 colocated ones.

Both systems use the paper's policies where they apply: SJF over 16 prompts, reserve-dynamic, and heavy-light placement.
Lengths are forced, so both know them, as with a perfect predictor.
"""

import asyncio
import os
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.support.bursts import LATENCY_MODEL, PAPER, send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.loadgen.driver import LoadRun
from kaveri.loadgen.report import Slo, columns_of, summarize
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.workload.requests import PlannedRequest, WorkloadClass, draw_lengths, gamma_arrivals, plan_requests
from kaveri.workload.resource_time import Phases, resource_times

DISAGGREGATED, COLOCATED, HALF = "disaggregated", "colocated", "half as many, whole prompts"
WHOLE_PROMPTS = ("--chunk-tokens", "16384")
"""A chunk that takes whatever waits, as vLLM did before it chunked."""
REQUESTS = 128
GAP_S = 0.001
LOAD = 0.7
"""Of the lower burst throughput: a stream that both systems can keep up with."""
MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 1024, 384
KV_CACHE_MEMORY = 9000 * 8192
"""Per instance, whatever its role: 144 000 tokens, in the timed engine's own small blocks."""
MAX_BATCH = 256
_ORDER = ("--prefill-policy", "sjf", "--prefill-sched-batch", "16")
_ADMISSION = ("--decode-policy", "reserve-dynamic", "--max-batch", str(MAX_BATCH))
_FLAGS: dict[str, Any] = {
    "prefill_flags": (*_ORDER, "--decode-placement", "heavy-light"),
    "decode_flags": _ADMISSION,
    "colocated_flags": (*_ORDER, *_ADMISSION),
}
_PAPERS = {
    WorkloadClass.LPLD: "TTFT -44 %, JCT -40 %, resource time about equal",
    WorkloadClass.LPHD: "TTFT -97 %, JCT -47 %, resource time -38 %",
    WorkloadClass.HPLD: "TTFT -9 %, JCT -23 %, resource time +43 %",
    WorkloadClass.HPHD: "JCT -19 %, resource time +7 %",
    WorkloadClass.MIXED: "TTFT -85 %, JCT -50 %, resource time -21 %",
}


class ComparedSystem:
    """One of the two, running."""

    def __init__(self, name: str, stack: LocalStack, client: AsyncClient) -> None:
        self.name = name
        self._stack = stack
        self._client = client

    @property
    def phases(self) -> dict[str, Phases]:
        """Of its engine instances, by id."""
        records = [status.record for status in self._stack.view().instances.values()]
        return {record.instance_id: record.phases for record in records if record.phases}

    async def answer(self, requests: Sequence[PlannedRequest], seed: int, report: Report) -> LoadRun:
        """All requests, each at its time."""
        return await send(self._client, requests, seed, report)

    def pin(self) -> None:
        """A core for each engine instance, in turn; everything else goes where there is room."""
        pids = self._stack.pids()
        cores = sorted(os.sched_getaffinity(0))
        for number, instance_id in enumerate(sorted(self.phases)):
            # Existing threads keep their affinity; new threads inherit that of the thread that starts them.
            for thread in Path(f"/proc/{pids[instance_id]}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[number % len(cores)]})


def burst(workload: WorkloadClass, count: int, most_output_tokens: int, seed: int) -> list[PlannedRequest]:
    """All at once, a millisecond apart so that the client is not the bottleneck."""
    lengths = draw_lengths(workload, count, random.Random(seed), MOST_PROMPT_TOKENS, most_output_tokens)
    return plan_requests(lengths, [number * GAP_S for number in range(count)])


def stream(
    workload: WorkloadClass, count: int, most_output_tokens: int, rate: float, seed: int
) -> list[PlannedRequest]:
    """Poisson arrivals, `rate` requests a second."""
    rng = random.Random(seed)
    lengths = draw_lengths(workload, count, rng, MOST_PROMPT_TOKENS, most_output_tokens)
    return plan_requests(lengths, gamma_arrivals(count, rate, 1.0, rng))


async def compare(
    systems: Sequence[ComparedSystem],
    plan: Callable[[int], list[PlannedRequest]],
    repeats: int,
    report: Report,
    **labels: str | int | float,
) -> float:
    """Rows of one workload, turn by turn with the same requests, and the ratios of the first system to each other one.

    Returns the lowest requests/s.
    """
    runs: dict[str, list[LoadRun]] = {system.name: [] for system in systems}
    for repeat in range(1, repeats + 1):
        requests = plan(repeat)
        for system in systems:
            runs[system.name].append(await system.answer(requests, repeat, report))
    found: dict[str, dict[str, list[float]]] = {}
    for system in systems:
        found[system.name] = figures = _figures(runs[system.name], system.phases)
        for name, values in figures.items():
            unit = "requests/s" if name == "throughput" else "s"
            report.row(name, values, unit, system=system.name, **labels)
    named = ", ".join(str(labels[label]) for label in ("engine", "workload", "arrivals"))
    ours, *others = found
    for other in others:
        for name in ("mean TTFT", "mean JCT", "mean TPOT", "longest gap between tokens", "resource time", "makespan"):
            pairs = zip(found[ours][name], found[other][name], strict=True)
            report.ratio(f"{name}, {ours} / {other}, {named}", statistics.median(our / their for our, their in pairs))
    return min(statistics.median(figures["throughput"]) for figures in found.values())


def _figures(runs: Sequence[LoadRun], phases: dict[str, Phases]) -> dict[str, list[float]]:
    """Resource time: the sum over instances of the time in which each had work (kaveri.workload.resource_time)."""
    summaries = [summarize(each, Slo(), phases) for each in runs]
    figures = {
        "mean TTFT": [summary["ttft_s"]["mean"] for summary in summaries],
        "p90 TTFT": [summary["ttft_s"]["p90"] for summary in summaries],
        "mean JCT": [summary["jct_s"]["mean"] for summary in summaries],
        "p90 JCT": [summary["jct_s"]["p90"] for summary in summaries],
        "mean TPOT": [summary["tpot_s"]["mean"] for summary in summaries],
        "longest gap between tokens": [summary["itl_s"]["max"] for summary in summaries],
        "makespan": [each.duration_s for each in runs],
        "throughput": [summary["requests_per_s"] for summary in summaries],
    }
    times = [resource_times(columns_of(each), phases) for each in runs]
    for key in sorted(set(phases.values())):
        figures[f"resource time of {'+'.join(key)}"] = [of_run[key].busy_s for of_run in times]
    figures["resource time"] = [sum(each.busy_s for each in of_run.values()) for of_run in times]
    return figures


async def measure_timed(options: Options, report: Report) -> None:
    """The five classes in a burst each, and Mixed as a stream."""
    count, repeats = options.choose((REQUESTS, 2), (12, 1))
    most_output_tokens = options.choose(MOST_OUTPUT_TOKENS, 136)
    half_flags = (*_FLAGS["colocated_flags"], *WHOLE_PROMPTS)
    only_colocated = {"prefill_count": 0, "decode_count": 0}
    sides: tuple[tuple[str, dict[str, Any]], ...] = (
        (DISAGGREGATED, {**_FLAGS, "prefill_count": 2, "decode_count": 2}),
        (COLOCATED, {**_FLAGS, **only_colocated, "colocated_count": 4}),
        (HALF, {**only_colocated, "colocated_count": 2, "colocated_flags": half_flags}),
    )
    async with AsyncExitStack() as resources:
        systems = []
        for name, settings in options.choose(sides, sides[:2]):
            stack = await resources.enter_async_context(
                timed_stack(report, kv_cache_memory=str(KV_CACHE_MEMORY), **settings)
            )
            client = await resources.enter_async_context(AsyncClient(stack.target))
            systems.append(ComparedSystem(name, stack, client))
        for system in systems:
            await system.answer(burst(WorkloadClass.MIXED, 8, 129, 0), 0, report)
        equal = systems[:2]
        for workload in WorkloadClass:

            def plan(repeat: int, workload: WorkloadClass = workload) -> list[PlannedRequest]:
                return burst(workload, count, most_output_tokens, repeat)

            labels = {"engine": "timed", "workload": workload, "arrivals": "burst"}
            against = systems if workload is WorkloadClass.MIXED else equal
            per_s = await compare(against, plan, repeats, report, **labels)
            report.note(f"{workload} in {PAPER}, section 5.1: {_PAPERS[workload]}")
        if not options.quick:
            rate = LOAD * per_s  # of Mixed, the last one

            def streamed(repeat: int) -> list[PlannedRequest]:
                return stream(WorkloadClass.MIXED, count, most_output_tokens, rate, 100 + repeat)

            labels = {"engine": "timed", "workload": WorkloadClass.MIXED, "arrivals": "Poisson"}
            await compare(systems, streamed, repeats, report, **labels, rate_per_s=round(rate, 2))
    report.note(
        "Where TTFT is longer and in the paper shorter: there two instances are compared with one, and the one "
        "computes whole prompts in fixed batches; here the numbers are equal and the colocated instances chunk. In a "
        "burst TTFT is the time to get through the prompts, for which disaggregation has half of the engines."
    )
    report.note(
        "Where resource time is lower: two decode engines run the batches of four, and in this latency model a step of "
        "twice the batch takes little longer. Where it is higher, prompts are most of the work, and the decode engines "
        "have a few requests each while the prefill engines go through them. No split of the instances suits every "
        "workload; the paper flips idle ones to the other role (section 3.5), and here none changes its role."
    )
    report.note(
        "Where JCT is not shorter, as it is in the paper: it has TTFT in it; the KV pools are roomy here, so that "
        "nothing is preempted; and a chunk of 512 makes a decode step about three times as long, where a batch of "
        "whole prompts makes it many times as long."
    )


async def measure_tiny(options: Options, report: Report) -> None:
    """Mixed on the transformers engine, a core for each instance."""
    count, repeats = options.choose((48, 3), (8, 1))
    most_output_tokens = options.choose(256, 136)
    async with AsyncExitStack() as resources:
        systems = []
        sides: tuple[tuple[str, dict[str, Any]], ...] = (
            (DISAGGREGATED, {"prefill_count": 1, "decode_count": 1}),
            (COLOCATED, {"prefill_count": 0, "decode_count": 0, "colocated_count": 2}),
        )
        for name, counts in sides:
            config = StackConfig.of(model=options.model, restart=False, drain_timeout_s=2.0, **counts, **_FLAGS)
            stack = await resources.enter_async_context(LocalStack(config))
            client = await resources.enter_async_context(AsyncClient(stack.target))
            systems.append(ComparedSystem(name, stack, client))
        for system in systems:
            await system.answer(burst(WorkloadClass.MIXED, 8, 129, 0), 0, report)
            # After the first steps, so that the threads that compute are there.
            system.pin()

        def plan(repeat: int) -> list[PlannedRequest]:
            return burst(WorkloadClass.MIXED, count, most_output_tokens, repeat)

        labels = {"engine": "transformers", "workload": WorkloadClass.MIXED, "arrivals": "burst"}
        await compare(systems, plan, repeats, report, **labels)


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "timed": f"{LATENCY_MODEL}, 2 prefill + 2 decode against 4 colocated",
        "transformers": f"{options.model}, 1 prefill + 1 decode against 2 colocated, a core for each instance",
        "requests": options.choose(REQUESTS, 12),
        "prompt_tokens": {"light": [16, 512], "heavy": [513, MOST_PROMPT_TOKENS]},
        "output_tokens": {"light": [8, 128], "heavy": [129, options.choose(MOST_OUTPUT_TOKENS, 136)]},
        "policies": "sjf over 16 prompts, heavy-light placement, reserve-dynamic, max batch 256",
    }
    await measure_timed(options, report)
    await measure_tiny(options, report)


def measure(options: Options, report: Report) -> None:
    """Both systems at the same time, asked in turn; the one that is not asked idles."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.workloads", measure, description=__doc__)
