"""`kaveri plan --from-cluster` against a real cluster: what its routers were asked for, and what runs."""

import asyncio
import json
import subprocess

import pytest

from tests.support.command import run_kaveri
from tests.support.local_cluster import run_cluster

PLAN = (
    *("--profile", "opt-13b-a100", "--prefill-tp-pp", "1,1", "--decode-tp-pp", "1,1", "--requests", "50"),
    # Small batches: the search simulates as many requests as the instances bear in some seconds.
    *("--slo-ttft-s", "2", "--slo-tpot-s", "0.2", "--max-batch", "8"),
)
# The time between two runs of `kaveri bench` is a pause.
DRAWN = ("--burstiness", "1")
LOAD = (
    "--workload",
    "LPLD",
    "--max-prompt",
    "64",
    "--max-output",
    "16",
    "--concurrency",
    "4",
    "--warm-up",
    "0",
    "--json",
)


async def kaveri(*words: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(run_kaveri, *words)


async def test_a_cluster_is_planned_again_by_what_all_its_routers_were_asked_for() -> None:
    async with run_cluster(router_count=2, decode_count=2) as cluster:
        first, second = cluster.stack.targets
        too_early = await kaveri("plan", *PLAN, *DRAWN, "--from-cluster", first)
        assert too_early.returncode != 0
        assert "--from-cluster: has seen 0 requests that arrived" in too_early.stderr
        for target, count in ((first, "14"), (second, "16")):
            ended = await kaveri("bench", "--target", target, "--requests", count, "--json", *LOAD)
            assert ended.returncode == 0, ended.stderr
        planned = await kaveri("plan", *PLAN, *DRAWN, "--from-cluster", first, "--json")
        recorded = await kaveri("plan", *PLAN, "--recorded", "--from-cluster", second, "--json")
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)
    observed, running = found["observed"], found["running"]
    # `kaveri bench` sends nothing but its workload.
    assert {name: observed[name] for name in ("routers", "arrivals", "answers", "cut_short", "running")} == {
        "routers": 2,
        "arrivals": 30,
        "answers": 30,
        "cut_short": 0,
        "running": 0,
    }
    assert found["rate_per_s"] == pytest.approx(30 / observed["period_s"])
    assert (running["prefill"]["count"], running["decode"]["count"], running["gpus"]) == (1, 2, 3)
    # Two instances carry so little; a third one is not needed.
    assert (found["gpus"], found["advice"]) == (2, "change")
    assert "2 GPUs are enough, and 3 run" in found["reason"]
    assert running["attainment"]["low"] >= 0.9
    assert recorded.returncode == 0, recorded.stderr
    # From the first arrival to the last.
    assert json.loads(recorded.stdout)["rate_per_s"] > found["rate_per_s"]
