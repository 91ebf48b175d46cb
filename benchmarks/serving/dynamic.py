"""Instances that change phase against fixed splits, for real: one stream, answered by one system after the other.

Real services on the timed engine (OPT-13B on two A100, tensor parallel), four instances: dynamic ones with the policy
`slo`, the fixed split of two and two, and four colocated ones. The stream changes between long prompts (HPLD) and long
answers (LPHD) every 40 s. Attainment is the share of requests with both a TTFT of at most 1 s and a TPOT of at most
30 ms. The load is one at which the simulator (simulator.flips) finds that only the dynamic instances reach 90 %.
"""

import asyncio
import random
from typing import Any

import numpy as np

from benchmarks.support.bursts import send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.loadgen.report import columns_of
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths, plan_requests

TTFT_S, TPOT_S, ATTAINED = 1.0, 0.03, 0.9
PERIOD_S = 40.0
RATES = {WorkloadClass.HPLD: 23.4, WorkloadClass.LPHD: 28.7}
"""Requests per second at load 1."""
LOAD = 0.95
_FLAGS: dict[str, Any] = {
    "prefill_flags": ("--prefill-policy", "sjf"),
    "kv_cache_memory": str(9000 * 8192),
    "decode_policy": "reserve-dynamic",
    "max_batch": "256",
}
_NONE = {"prefill_count": 0, "decode_count": 0}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dynamic": {"prefill_count": 2, "decode_count": 2, "slo_ttft_s": str(TTFT_S), "slo_tpot_s": str(TPOT_S)},
    "2 prefill, 2 decode": {"prefill_count": 2, "decode_count": 2},
    "colocated": {**_NONE, "colocated_count": 4},
}


def shifting(load: float, periods: int, seed: int) -> list[PlannedRequest]:
    """Poisson arrivals at `load` times RATES, of one class and the other in turn, for PERIOD_S each."""
    rng = random.Random(seed)
    times_s: list[float] = []
    lengths: list[RequestLengths] = []
    now_s = 0.0
    while True:
        workload = tuple(RATES)[int(now_s // PERIOD_S) % len(RATES)]
        now_s += rng.expovariate(load * RATES[workload])
        if now_s >= periods * PERIOD_S:
            return plan_requests(lengths, times_s)
        times_s.append(now_s)
        lengths += draw_lengths(workload, 1, rng, 1024, 384)


async def _measure(options: Options, report: Report) -> None:
    periods, seeds = options.choose((4, (101,)), (1, (101,)))
    report.workload = {"engine": "timed", "instances": 4, "load": LOAD, "period_s": PERIOD_S, "periods": periods}
    attained: dict[str, list[float]] = {}
    for name, settings in SYSTEMS.items():
        settings = {**_FLAGS, **settings}
        if name == "colocated":
            settings["colocated_flags"] = settings.pop("prefill_flags")
        async with timed_stack(report, name, **settings) as stack, AsyncClient(stack.target) as client:
            for seed in seeds:
                answered = columns_of(await send(client, shifting(LOAD, periods, seed), seed, report))
                ttft_s, tpot_s = answered.ttft_s(), answered.tpot_s()
                is_fast, is_steady = ttft_s <= TTFT_S, (tpot_s <= TPOT_S) | np.isnan(tpot_s)
                attained.setdefault(name, []).append(float((is_fast & is_steady).mean()))
                report.row("TTFT met", [100 * float(is_fast.mean())], "%", system=name, seed=seed)
                report.row("TPOT met", [100 * float(is_steady.mean())], "%", system=name, seed=seed)
            logs = [stack.process(each).log_path.read_text(errors="replace") for each in stack.instance_ids]
            flips = sum(log.count('"flip_decided"') for log in logs)
        report.row("flips", [float(flips)], "flips in all runs", system=name)
        report.row("attained", [100 * value for value in attained[name]], "%", system=name)
    mean = {name: sum(values) / len(values) for name, values in attained.items()}
    report.ratio("attained by dynamic instances / asked for", mean["dynamic"] / ATTAINED, target=1.0)
    for name in list(mean)[1:]:
        report.ratio(f"attained, dynamic / {name}", mean["dynamic"] / mean[name])


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    asyncio.run(_measure(options, report))


if __name__ == "__main__":
    run("serving.dynamic", measure, description=__doc__)
