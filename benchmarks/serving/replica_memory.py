"""The memory that replicas take: their pool, everything else with 256 requests, and the growth over many requests.

Real processes: a router, a prefill and two decode instances with the fake engine, once without replication and once
with it. 256 requests run, half of them on each decode instance; the memory of both instances, less that of the same
stack without replication and less the pools that were asked for, is everything else: tables, threads, connections, and
the staging memory of copies. Then short requests come and go, each with a copy, and the memory is looked at again and
again. Memory that processes share counts once.
"""

import asyncio
import itertools
from dataclasses import dataclass

from benchmarks.support.answer_streams import TIMEOUT_S, AnswerStream, metric, prompt_of, replicas_of, wait_until
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.process_memory import proportional_bytes
from kaveri import AsyncClient, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

REQUESTS = 256
CONTEXT = 320
STEP_S = 0.5
MODEL_LEN = 2_048
POOL_BYTES = 128 * 2**20
METRICS_PORT = 19_420
DECODES = ("decode-0", "decode-1")
ELSE_BYTES = 64 * 2**20
SHORT_PROMPT_TOKENS, SHORT_TOKENS = 32, 24
CLIENTS = 64
WARM_REQUESTS = 500
ALL_THERE_S = 240.0
GROWTH = 1.02
"""Of the memory of a decode instance over all short requests that counts as none."""
MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Of the prefill and decode instances of one stack, in bytes."""

    idle: int
    full: int
    """With all requests running."""
    replicas: int = 0
    """Copies then."""
    pool: int = 0
    """Of their replica stores, used and free, as their metrics say."""


def used_bytes(stack: LocalStack) -> int:
    """Of the processes that have KV: prefill maps the pools of the decode instances."""
    return proportional_bytes(stack.process(name).pid for name in ("prefill-0", *DECODES))


def stack_config(mode: str, metrics_port: int, step_s: float) -> StackConfig:
    """mode: of --replication."""
    return StackConfig.of(
        engine="fake",
        fake_verify_kv=False,
        max_model_len=MODEL_LEN,
        kv_cache_memory=POOL_BYTES,
        replication=mode,
        replica_memory=POOL_BYTES,
        replica_min_tokens=16,
        max_batch=REQUESTS,
        prefill_count=1,
        decode_count=len(DECODES),
        metrics_port=metrics_port,
        restart=False,
        drain_timeout_s=2.0,
        decode_flags=("--fake-step-s", str(step_s)),
    )


async def with_requests(mode: str) -> Memory:
    """The memory with all requests running."""
    async with (
        LocalStack(stack_config(mode, METRICS_PORT, STEP_S)) as stack,
        AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client,
    ):
        await AnswerStream("warm", prompt_of(CONTEXT, REQUESTS)).read(client, 20)
        idle = used_bytes(stack)
        streams = [AnswerStream(f"long-{number}", prompt_of(CONTEXT, number)) for number in range(REQUESTS)]
        reading = [asyncio.create_task(stream.read(client, MODEL_LEN - CONTEXT)) for stream in streams]
        await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= 8, ALL_THERE_S)
        if mode != "off":
            await replicas_of(stack, DECODES, REQUESTS)
        full = used_bytes(stack)
        replicas = metric(stack, "kaveri_replicas_held", DECODES)
        pool = metric(stack, "kaveri_replica_bytes", DECODES)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return Memory(idle, full, int(replicas), int(pool))


async def over_requests(count: int, looks: int) -> tuple[list[int], int, int]:
    """The memory after each of `looks` equal parts of so many short requests, the first of which follow a warm-up; the
    copies that were made of them, and those that are left at the end."""
    async with (
        LocalStack(stack_config("spread", METRICS_PORT + 10, 0.005)) as stack,
        AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client,
    ):
        numbers = itertools.count()
        params = SamplingParams(max_tokens=SHORT_TOKENS, temperature=0, ignore_eos=True)

        async def ask_below(end: int) -> None:
            while (number := next(numbers)) < end:
                prompt = prompt_of(SHORT_PROMPT_TOKENS, number)
                await client.generate(prompt_token_ids=prompt, params=params, timeout_s=TIMEOUT_S)

        sizes: list[int] = []
        done = 0
        for part in [WARM_REQUESTS, *[count // looks] * looks]:
            numbers = itertools.count(done)
            done += part
            await asyncio.gather(*(ask_below(done) for _ in range(CLIENTS)))
            sizes.append(used_bytes(stack))
        copies = int(metric(stack, "kaveri_replica_opens_total", DECODES))
        await wait_until(lambda: not metric(stack, "kaveri_replicas_held", DECODES), ALL_THERE_S)
        return sizes, copies, int(metric(stack, "kaveri_replicas_held", DECODES))


async def measure_async(options: Options, report: Report) -> None:
    repeats, count = options.choose(2, 1), options.choose(10_000, 500)
    report.workload = {
        "engine": "fake",
        "requests": REQUESTS,
        "context": CONTEXT,
        "kv_cache_memory": POOL_BYTES,
        "replica_memory": POOL_BYTES,
        "short_requests": count,
        "short_prompt_tokens": SHORT_PROMPT_TOKENS,
        "short_answer_tokens": SHORT_TOKENS,
    }
    off: list[Memory] = []
    on: list[Memory] = []
    for _ in range(repeats):
        off.append(await with_requests("off"))
        on.append(await with_requests("spread"))
    for name, found in (("off", off), ("spread", on)):
        for load in ("idle", "full"):
            sizes = [getattr(memory, load) / MIB for memory in found]
            report.row("memory of a prefill and two decode instances", sizes, "MiB", replication=name, load=load)
    beyond = [(ours.full - theirs.full) / len(DECODES) - POOL_BYTES for ours, theirs in zip(on, off, strict=True)]
    report.row("beyond the replica pool", [size / MIB for size in beyond], "MiB", of="a decode instance")
    held = [memory.replicas for memory in on]
    report.note(f"copies held by both instances: {held}, of {REQUESTS} requests")
    pool = on[0].pool / len(DECODES)
    report.ratio("replica pool / asked for", pool / POOL_BYTES, 1.0)
    report.ratio("asked for / replica pool", POOL_BYTES / pool, 1.0)
    report.ratio("asked for (64 MiB) / everything else", ELSE_BYTES / max(MIB, *beyond), 1.0)
    sizes, copies, left = await over_requests(count, options.choose(10, 2))
    shown_sizes = [size / MIB for size in sizes]
    report.row(
        "memory of a prefill and two decode instances", shown_sizes, "MiB", replication="spread", load="short requests"
    )
    shown = ", ".join(f"{size:.1f}" for size in shown_sizes)
    report.note(f"MiB after {WARM_REQUESTS} requests and after each further {count // (len(sizes) - 1)}: {shown}")
    report.note(f"copies asked for in {WARM_REQUESTS + count} short requests: {copies}; left at the end: {left}")
    report.ratio(
        f"{GROWTH} x memory after {WARM_REQUESTS} short requests / after {count} more",
        GROWTH * sizes[0] / sizes[-1],
        1.0,
    )


def measure(options: Options, report: Report) -> None:
    """The same load without replicas and with them, then many short requests."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.replica_memory", measure, description=__doc__)
