"""What length prediction costs a request: beside prefill (parallel), before the queue (sequential), and not at all.

TetriInfer's two modes (arXiv 2401.11181, section 3.3.2), on kaveri-tiny with its bundled predictor. Each mode has its
own stack of router, prefill, decode and predictor processes and gets the same prompts in a closed loop. Answers end at
their end-of-sequence token, so no length is known beforehand.
"""

import asyncio
import contextlib
import json
import statistics
from typing import Any

from benchmarks.serving.end_to_end import closed_loop
from benchmarks.support.bursts import read_metric
from benchmarks.support.harness import ROOT, Options, Report, run
from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import bundled_predictor
from tests.support.redis_fixture import free_port

MODES = ("off", "parallel", "sequential")
CONCURRENCIES = (1, 8)
_PROMPTS = ROOT / "training" / "predictor" / "held_out.jsonl"
_TIMEOUT_S = 120.0
_MAX_TOKENS = 64


async def measure_async(options: Options, report: Report) -> None:
    repeats, count = options.choose(3, 1), options.choose(48, 16)
    lines = _PROMPTS.read_text().splitlines()[: repeats * count]
    prompts = [{key: given[key] for key in ("prompt", "messages") if key in given} for given in map(json.loads, lines)]
    report.workload = {"model": options.model, "prompts": count, "repeats": repeats, "max_tokens": _MAX_TOKENS}
    rounds: dict[tuple[str, int], list[list[Completion]]] = {}
    ports = {mode: free_port() for mode in MODES}
    async with contextlib.AsyncExitStack() as stacks:
        clients: dict[str, AsyncClient] = {}
        for mode, port in ports.items():
            config = StackConfig.of(
                model=options.model,
                prefill_count=1,
                decode_count=1,
                predictor=bundled_predictor(options.model) or "",
                prefill_flags=("--prediction", mode, "--metrics-port", str(port)),
            )
            stack = await stacks.enter_async_context(LocalStack(config))
            clients[mode] = await stacks.enter_async_context(AsyncClient(stack.target))
            await ask(clients[mode], 1, prompts[: max(CONCURRENCIES)])  # warms up
        for concurrency in CONCURRENCIES:
            for repeat in range(repeats):
                for mode in MODES:  # in turns, so that drift of the machine hits all
                    answers = await ask(clients[mode], concurrency, prompts[repeat * count :][:count])
                    rounds.setdefault((mode, concurrency), []).append(answers)
        for mode in MODES[1:]:
            for outcome in ("used", "late", "failed", "none"):
                figure = await asyncio.to_thread(read_metric, ports[mode], "kaveri_predictions_total", outcome=outcome)
                report.row("predictions", [figure], "requests", mode=mode, outcome=outcome)
    ttft_ms: dict[tuple[str, int], list[float]] = {}
    for (mode, concurrency), taken in rounds.items():
        ttft_ms[mode, concurrency] = [statistics.median(1e3 * one.timing.ttft_s for one in each) for each in taken]
        jct_ms = [statistics.mean(1e3 * one.timing.e2e_s for one in each) for each in taken]
        report.row("TTFT p50", ttft_ms[mode, concurrency], "ms", mode=mode, concurrency=concurrency)
        report.row("mean JCT", jct_ms, "ms", mode=mode, concurrency=concurrency)
    for mode in MODES[1:]:
        for concurrency in CONCURRENCIES:
            pairs = zip(ttft_ms[mode, concurrency], ttft_ms["off", concurrency], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            report.ratio(f"TTFT p50, {mode} / off, concurrency {concurrency}", ratio)
    report.note("three stacks run at the same time and are measured in turns; the others only send heartbeats")
    report.note("predictor, prefill, decode, router, Redis and client share this machine's cores")


async def ask(client: AsyncClient, concurrency: int, prompts: list[dict[str, Any]]) -> list[Completion]:
    """The answers to all prompts, `concurrency` in flight."""
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)

    async def one(prompt: dict[str, Any]) -> Completion:
        return await client.generate(**prompt, params=params, timeout_s=_TIMEOUT_S)

    _, answers = await closed_loop(concurrency, prompts, one)
    return answers


def measure(options: Options, report: Report) -> None:
    """Each mode with one request in flight, and with eight."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.prediction_modes", measure, description=__doc__)
