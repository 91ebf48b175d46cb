"""A decode instance that is frozen, or cut off from all others: when is it noticed, and when do its requests go on?

Real processes: a router, a prefill and three decode instances on the timed engine, with replicas. An instance with
running requests is stopped (SIGSTOP) for three seconds, or a proxy in front of it lets nothing pass for as long; then
it comes back, and the next one is taken. Noticed: from the fault to the router's log line. Going on: from the fault to
the first token behind the pause, of each request that paused. An instance that is stopped for 0.3 s must not be
suspected. KV travels over other sockets, so a cut stops calls and token streams, and no copy.
"""

import asyncio
import contextlib
import datetime
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import (
    TIMEOUT_S,
    AnswerStream,
    busiest,
    go_on,
    metric,
    percentile,
    prompt_of,
    replicas_of,
    wait_until,
)
from benchmarks.support.cut_links import ADVERTISED_HOST, cut_links
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.domain.view import InstanceState
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from tests.support.tcp_relay import TcpRelay

LATENCY_MODEL = "opt-13b-a100-tp1"
REQUESTS = 32
CONTEXT = 300
MODEL_LEN = 8_192
MAX_TOKENS = 7_000
METRICS_PORT = 19_380
DECODES = ("decode-0", "decode-1", "decode-2")
FAULT_S = 3.0
SHORT_S = 0.3
PAUSED_S = 0.45
"""Between two pieces: a request that waits so long is one of those that were hit."""
NOTICED_S, GOING_ON_S = 0.6, 1.0
BACK_WITHIN_S = 60.0
MODEL = FakeModel(max_model_len=MODEL_LEN, verify=False)


@dataclass
class SilenceFaults:
    """What faults of one kind led to."""

    noticed_s: list[float] = field(default_factory=list)
    going_on_s: list[float] = field(default_factory=list)
    unnoticed: int = 0


