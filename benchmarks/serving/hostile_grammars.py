"""Measures a cluster that strangers ask for schemas, regexes and tools that explode, recurse or are wrong.

Each is asked for over HTTP, one at a time. Meanwhile others stream answers and ask gateway, router and decode instance
for their health every 10 ms: the longest answer is at least the longest time that an event loop was blocked. One
prefill and one decode instance on the bundled model, on two cores, of which a compiling process takes one. The same
streams without strangers are measured before.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
import uvloop

from benchmarks.support.answer_streams import percentile
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.domain.grammar import Grammar
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from tests.services.gateway.test_tools import HOSTILE as HOSTILE_TOOLS
from tests.support.hostile_grammars import HOSTILE as HOSTILE_GRAMMARS
from tests.support.redis_fixture import free_port

PING_S = 0.01
REFUSED_S = 1.0
BLOCKED_S = 0.1
_NAMES = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choices": "choice"}


@dataclass
class Meanwhile:
    """Times that others see, in seconds."""

    pings: dict[str, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)


async def ping(client: httpx2.AsyncClient, urls: dict[str, str], seen: Meanwhile) -> None:
    """Ask every service for its health, until cancelled."""

    async def one(name: str, url: str) -> None:
        began_s = time.perf_counter()
        await client.get(url)
        seen.pings.setdefault(name, []).append(time.perf_counter() - began_s)

    while True:
        await asyncio.gather(*(one(*each) for each in urls.items()))
        await asyncio.sleep(PING_S)


async def stream(client: AsyncClient, seen: Meanwhile) -> None:
    """Stream one long answer after another, until cancelled; record the times between tokens."""
    for number in range(10_000):
        last_s = None
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async for _ in client.stream(prompt_token_ids=[300 + number % 100] * 20, params=params):
            now_s = time.perf_counter()
            if last_s is not None:
                seen.gaps.append(now_s - last_s)
            last_s = now_s


@contextlib.asynccontextmanager
async def others(stack: LocalStack, urls: dict[str, str]) -> Any:
    """Run the pings and two streams during the context; yield their times."""
    seen = Meanwhile()
    async with httpx2.AsyncClient(timeout=60) as http, AsyncClient(stack.targets) as client:
        tasks = [asyncio.create_task(ping(http, urls, seen))]
        tasks += [asyncio.create_task(stream(client, seen)) for _ in range(2)]
        yield seen
        assert not any(task.done() for task in tasks), "others were disturbed"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bodies() -> dict[str, dict[str, Any]]:
    """Return the hostile request bodies, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, make in HOSTILE_GRAMMARS.items():
        # Some are refused where they are made, as the gateway does.
        with contextlib.suppress(Exception):
            grammar: Grammar = make()
            is_json = grammar.kind in ("json_schema", "choices")
            value = json.loads(grammar.source) if is_json else grammar.source
            found[name] = {"structured_outputs": {_NAMES[grammar.kind]: value}}
    return found | {f"tools: {number}": fields for number, (fields, _) in enumerate(HOSTILE_TOOLS)}


async def measure_async(options: Options, report: Report) -> None:
    config = StackConfig.of(
        model=options.model,
        gateway_count=1,
        prefill_count=1,
        decode_count=1,
        restart=False,
        metrics_port=free_port(),
        start_timeout_s=300.0,
    )
    asked = bodies()
    report.workload = {"engine": "transformers", "requests": len(asked), "bystanders": 2, "ping_s": PING_S}
    async with LocalStack(config) as stack:
        names = ("gateway-0", "router-0", "decode-0")
        urls = {name: f"http://127.0.0.1:{stack.config.metrics_port_of(name)}/livez" for name in names}
        pids = stack.pids()
        async with others(stack, urls) as alone:
            await asyncio.sleep(options.choose(20.0, 5.0))
        before = {name: psutil.Process(pids[name]).memory_info().rss for name in (*names, "prefill-0")}
        statuses, refused_s, served_s, grown = Counter[int](), dict[str, float](), dict[str, float](), 0.0
        url = f"http://{stack.http_targets[0]}/v1/chat/completions"
        base = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "temperature": 1.0, "seed": 1}
        async with others(stack, urls) as beside, httpx2.AsyncClient(timeout=60) as http:
            for name, fields in asked.items():
                began_s = time.perf_counter()
                status = (await http.post(url, json=base | fields)).status_code
                (served_s if status == 200 else refused_s)[name] = time.perf_counter() - began_s
                statuses[status] += 1
                now = {each: psutil.Process(pids[each]).memory_info().rss for each in before}
                grown = max(grown, *(now[each] - before[each] for each in before))
        report.note(f"statuses: {dict(sorted(statuses.items()))}")
        report.row("refused after", [*refused_s.values()], "s")
        report.row("served after", [*served_s.values()], "s")
        slowest = max(refused_s, key=refused_s.__getitem__)
        report.note(f"refused last: {slowest}, after {refused_s[slowest]:.2f} s")
        report.row("most memory that a service grew by", [grown / 2**20], "MiB")
        for label, seen in (("alone", alone), ("beside strangers", beside)):
            for name, times in seen.pings.items():
                report.row(f"longest answer on its health, {label}", [1e3 * max(times)], "ms", service=name)
            gaps = [1e3 * percentile(seen.gaps, 50), 1e3 * percentile(seen.gaps, 99), 1e3 * max(seen.gaps)]
            for name, value in zip(("p50", "p99", "longest"), gaps, strict=True):
                report.row(f"time between tokens, {label}, {name}", [value], "ms")
        longest_s = max(max(times) for times in beside.pings.values())
        report.ratio("asked for (1 s) / the slowest refusal", REFUSED_S / max(refused_s.values()), 1.0)
        report.ratio("asked for (100 ms) / the longest answer on health", BLOCKED_S / longest_s, 1.0)
        ended = sum(stack.pids().get(name) != pid for name, pid in pids.items())
        report.row("processes that ended", [ended], "")
        wrong = sum(count for status, count in statuses.items() if status not in (200, 400))
        report.ratio("requests without a wrong status", 1 - wrong / len(asked), 1.0)


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.hostile_grammars", measure, description=__doc__)
