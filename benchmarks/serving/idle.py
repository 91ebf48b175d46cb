"""What a stack without requests costs: CPU time of each process, and the commands that Redis is sent.

The stack is what `kaveri up` starts: a gateway, a router, two prefill and two decode instances, a predictor and a
Redis, on kaveri-tiny. Each process is counted with its children. This process stands for `kaveri up` itself.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from benchmarks.support.harness import Options, Report, run
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import KAVERI_TINY, bundled_predictor

SETTLE_S = 5.0
MOST_CORES = 0.06
"""All processes together."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """CPU time and Redis commands of a stack so far."""

    at_s: float
    cpu_s: Mapping[str, float]
    """By process."""
    commands: Mapping[str, int]
    """Sent to Redis, by name; those of scripts count as well."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children that live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S + sum(cpu_s(int(child)) for child in children.split())


async def spent(stack: LocalStack, redis: Redis) -> Spent:
    """Read the CPU time and the Redis commands of a stack."""
    stats = await redis.info("commandstats")
    cpu = {name: cpu_s(pid) for name, pid in stack.pids().items()}
    cpu["up"] = time.process_time()
    return Spent(time.monotonic(), cpu, {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()})


async def measure_async(options: Options, report: Report) -> None:
    seconds, repeats = options.choose(15.0, 8.0), options.choose(3, 1)
    config = StackConfig.of(gateway_count=1, predictor=bundled_predictor(KAVERI_TINY) or "", restart=False)
    report.workload = {"model": KAVERI_TINY, "seconds": seconds}
    cores: dict[str, list[float]] = {}
    commands: dict[str, list[float]] = {}
    async with LocalStack(config) as stack, Redis.from_url(stack.redis_url) as redis:
        await asyncio.sleep(SETTLE_S)
        for _ in range(repeats):
            first = await spent(stack, redis)
            await asyncio.sleep(seconds)
            last = await spent(stack, redis)
            for rates, former, later in ((cores, first.cpu_s, last.cpu_s), (commands, first.commands, last.commands)):
                for name, value in {**later, "all": sum(later.values())}.items():
                    before = sum(former.values()) if name == "all" else former.get(name, 0)
                    rates.setdefault(name, []).append((value - before) / (last.at_s - first.at_s))
    for name, values in cores.items():
        report.row("CPU", values, "cores", process=name)
    for name, values in sorted(commands.items()):
        if max(values) >= 1:
            report.row("Redis commands", values, "/s", command=name)
    report.ratio(f"{MOST_CORES} core / all processes", MOST_CORES / max(cores["all"]), 1.0)


def measure(options: Options, report: Report) -> None:
    """One stack, looked at several times."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.idle", measure, description=__doc__)
