"""How long a simulation takes, in CPU time of one core: requests of ShareGPT's lengths, Poisson arrivals.

Lengths are drawn from the middles of the sixteenths of prompts and of answers, each for itself. Generation of the
requests and the summary count. The full run simulates a million requests at each size; the quick one a hundredth, and
scales. Memory is the peak of the process that simulates, which does nothing else.

A cluster whose decode instances are out of blocks is simulated step by step, and all that wait look for room at each
broadcast. That is slower, and measured by itself, with fewer requests.
"""

import multiprocessing
import random
import resource
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.support.bursts import SHAREGPT_PROMPT_TOKENS
from benchmarks.support.harness import Options, Report, run
from kaveri.latency.model import load_latency_model
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PoolSpec, PrefillSpec
from kaveri.workload.requests import RequestLengths, gamma_arrivals, plan_requests
from kaveri.workload.summary import Slo, summarize
from tests.support.conservation import check_conservation

SHAREGPT_ANSWER_TOKENS = (23, 58, 95, 146, 201, 258, 310, 353, 396, 440, 493, 548, 607, 680, 788, 927)
"""As SHAREGPT_PROMPT_TOKENS, of the answers."""
MILLION = 1_000_000
LIMITS_S = {8: 60.0, 64: 60.0, 1_000: 90.0}
"""By the number of instances, half of which prefill."""
RATE_PER_PREFILL = 5.0
"""Requests per second: less than three quarters of what the prefill instances can do. At 5.5 a cluster of 8 runs out of
blocks after some 440,000 requests, and does not recover: what is computed again after preemptions costs too much."""
OVERLOAD_PER_PREFILL = 6.5
"""More than decode instances that preempt can do."""
OVERLOAD_INSTANCES = 8
MEMORY_LIMIT_BYTES = 2**30
LATENCY_MODEL = "opt-13b-a100-tp2"


class _Cost(NamedTuple):
    """Of one simulation."""

    seconds: float
    """Of CPU time."""
    peak_bytes: int
    tokens: int
    attainment: float
    preemptions: int


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    count = options.choose(MILLION, MILLION // 100)
    overload_count = options.choose(20_000, 2_000)
    report.workload = {
        "requests": count,
        "rate per prefill instance": RATE_PER_PREFILL,
        "overload": f"{overload_count} requests, {OVERLOAD_PER_PREFILL:g} a second and prefill instance",
        "model": LATENCY_MODEL,
    }
    for instances, limit_s in LIMITS_S.items():
        cost = _in_process(instances, count, RATE_PER_PREFILL)
        million_s = cost.seconds / count * MILLION
        report.row("CPU time of a request", [cost.seconds / count * 1e6], "us", instances=instances)
        report.row("CPU time of a million", [million_s], "s", instances=instances)
        report.row("peak memory", [cost.peak_bytes / 2**20], "MiB", instances=instances)
        report.row("tokens simulated in a second", [cost.tokens / cost.seconds], "tokens/s", instances=instances)
        report.row("SLO attainment", [cost.attainment], "share", instances=instances)
        report.row("preemptions", [cost.preemptions], "", instances=instances)
        name = f"{limit_s:g} s / a million requests, {instances} instances"
        report.ratio(name, limit_s / million_s, target=1.0)
        if count == MILLION:
            report.ratio(
                f"1 GiB / peak memory, {instances} instances", MEMORY_LIMIT_BYTES / cost.peak_bytes, target=1.0
            )
    overloaded = _in_process(OVERLOAD_INSTANCES, overload_count, OVERLOAD_PER_PREFILL)
    request_us = overloaded.seconds / overload_count * 1e6
    report.row("CPU time of a request, overloaded", [request_us], "us", instances=OVERLOAD_INSTANCES)
    report.row("preemptions, overloaded", [overloaded.preemptions], "", instances=OVERLOAD_INSTANCES)


def _in_process(instances: int, count: int, rate_per_prefill: float) -> _Cost:
    """Of a process that only simulates. Raises EOFError when it has died."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_simulate, args=(instances, count, rate_per_prefill, theirs))
    process.start()
    # While this end is open, recv() does not notice that the process has died.
    theirs.close()
    found: _Cost = ours.recv()
    process.join()
    return found


def _simulate(instances: int, count: int, rate_per_prefill: float, answer: Connection) -> None:
    started_s = time.process_time()
    rng = random.Random(1)
    lengths = [
        RequestLengths(rng.choice(SHAREGPT_PROMPT_TOKENS), rng.choice(SHAREGPT_ANSWER_TOKENS)) for _ in range(count)
    ]
    rate_per_s = rate_per_prefill * instances / 2
    requests = plan_requests(lengths, gamma_arrivals(count, rate_per_s, 1.0, rng))
    pool = PoolSpec(latency=load_latency_model(LATENCY_MODEL), total_blocks=9000, max_batch=256)
    half = instances // 2
    spec = ClusterSpec(
        prefill_count=half, decode_count=half, prefill=PrefillSpec(engine=pool), decode=DecodeSpec(engine=pool)
    )
    simulation = Simulation(spec, requests)
    table = simulation.run()
    check_conservation(simulation)
    summary = summarize(table.columns(), Slo(0.5, 0.05))
    seconds = time.process_time() - started_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens = sum(one.output_tokens for one in lengths)
    answer.send(_Cost(seconds, peak_bytes, tokens, summary["slo_attainment"], sum(table.preemptions)))


if __name__ == "__main__":
    run("simulator.speed", measure, description=__doc__)