@contextlib.asynccontextmanager
async def frozen(stack: LocalStack, links: dict[str, TcpRelay], name: str) -> AsyncIterator[None]:
    """The process does not run."""
    os.killpg(stack.process(name).pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(stack.process(name).pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def cut_off(stack: LocalStack, links: dict[str, TcpRelay], name: str) -> AsyncIterator[None]:
    """The process runs, and no call reaches it."""
    links[name].cut()
    try:
        yield
    finally:
        links[name].mend()


KINDS = {"frozen": frozen, "cut off": cut_off}


def broken_at_s(stack: LocalStack, from_s: float) -> float | None:
    """When the router gave up a token stream after this moment of time.time()."""
    for line in stack.process("router-0").log_path.read_text(errors="replace").splitlines():
        if '"stream_broken"' not in line:
            continue
        at_s = datetime.datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
        if at_s >= from_s:
            return at_s
    return None


def is_back(stack: LocalStack) -> bool:
    """Whether all instances are in the view, ready, and each request runs at one of them only."""
    found = [stack.view().instances.get(name) for name in DECODES]
    loads = [status.load for status in found if status is not None and status.load.state is InstanceState.READY]
    return len(loads) == len(DECODES) and sum(load.running_requests for load in loads) == REQUESTS


async def one_fault(
    stack: LocalStack, links: dict[str, TcpRelay], kind: str, streams: list[AnswerStream], faults: SilenceFaults
) -> None:
    name = busiest(stack, [name for name in DECODES if name in stack.view().instances])
    began_s, clock_s = time.monotonic(), time.time()
    async with KINDS[kind](stack, links, name):
        await asyncio.sleep(FAULT_S)
    ended_s = time.monotonic()
    await go_on(streams, ended_s, BACK_WITHIN_S)
    at_s = broken_at_s(stack, clock_s)
    if at_s is None:
        faults.unnoticed += 1
    else:
        faults.noticed_s.append(at_s - clock_s)
    hit = [stream for stream in streams if stream.pause_s(began_s) >= PAUSED_S]
    faults.going_on_s += [stream.next_s(began_s) for stream in hit]
    await wait_until(lambda: is_back(stack), BACK_WITHIN_S)
    await replicas_of(stack, DECODES, REQUESTS)


async def short_freezes(stack: LocalStack, count: int) -> float:
    """Suspicions after stops that are too short for one."""
    before = metric(stack, "kaveri_router_suspicions_total", ["router-0"])
    for _ in range(count):
        async with frozen(stack, {}, busiest(stack, DECODES)):
            await asyncio.sleep(SHORT_S)
        await asyncio.sleep(1.0)
    return metric(stack, "kaveri_router_suspicions_total", ["router-0"]) - before


async def measure_async(options: Options, report: Report) -> None:
    count = options.choose(8, 2)
    report.workload = {
        "engine": "timed",
        "latency_model": LATENCY_MODEL,
        "requests": REQUESTS,
        "context": CONTEXT,
        "faults_of_a_kind": count,
        "fault_s": FAULT_S,
    }
    config = StackConfig.of(
        engine="timed",
        latency_model=LATENCY_MODEL,
        max_model_len=MODEL_LEN,
        kv_cache_memory="128MiB",
        replication="spread",
        replica_memory="128MiB",
        max_batch=64,
        prefill_count=1,
        decode_count=len(DECODES),
        metrics_port=METRICS_PORT,
        restart=False,
        drain_timeout_s=2.0,
        # One request goes through all the faults.
        router_flags=("--max-attempts", str(4 * count + 4)),
        decode_flags=("--advertise-host", ADVERTISED_HOST),
    )
    found = {kind: SilenceFaults() for kind in KINDS}
    async with LocalStack(config) as stack:
        addresses = {name: stack.view().instances[name].record.address for name in DECODES}
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
        async with cut_links(ports.values()) as by_port, AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client:
            links = {name: by_port[port] for name, port in ports.items()}
            streams = [AnswerStream(f"long-{number}", prompt_of(CONTEXT, number)) for number in range(REQUESTS)]
            reading = [asyncio.create_task(stream.read(client, MAX_TOKENS)) for stream in streams]
            await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= 20, BACK_WITHIN_S)
            await replicas_of(stack, DECODES, REQUESTS)
            suspicions = await short_freezes(stack, count)
            for _ in range(count):
                for kind, faults in found.items():
                    await one_fault(stack, links, kind, streams, faults)
            for stream in streams:
                await client.cancel(stream.request_id)
            await asyncio.gather(*reading)
    _report(report, found, streams)
    report.note(f"suspicions after {count} stops of {SHORT_S:g} s: {suspicions:.0f}")
    report.ratio(f"1 / (1 + suspicions) after stops of {SHORT_S:g} s", 1 / (1 + suspicions), 1.0)


def _report(report: Report, found: dict[str, SilenceFaults], streams: list[AnswerStream]) -> None:
    for kind, faults in found.items():
        report.row("noticed", faults.noticed_s, "s", fault=kind)
        report.row("going on", faults.going_on_s, "s", fault=kind)
        noticed_s, going_on_s = percentile(faults.noticed_s, 99), percentile(faults.going_on_s, 99)
        report.note(
            f"{kind}: noticed p99 {noticed_s:.3f} s, going on p99 {going_on_s:.3f} s; not noticed: {faults.unnoticed}"
        )
        report.ratio(f"asked for ({NOTICED_S:g} s) / noticed p99, {kind}", NOTICED_S / noticed_s, 1.0)
        report.ratio(f"asked for ({GOING_ON_S:g} s) / going on p99, {kind}", GOING_ON_S / going_on_s, 1.0)
    recomputed = [
        stream.timing.recomputed_tokens / max(1, stream.timing.attempts - 1) for stream in streams if stream.timing
    ]
    attempts = [stream.timing.attempts for stream in streams if stream.timing]
    report.row("tokens computed again per fault", recomputed, "tokens", of="requests")
    report.row("attempts", attempts, "", of="requests")
    report.ratio("answers exact, of all", sum(stream.is_exact(MODEL) for stream in streams) / len(streams), 1.0)


def measure(options: Options, report: Report) -> None:
    """Freezes decode instances and cuts them off, one after the other."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.silence", measure, description=__doc__)
