"""Instances that change phase against fixed ones, for real: the same streams, answered by one system after the other.

Real services on the timed engine (OPT-13B on two A100, tensor parallel), four instances: dynamic ones with the policy
`slo` and copies of KV, so that running answers move (the engine's KV is small, so copies are cheap); the fixed split of
two and two, which is the best for this stream in simulation (simulator.flips); and four colocated ones. The stream
changes between long prompts (HPLD) and long answers (LPHD) every 40 s. Goodput is the load at which 90 % of the
requests have both a TTFT of at most 1 s and a TPOT of at most 30 ms. A search measures loads in steps of 0.05, up or
down from where the simulator puts the limit, until it has one load that is met and the next one that is not, and
interpolates linearly between their shares. Ratios are those of the mean goodput over the seeds that both systems
answered: the split, which is far below, answers one.

Two cores run what four machines would, so time is stretched: steps, periods, limits, the pause between flips and the
time between heartbeats take TIME_SCALE times as long, and requests come at intervals that much longer. All other times
of the services stay as they are, such as the half second over which waiting prompts are averaged.
"""

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks.support.bursts import send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.loadgen.report import columns_of
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths, plan_requests

TIME_SCALE = 2.0
"""Seconds of this benchmark for one second of the engines. Settings below are in seconds of the engines."""
TTFT_S, TPOT_S, ATTAINED = 1.0, 0.03, 0.9
PERIOD_S = 40.0
COOLDOWN_S, HEARTBEAT_S = 1.0, 0.1
"""The services' defaults."""
SEEDS = (101, 102, 103)
RATES = {WorkloadClass.HPLD: 23.4, WorkloadClass.LPHD: 28.7}
"""Requests per second at load 1."""
SPLIT = "2 prefill, 2 decode"
STARTS = {"dynamic": 1.05, "colocated": 0.95, SPLIT: 0.7}
"""First load of each search."""
STEP = 0.05
_FLAGS: dict[str, Any] = {
    "prefill_flags": ("--prefill-policy", "sjf"),
    "kv_cache_memory": str(9000 * 8192),
    "decode_policy": "reserve-dynamic",
    "max_batch": "256",
    "time_scale": str(TIME_SCALE),
    "heartbeat_interval_s": str(TIME_SCALE * HEARTBEAT_S),
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dynamic": {
        "prefill_count": 2,
        "decode_count": 2,
        "slo_ttft_s": str(TIME_SCALE * TTFT_S),
        "slo_tpot_s": str(TIME_SCALE * TPOT_S),
        "flip_cooldown_s": str(TIME_SCALE * COOLDOWN_S),
        "replication": "spread",
    },
    "colocated": {"prefill_count": 0, "decode_count": 0, "colocated_count": 4},
    SPLIT: {"prefill_count": 2, "decode_count": 2},
}


def shifting(load: float, periods: int, seed: int) -> list[PlannedRequest]:
    """Poisson arrivals at `load` times RATES, of one class and the other in turn, for PERIOD_S each, stretched."""
    rng = random.Random(seed)
    times_s: list[float] = []
    lengths: list[RequestLengths] = []
    now_s = 0.0
    while True:
        workload = tuple(RATES)[int(now_s // PERIOD_S) % len(RATES)]
        now_s += rng.expovariate(load * RATES[workload])
        if now_s >= periods * PERIOD_S:
            return plan_requests(lengths, [TIME_SCALE * time_s for time_s in times_s])
        times_s.append(now_s)
        lengths += draw_lengths(workload, 1, rng, 1024, 384)


async def _measure(options: Options, report: Report) -> None:
    periods, seeds = options.choose((4, SEEDS), (1, SEEDS[:1]))
    report.workload = {
        "engine": "timed",
        "instances": 4,
        "time_scale": TIME_SCALE,
        "period_s": PERIOD_S,
        "periods": periods,
        "seeds": list(seeds),
    }
    goodput: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for seed in seeds:
        for name in SYSTEMS:
            if name != SPLIT or seed == seeds[0]:
                goodput[name].append(await _goodput_of(name, periods, seed, report))
    for name, found in goodput.items():
        report.row("goodput", found, "of nominal", system=name)
    for other, target in ((SPLIT, 1.05), ("colocated", 1.10)):
        theirs = goodput[other]
        ours = goodput["dynamic"][: len(theirs)]
        report.ratio(f"goodput, dynamic / {other}", statistics.mean(ours) / statistics.mean(theirs), target)


async def _goodput_of(name: str, periods: int, seed: int, report: Report) -> float:
    settings = {**_FLAGS, **SYSTEMS[name]}
    if name == "colocated":
        settings["colocated_flags"] = settings.pop("prefill_flags")
    async with timed_stack(report, name, **settings) as stack, AsyncClient(stack.target) as client:

        async def attained(load: float) -> float:
            answered = columns_of(await send(client, shifting(load, periods, seed), seed, report))
            ttft_s, tpot_s = answered.ttft_s() / TIME_SCALE, answered.tpot_s() / TIME_SCALE
            is_fast, is_steady = ttft_s <= TTFT_S, (tpot_s <= TPOT_S) | np.isnan(tpot_s)
            share = float((is_fast & is_steady).mean())
            labels = {"system": name, "load": load, "seed": seed}
            for met, value in (("TTFT met", is_fast.mean()), ("TPOT met", is_steady.mean()), ("attained", share)):
                report.row(met, [100 * float(value)], "%", **labels)
            return share

        found = await _goodput(attained, STARTS[name])
        logs = [stack.process(each).log_path.read_text(errors="replace") for each in stack.instance_ids]
        flips = sum(log.count('"flip_decided"') for log in logs)
    report.row("flips", [float(flips)], "flips in all runs", system=name, seed=seed)
    return found


async def _goodput(attained: Callable[[float], Awaitable[float]], start: float) -> float:
    """Load at which the share ATTAINED of the requests meets both limits, searched in steps from `start`."""
    shares = {start: await attained(start)}
    while True:
        met = [load for load, share in shares.items() if share >= ATTAINED]
        missed = [load for load, share in shares.items() if share < ATTAINED]
        if met and missed:
            low, high = max(met), min(missed)
            return low + (high - low) * (shares[low] - ATTAINED) / (shares[low] - shares[high])
        load = round(max(met) + STEP if met else min(missed) - STEP, 2)
        shares[load] = await attained(load) if load > 0 else 1.0


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    asyncio.run(_measure(options, report))


if __name__ == "__main__":
    run("serving.dynamic", measure, description=__doc__)
