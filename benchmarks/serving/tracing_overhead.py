"""What tracing costs in CPU time: whole stacks without it, with one request in a hundred traced, and with all traced.

Three stacks of real processes on the fake engine stand side by side: a router, a prefill and a decode instance each.
They take turns under the same closed loop; the others are idle. Spans go to a receiver in a process of its own, which
drops them. CPU time of a stack's processes is counted, over the tokens of its turn: tokens per second would count the
load generator too. What is not sampled differs from no tracing only in the router.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import psutil

from benchmarks.support.answer_streams import TIMEOUT_S, AnswerStream, prompt_of
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

SHARES = {"off": None, "1 % traced": "0.01", "all traced": "1"}
IN_FLIGHT = 32
PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
STEP_S = 0.01
MOST = 1.02
_RECEIVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages, trace_service_pb2_grpc as services

class Dropped(services.TraceServiceServicer):
    def Export(self, request, context):
        return messages.ExportTraceServiceResponse()

server = grpc.server(ThreadPoolExecutor(2))
services.add_TraceServiceServicer_to_server(Dropped(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
server.stop(None)
"""


@contextlib.contextmanager
def span_receiver() -> Iterator[str]:
    """A process that takes spans and drops them; its URL."""
    child = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{child.stdout.readline().strip()}"
    finally:
        child.communicate(timeout=30)


@contextlib.contextmanager
def tracing_to(url: str, share: str | None) -> Iterator[None]:
    """Processes that are started within trace this share of requests. None: nothing."""
    named = (
        {}
        if share is None
        else {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": share,
        }
    )
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            del os.environ[name]


async def one_turn(stack: LocalStack, client: AsyncClient, count: int, first_number: int) -> float:
    """CPU time of the stack's processes for each token, in microseconds."""
    waiting = (
        AnswerStream(f"request-{number}", prompt_of(PROMPT_TOKENS, number))
        for number in range(first_number, first_number + count)
    )

    async def ask() -> None:
        for stream in waiting:
            await stream.read(client, ANSWER_TOKENS)

    began_s = _cpu_s(stack)
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(ask())
    return 1e6 * (_cpu_s(stack) - began_s) / (count * ANSWER_TOKENS)


def _cpu_s(stack: LocalStack) -> float:
    times = [psutil.Process(pid).cpu_times() for name, pid in stack.pids().items() if name != "redis"]
    return sum(each.user + each.system for each in times)


async def measure_async(options: Options, report: Report) -> None:
    repeats, count = options.choose(8, 1), options.choose(10 * IN_FLIGHT, IN_FLIGHT)
    report.workload = {
        "engine": "fake",
        "step_s": STEP_S,
        "in_flight": IN_FLIGHT,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "requests_of_a_turn": count,
    }
    found: dict[str, list[float]] = {name: [] for name in SHARES}
    async with contextlib.AsyncExitStack() as opened:
        url = opened.enter_context(span_receiver())
        stacks: dict[str, tuple[LocalStack, AsyncClient]] = {}
        flags = ("--fake-step-s", str(STEP_S))
        for name, share in SHARES.items():
            config = StackConfig.of(
                engine="fake", prefill_count=1, decode_count=1, restart=False, prefill_flags=flags, decode_flags=flags
            )
            with tracing_to(url, share):
                stack = await opened.enter_async_context(LocalStack(config))
            client = await opened.enter_async_context(AsyncClient(stack.targets, timeout_s=TIMEOUT_S))
            stacks[name] = stack, client
            await one_turn(stack, client, IN_FLIGHT, 0)
        for repeat in range(repeats):
            # Which one goes first changes, so that drift of the machine hits all.
            for name in sorted(stacks, reverse=bool(repeat % 2)):
                found[name].append(await one_turn(*stacks[name], count, (1 + repeat) * 10_000))
    for name, values in found.items():
        report.row("CPU time of the stack", values, "us/token", tracing=name)
    for name in list(SHARES)[1:]:
        over = [on / off for on, off in zip(found[name], found["off"], strict=True)]
        report.row("CPU time over without", over, "", tracing=name)
        if name == "1 % traced":
            report.ratio(f"asked for ({MOST}) / {name} over off, CPU per token", MOST / statistics.median(over), 1.0)


def measure(options: Options, report: Report) -> None:
    """Three stacks in turn."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.tracing_overhead", measure, description=__doc__)
