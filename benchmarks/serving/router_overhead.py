"""What one router process adds and relays, with instances that answer at once.

The instances (benchmarks/support/instant_instances.py) have no engine, no queue and no KV, and run in their own
process, so only the router's work and gRPC's are measured. The clients run in this process. All share the machine, so
throughput per core is taken from the router's CPU time: tokens per CPU second at 64 streams of one token per engine
step, beside a plain pass-through of the same streams, run in turn. On a busy machine a CPU second does less (caches,
hyper-threads); the ratio to the pass-through is not affected. It depends on gRPC's event engine (GRPC_EXPERIMENTS),
with which the pass-through costs a third more and the router little more.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import uvloop
from grpc import aio

from benchmarks.support.harness import ROOT, Options, Report, run
from kaveri.local.process import ChildProcess
from kaveri.rpc.server import check_health, open_channel
from kaveri.v1 import (
    feed_pb2,
    feed_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
)
from tests.support.redis_fixture import free_port, run_redis

STREAMS = 64
STEP_S = 0.010
TARGET_TOKENS_PER_CORE = 15_000
REQUEST_WORKERS = 32
PROMPT = tuple(range(300, 332))
_START_TIMEOUT_S = 90.0


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(_measure(options, report))


async def _measure(options: Options, report: Report) -> None:
    repeats = options.choose(3, 2)
    tokens_per_stream = options.choose(500, 150)
    requests = options.choose(2_000, 400)
    report.workload = {
        "streams": STREAMS,
        "step_s": STEP_S,
        "tokens_per_stream": tokens_per_stream,
        "prompt_tokens": len(PROMPT),
        "requests": requests,
        "request_workers": REQUEST_WORKERS,
        "instances": "benchmarks.support.instant_instances: no engine, answers at once",
    }
    async with _stack(options.model) as stack:
        await _relaying(stack, report, repeats, tokens_per_stream)
        await _saturated(stack, report, repeats, tokens_per_stream)
        await _many_requests(stack, report, repeats, requests)
        await _added_ttft(stack, report, repeats, options.choose(300, 100))
        await _profile(stack, report, tokens_per_stream)


@dataclass
class _MeasuredRelay:
    """A process between clients and instances."""

    name: str
    process: psutil.Process
    child: ChildProcess
    stub: Any

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass
class _Stack:
    router: _MeasuredRelay
    pass_through: _MeasuredRelay
    instance: "_Direct"
    """The prefill instance, called without a router."""
    folder: Path
    """Temporary."""


class _Direct:
    """Submits prompts to an instance and reads their reports, as a router does."""

    def __init__(self, channel: aio.Channel) -> None:
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._stream: Any = feed_pb2_grpc.FeedServiceStub(channel).Follow(feed_pb2.FollowRequest(router_id="direct"))
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._stream.read()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.cancel()
        assert self._reading is not None
        await asyncio.wait((self._reading,))

    async def first_token(self, request_id: str) -> None:
        """Waits for the first token of a new request."""
        came = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        request = prefill_pb2.SubmitRequest(
            request_id=request_id,
            router_id="direct",
            token_ids=PROMPT,
            params=sampling_pb2.SamplingParams(max_tokens=1),
        )
        await self._prefill.Submit(request, timeout=10)
        async with asyncio.timeout(10):
            await came

    async def _read(self) -> None:
        while (message := await self._stream.read()) is not aio.EOF:
            for report in message.reports:
                self._waiting.pop(report.request_id).set_result(None)


@contextlib.asynccontextmanager
async def _stack(model: str) -> AsyncIterator[_Stack]:
    async with run_redis() as redis, contextlib.AsyncExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="kaveri-bench-")))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

        def start(name: str, *command: str) -> ChildProcess:
            child = ChildProcess.start(name, [sys.executable, *command], folder / f"{name}.log", environment)
            running.push_async_callback(child.stop, 10.0)
            return child

        instance_port, pass_port, router_port = free_port(), free_port(), free_port()
        address = f"127.0.0.1:{instance_port}"
        instances = ["-m", "benchmarks.support.instant_instances", "--model", model]
        router = ["services.router", "--model", model, "--port", str(router_port)]
        router += ["--redis-url", redis.url, "--log-level", "warning"]
        children = [
            start("instances", *instances, "--port", str(instance_port), "--redis-url", redis.url),
            start("pass-through", *instances, "--port", str(pass_port), "--pass-through", address),
            start("router", "-m", *router),
        ]
        for child, port in zip(children, (instance_port, pass_port, router_port), strict=True):
            await _until_healthy(child, f"127.0.0.1:{port}")

        async def relay(name: str, child: ChildProcess, port: int) -> _MeasuredRelay:
            channel = await running.enter_async_context(open_channel(f"127.0.0.1:{port}"))
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            found = _MeasuredRelay(name, psutil.Process(child.pid), child, stub)
            # Warm-up: connections, code paths, the first stream of tokens. Not counted.
            await _streams(found, 8, 50, STEP_S)
            return found

        channel = await running.enter_async_context(open_channel(address))
        yield _Stack(
            router=await relay("router", children[2], router_port),
            pass_through=await relay("pass-through", children[1], pass_port),
            instance=await running.enter_async_context(_Direct(channel)),
            folder=folder,
        )


async def _until_healthy(child: ChildProcess, address: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not await check_health(address, 1.0):
        if child.exit_status is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{child.name} does not start: {' '.join(child.last_lines(5))}")
        await asyncio.sleep(0.05)


@dataclass
class _Streamed:
    """What a set of streams carried, and what it cost the relay."""

    wall_s: float
    cpu_s: float
    tokens: int
    responses: int


async def _streams(relay: _MeasuredRelay, count: int, max_tokens: int, step_s: float) -> _Streamed:
    tokens = responses = 0
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, seed=int(step_s * 1e6))
    prompt = inference_pb2.TokenIds(ids=PROMPT)

    async def one() -> None:
        nonlocal tokens, responses
        # As the SDK does: an id of the caller's own, which the router claims before it places the request.
        request = inference_pb2.GenerateRequest(token_ids=prompt, params=params, request_id=uuid.uuid4().hex)
        async for response in relay.stub.Generate(request, timeout=120):
            responses += 1
            tokens += len(response.token_ids)

    cpu_s, started_s = relay.cpu_s(), time.monotonic()
    await asyncio.gather(*(one() for _ in range(count)))
    done = _Streamed(time.monotonic() - started_s, relay.cpu_s() - cpu_s, tokens, responses)
    assert tokens == count * max_tokens, (tokens, count, max_tokens)
    return done


async def _relaying(stack: _Stack, report: Report, repeats: int, max_tokens: int) -> None:
    runs: dict[str, list[_Streamed]] = {"router": [], "pass-through": []}
    for _ in range(repeats):
        for relay in (stack.pass_through, stack.router):
            runs[relay.name].append(await _streams(relay, STREAMS, max_tokens, STEP_S))
    per_core = {}
    for name, found in runs.items():
        labels = {"relay": name, "streams": STREAMS}
        report.row("CPU per token", [run.cpu_s / run.tokens * 1e6 for run in found], "us", **labels)
        report.row("tokens per response", [run.tokens / run.responses for run in found], "tokens", **labels)
        report.row("offered and relayed", [run.tokens / run.wall_s for run in found], "tokens/s", **labels)
        rates = [run.tokens / run.cpu_s for run in found]
        per_core[name] = report.row("tokens per CPU second", rates, "tokens/s/core", **labels)
    report.ratio("tokens_per_core_vs_15000", per_core["router"] / TARGET_TOKENS_PER_CORE, target=1.0)
    report.ratio("tokens_per_core_vs_pass_through", per_core["router"] / per_core["pass-through"])


async def _saturated(stack: _Stack, report: Report, repeats: int, max_tokens: int) -> None:
    found = [await _streams(stack.router, STREAMS, max_tokens, 0.0) for _ in range(repeats)]
    labels = {"relay": "router", "streams": STREAMS}
    report.row("as fast as it goes", [run.tokens / run.wall_s for run in found], "tokens/s", **labels)
    report.row("as fast as it goes, per response", [run.tokens / run.responses for run in found], "tokens", **labels)


async def _many_requests(stack: _Stack, report: Report, repeats: int, count: int) -> None:
    rates, costs = [], []

    async def worker() -> None:
        for _ in range(count // REQUEST_WORKERS):
            await _streams(stack.router, 1, 1, 0.0)

    for _ in range(repeats):
        cpu_s, started_s = stack.router.cpu_s(), time.monotonic()
        await asyncio.gather(*(worker() for _ in range(REQUEST_WORKERS)))
        done = count // REQUEST_WORKERS * REQUEST_WORKERS
        rates.append(done / (time.monotonic() - started_s))
        costs.append((stack.router.cpu_s() - cpu_s) / done * 1e6)
    report.row("requests of one token", rates, "requests/s", workers=REQUEST_WORKERS)
    report.row("CPU per request", costs, "us", workers=REQUEST_WORKERS)


async def _added_ttft(stack: _Stack, report: Report, repeats: int, count: int) -> None:
    async def direct(number: int) -> None:
        await stack.instance.first_token(f"direct-{number}")

    async def through_router(number: int) -> None:
        await _streams(stack.router, 1, 1, 0.0)

    async def times_ms(call: Callable[[int], Coroutine[Any, Any, None]]) -> tuple[float, float]:
        samples = []
        for number in range(count):
            started_s = time.perf_counter()
            await call(number)
            samples.append((time.perf_counter() - started_s) * 1e3)
        quantiles = statistics.quantiles(samples, n=100)
        return statistics.median(samples), quantiles[98]

    alone, routed = [], []
    for _ in range(repeats):
        alone.append(await times_ms(direct))
        routed.append(await times_ms(through_router))
    for position, name in enumerate(("p50", "p99")):
        report.row(f"TTFT {name}", [pair[position] for pair in alone], "ms", way="direct")
        report.row(f"TTFT {name}", [pair[position] for pair in routed], "ms", way="router")
        added = [there[position] - here[position] for here, there in zip(alone, routed, strict=True)]
        report.row(f"TTFT added {name}", added, "ms")


async def _profile(stack: _Stack, report: Report, max_tokens: int) -> None:
    """The three largest costs of relaying, sampled by `perf` over all threads of the router."""
    perf = shutil.which("perf")
    if perf is None:
        report.note("no profile: `perf` is not installed here")
        return
    samples = stack.folder / "perf.data"
    command = [perf, "record", "-q", "-F", "499", "-g", "-o", str(samples), "-p", str(stack.router.process.pid)]
    recording = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await _streams(stack.router, STREAMS, max_tokens, STEP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            recording.send_signal(signal.SIGINT)
        await recording.wait()
    in_objects = await _shares(perf, samples, "--no-children", "overhead", "dso")
    in_calls = await _shares(perf, samples, "--children", "overhead_children", "symbol")
    if not in_objects:
        report.note("no profile: `perf` may not sample here")
        return
    costs = {
        cost: max((share for name, share in in_calls.items() if call in name), default=0.0)
        for call, cost in _KERNEL_COSTS.items()
    }
    named_kernel_share = sum(costs.values())
    for name, share in in_objects.items():
        cost = next((cost for part, cost in _COSTS.items() if part in name), "everything else")
        costs[cost] = costs.get(cost, 0.0) + share
    costs[_COSTS["kernel"]] = max(0.0, costs.get(_COSTS["kernel"], 0.0) - named_kernel_share)
    ranked = sorted(costs.items(), key=lambda entry: -entry[1])
    for name, share in ranked:
        report.row("share of the router's CPU", [share], "%", cost=name)
    report.note("three largest costs of relaying: " + "; ".join(f"{name} {share:.0f}%" for name, share in ranked[:3]))


_KERNEL_COSTS = {
    "sys_sendmsg": "kernel: sendmsg, once per response",
    "ksys_write": "kernel: gRPC's completion thread waking the event loop",
    " __schedule": "kernel: switching between threads",
}
"""By what is on the stack."""
_COSTS = {
    "kernel": "kernel: the rest",
    "cygrpc": "gRPC core and its Cython layer",
    "libpython": "Python interpreter",
    "_message": "protobuf",
    "loop.cpython": "event loop (uvloop)",
}
"""By the file that the code is in."""


async def _shares(perf: str, samples: Path, mode: str, figure: str, key: str) -> dict[str, float]:
    """Percent of all samples by `key`, as `perf report` counts them."""
    command = [
        perf,
        "report",
        "-i",
        str(samples),
        "--stdio",
        "-g",
        "none",
        mode,
        "--sort",
        key,
        "-F",
        f"{figure},{key}",
    ]
    reading = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await reading.communicate()
    shares: dict[str, float] = {}
    for line in output.decode(errors="replace").splitlines():
        share, _, name = line.strip().partition("%")
        if not line.startswith("#") and name:
            shares[name.strip()] = float(share)
    return shares


if __name__ == "__main__":
    run("serving.router_overhead", measure, description=__doc__)
