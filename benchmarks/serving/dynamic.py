"""Instances that change phase against fixed splits, for real: one stream, answered by one system after the other.

Real services on the timed engine (OPT-13B on two A100, tensor parallel), four instances: dynamic ones with the policy
`slo` and copies of KV, so that running answers move (the engine's KV is small, so copies are cheap); the fixed split of
two and two, which is the best for this stream in simulation (simulator.flips); and four colocated ones. The stream
changes between long prompts (HPLD) and long answers (LPHD) every 40 s. Goodput is the highest load, in steps of 0.05,
at which at least 90 % of the requests have both a TTFT of at most 1 s and a TPOT of at most 30 ms. Each search begins
where the simulator leads one to expect the first load that is too high, and goes up or down from there until it has one
load that is met and the next one that is not.

Two cores run what four machines would, so time is stretched: steps, periods, limits, the pause between flips and the
time between heartbeats take TIME_SCALE times as long, and requests come at intervals that much longer. All other times
of the services stay as they are, such as the half second over which waiting prompts are averaged.
"""

import asyncio
import random
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
SEED = 101
RATES = {WorkloadClass.HPLD: 23.4, WorkloadClass.LPHD: 28.7}
"""Requests per second at load 1."""
STARTS = {"dynamic": 1.05, "2 prefill, 2 decode": 0.75, "colocated": 1.0}
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
_NONE = {"prefill_count": 0, "decode_count": 0}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dynamic": {
        "prefill_count": 2,
        "decode_count": 2,
        "slo_ttft_s": str(TIME_SCALE * TTFT_S),
        "slo_tpot_s": str(TIME_SCALE * TPOT_S),
        "flip_cooldown_s": str(TIME_SCALE * COOLDOWN_S),
        "replication": "spread",
    },
    "2 prefill, 2 decode": {"prefill_count": 2, "decode_count": 2},
    "colocated": {**_NONE, "colocated_count": 4},
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
    periods = options.choose(4, 1)
    report.workload = {
        "engine": "timed",
        "instances": 4,
        "time_scale": TIME_SCALE,
        "period_s": PERIOD_S,
        "periods": periods,
        "seed": SEED,
    }
    goodput: dict[str, float] = {}
    for name, settings in SYSTEMS.items():
        settings = {**_FLAGS, **settings}
        if name == "colocated":
            settings["colocated_flags"] = settings.pop("prefill_flags")
        async with timed_stack(report, name, **settings) as stack, AsyncClient(stack.target) as client:

            async def attained(load: float, name: str = name, client: AsyncClient = client) -> float:
                answered = columns_of(await send(client, shifting(load, periods, SEED), SEED, report))
                ttft_s, tpot_s = answered.ttft_s() / TIME_SCALE, answered.tpot_s() / TIME_SCALE
                is_fast, is_steady = ttft_s <= TTFT_S, (tpot_s <= TPOT_S) | np.isnan(tpot_s)
                share = float((is_fast & is_steady).mean())
                for met, values in (("TTFT met", is_fast), ("TPOT met", is_steady)):
                    report.row(met, [100 * float(values.mean())], "%", system=name, load=load)
                report.row("attained", [100 * share], "%", system=name, load=load)
                return share

            goodput[name] = await _goodput(attained, STARTS[name])
            logs = [stack.process(each).log_path.read_text(errors="replace") for each in stack.instance_ids]
            flips = sum(log.count('"flip_decided"') for log in logs)
        report.row("flips", [float(flips)], "flips in all runs", system=name)
        report.row("goodput", [goodput[name]], "of nominal", system=name)
    report.ratio("goodput, dynamic / 2 prefill, 2 decode", goodput["dynamic"] / goodput["2 prefill, 2 decode"], 1.05)
    report.ratio("goodput, dynamic / colocated", goodput["dynamic"] / goodput["colocated"], 1.10)


async def _goodput(attained: Callable[[float], Awaitable[float]], start: float) -> float:
    """Return the highest load at which enough requests meet both limits, searched in steps from `start`."""
    load = start
    if await attained(load) >= ATTAINED:
        while await attained(round(load + STEP, 2)) >= ATTAINED:
            load = round(load + STEP, 2)
        return load
    while load > STEP:
        load = round(load - STEP, 2)
        if await attained(load) >= ATTAINED:
            break
    return load


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    asyncio.run(_measure(options, report))


if __name__ == "__main__":
    run("serving.dynamic", measure, description=__doc__)
