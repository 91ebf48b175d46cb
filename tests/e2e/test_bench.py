"""`kaveri bench` against a real cluster."""

import asyncio
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.command import run_kaveri
from tests.support.local_cluster import LocalCluster, run_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
EOS = ("--fake-eos-probability", "0.2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with run_cluster(decode_count=2, gateway_count=1, prefill_flags=EOS, decode_flags=EOS) as cluster:
        yield cluster


async def run_bench(target: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(run_kaveri, "bench", "--json", "--target", target, *flags)


async def bench(target: str, *flags: str) -> dict[str, Any]:
    ended = await run_bench(target, *flags)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


TEXTS = """\
Once upon a time there was a river that nobody had ever crossed.
Explain in a few sentences why the sky is blue and the evening red.
Which questions should a good engineer ask before building anything?
"""


async def test_fake_engines_answer_any_text(cluster: LocalCluster, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXTS)
    report = await bench(cluster.target, "--prompts", str(prompts), "--concurrency", "1", "--max-output", "4")
    (run,) = report["runs"]
    assert run["answered"] == 3, run["errors"]


async def test_forced_and_natural_lengths_and_the_resource_time_of_every_instance(cluster: LocalCluster) -> None:
    load = ("--requests", "8", "--concurrency", "2", "--workload", "LPLD")
    forced = (await bench(cluster.target, *load))["runs"][0]
    natural = (await bench(cluster.target, *load, "--natural-length"))["runs"][0]
    assert (forced["answered"], natural["answered"]) == (8, 8)
    assert all(row["received_tokens"] == row["output_tokens"] for row in forced["rows"])
    # Answers of five tokens on average, where 8 to 128 were planned.
    assert any(row["received_tokens"] < row["output_tokens"] for row in natural["rows"])
    for run in (forced, natural):
        times = run["resource_time"]
        assert {role: of_role["instances"] for role, of_role in times.items()} == {"prefill": 1, "decode": 2}
        for of_role in times.values():
            assert 0 < of_role["busy_s"] <= of_role["held_s"]


async def test_a_run_says_what_it_was_made_with_and_drives_the_gateway_over_http(cluster: LocalCluster) -> None:
    load = ("--requests", "6", "--concurrency", "2", "--workload", "LPLD", "--max-prompt", "64", "--max-output", "16")
    (address,) = cluster.stack.http_targets
    by_http = await bench(cluster.target, "--http", f"http://{address}", "--max-failed", "0", *load)
    by_grpc = await bench(cluster.target, *load)
    failing = await run_bench(
        "127.0.0.1:1", "--http", f"http://{address}/v1", *load, "--timeout-s", "0.000001", "--max-failed", "5"
    )
    for run in (by_http["runs"][0], by_grpc["runs"][0]):
        assert (run["answered"], run["errors"]) == (6, {})
        assert all(row["received_tokens"] == row["output_tokens"] for row in run["rows"])
    assert [row["prompt_tokens"] for row in by_http["runs"][0]["rows"]] == [
        row["prompt_tokens"] for row in by_grpc["runs"][0]["rows"]
    ]
    made = by_http["provenance"]
    assert by_http["target"] == f"http://{address}"
    assert made["version"] == importlib.metadata.version("kaveri")
    assert made["python"] == platform.python_version()
    assert made["arguments"][:2] == ["bench", "--json"]
    assert made["machine"]["cpu"]
    assert made["commit"] is None or len(made["commit"].removesuffix("+")) == 40
    assert failing.returncode == 1
    assert json.loads(failing.stdout)["runs"][0]["answered"] == 0
    assert "6 requests failed; --max-failed is 5" in failing.stderr
