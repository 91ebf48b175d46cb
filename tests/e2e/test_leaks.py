"""Many short requests, a third of them cancelled at a random moment, leave every process as it was."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView
from tests.support.local_cluster import LocalCluster, run_cluster

REQUEST_COUNT = 1000
IN_FLIGHT = 16
SEED = 20
# Pools of glibc and Python settle while warming up; what remains is noise, not a request's share of anything.
MEMORY_SLACK_BYTES = 24 * 2**20
# Each process keeps as many connections to Redis as it once needed together, up to this: on a busy machine that may
# still grow after warming up. What leaks with one request in fifty is more.
REDIS_CONNECTIONS = 16
FLAGS = ("--fake-step-s", "0.002")


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    descriptors: int
    threads: int
    resident_bytes: int


def held(cluster: LocalCluster) -> dict[str, Held]:
    figures = {}
    for name, pid in cluster.pids().items():
        process = psutil.Process(pid)
        figures[name] = Held(process.num_fds(), process.num_threads(), process.memory_info().rss)
    return figures


def descriptor_slack(name: str, processes: dict[str, Held]) -> int:
    return REDIS_CONNECTIONS * (len(processes) - 1 if name == "redis" else 1)


async def one_request(client: AsyncClient, rng: random.Random, number: int) -> str:
    prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 200))]
    params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0, ignore_eos=True)
    stop_after = rng.choice((None, None, 0, 1, 5))
    async with client.stream(prompt_token_ids=prompt, params=params, request_id=f"r{number}") as stream:
        if stop_after == 0:
            return "left"
        count = 0
        async for chunk in stream:
            count += len(chunk.token_ids)
            if stop_after is not None and count >= stop_after:
                return "left"
        assert count == params.max_tokens
    return "finished"


async def many_requests(target: str, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(IN_FLIGHT)
    async with AsyncClient(target) as client:

        async def gated(number: int) -> str:
            async with gate:
                return await one_request(client, random.Random(rng.random()), number)

        return await asyncio.gather(*(gated(number) for number in range(count)))


@pytest.mark.timeout(300)
async def test_a_thousand_short_requests_with_random_cancels_leak_nothing(
    idle: Callable[[ClusterView], bool], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    async with run_cluster(prefill_count=2, decode_count=2, prefill_flags=FLAGS, decode_flags=FLAGS) as cluster:
        await many_requests(cluster.target, REQUEST_COUNT // 4, SEED)
        await cluster.wait_for_view(idle)
        before = held(cluster)
        outcomes = await many_requests(cluster.target, REQUEST_COUNT, SEED + 1)
        assert outcomes.count("finished") > REQUEST_COUNT / 3
        assert outcomes.count("left") > REQUEST_COUNT / 5
        await cluster.wait_for_view(idle)
        # Channels and streams of clients that have left close in their own time.
        give_up_at_s = time.monotonic() + 30.0
        while True:
            after = held(cluster)
            grown = {
                name: (before[name], figures)
                for name, figures in after.items()
                if figures.descriptors > before[name].descriptors + 2 + descriptor_slack(name, after)
                or figures.threads > before[name].threads + 2
            }
            if not grown or time.monotonic() > give_up_at_s:
                break
            await cluster.stack.wait_for_change(0.1)
        assert not grown, grown
        for name, figures in after.items():
            assert figures.resident_bytes < before[name].resident_bytes + MEMORY_SLACK_BYTES, (
                name,
                before[name],
                figures,
            )
