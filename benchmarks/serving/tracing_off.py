"""What the code of tracing costs while tracing is off: its share of the CPU time of a request.

With tracing off, a request runs code of tracing when it begins and ends at each process, and none for each token. That
code runs by itself here, in this process. Its CPU time is set against that of a request over a whole stack of real
processes on the fake engine. Two stacks, with and without this code, would differ by far less than their spread.
"""

import asyncio
import contextlib
import statistics
import time
from typing import Any, cast

from benchmarks.serving.tracing_overhead import ANSWER_TOKENS, IN_FLIGHT, PROMPT_TOKENS, STEP_S, one_turn
from benchmarks.support.answer_streams import TIMEOUT_S
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.telemetry.tracing import (
    calls_below,
    current_traceparent,
    is_tracing,
    spans_below,
    trace_fields,
    traceparent_of,
)
from services.router.server import GenerateProgress, _traced

LEAST = 0.999
COMPARISONS = 24
"""With None, where a request's span would be: one for each action of prefill, decode and router on a request without a
fault, and some more."""
_HEADERS = tuple((f"header-{number}", "value") for number in range(8))


class _NotTraced:
    """Stands for a request that is not traced."""

    spans: Any = None


def trace_nothing(progress: GenerateProgress, traced: _NotTraced) -> None:
    """What one request over HTTP runs of tracing, in all processes."""
    # The gateway, and its client of the router.
    traceparent = traceparent_of(_HEADERS)
    with calls_below("POST /v1/completions", traceparent, 0.0, request_id="request"):
        current_traceparent()
        # The router.
        with _traced(progress, cast(Any, None), 0.0) if is_tracing() else contextlib.nullcontext():
            for _ in range(COMPARISONS):
                if traced.spans is not None:
                    raise AssertionError
        trace_fields(None)
    trace_fields(None)
    # Prefill and decode.
    for _ in range(2):
        spans_below("")
        trace_fields(None)


def cpu_us_of_code(calls: int) -> float:
    """CPU microseconds of trace_nothing()."""
    progress, traced = GenerateProgress("request"), _NotTraced()
    began_s = time.process_time()
    for _ in range(calls):
        trace_nothing(progress, traced)
    return 1e6 * (time.process_time() - began_s) / calls


async def measure_async(options: Options, report: Report) -> None:
    assert not is_tracing()
    repeats, count = options.choose(8, 1), options.choose(10 * IN_FLIGHT, IN_FLIGHT)
    calls = options.choose(100_000, 10_000)
    report.workload = {
        "engine": "fake",
        "step_s": STEP_S,
        "in_flight": IN_FLIGHT,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "requests_of_a_turn": count,
        "calls": calls,
    }
    flags = ("--fake-step-s", str(STEP_S))
    config = StackConfig.of(
        engine="fake", prefill_count=1, decode_count=1, restart=False, prefill_flags=flags, decode_flags=flags
    )
    code_us, request_us = [], []
    async with contextlib.AsyncExitStack() as opened:
        stack = await opened.enter_async_context(LocalStack(config))
        client = await opened.enter_async_context(AsyncClient(stack.targets, timeout_s=TIMEOUT_S))
        await one_turn(stack, client, IN_FLIGHT, 0)
        cpu_us_of_code(calls // 10)
        for repeat in range(repeats):
            code_us.append(cpu_us_of_code(calls))
            request_us.append(ANSWER_TOKENS * await one_turn(stack, client, count, (1 + repeat) * 10_000))
    report.row("CPU time of tracing's code, off", code_us, "us/request")
    report.row("CPU time of the stack", request_us, "us/request")
    shares = [code / request for code, request in zip(code_us, request_us, strict=True)]
    report.row("tracing's code over the stack", shares, "")
    report.ratio("without tracing's code / with it, off, CPU per request", 1 - statistics.median(shares), LEAST)


def measure(options: Options, report: Report) -> None:
    """A stack, and the code by itself, in turn."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.tracing_off", measure, description=__doc__)
