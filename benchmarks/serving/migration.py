"""How long a request pauses when its decode instance drains, and how long the drain takes.

Real processes: a router, a prefill and two decode instances, each of which holds the copies of the other's requests.
The fake engine takes the same time for each step whatever the context, so that what grows with the context is the
migration's. All requests run on one instance; it drains until none is left there, takes requests again, and then the
other one drains. The pause of a request is its longest time between two pieces around the drain.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import (
    TIMEOUT_S,
    AnswerStream,
    busiest,
    go_on,
    percentile,
    prompt_of,
    wait_until,
    whole_replicas_of,
)
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.server import open_channel
from kaveri.v1 import instance_pb2
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub

REQUESTS = 32
CONTEXTS = (256, 4_096)
STEP_S = 0.025
RECOMPUTED_TOKEN_S = 140e-6
"""What DistServe's fit of OPT-13B on an A100 takes for a prompt token in a chunk of 512."""
KV_TOKEN_BYTES = 4096
MODEL_LEN = 8_192
MAX_TOKENS = 4_000
LAG_TOKENS = 32
"""Of a copy that is whole: two blocks."""
METRICS_PORT = 19_400
DECODES = ("decode-0", "decode-1")
RUNNING_S, DRAIN_S = 200.0, 60.0
RPC_S = 10.0
LOOK_S = 0.02
PAUSE_STEPS, PAUSE_S = 3, 0.02
ASKED_DRAIN_S = 2.0
GROWTH = 1.3
MODEL = FakeModel(max_model_len=MODEL_LEN, verify=False)


@dataclass
class Drains:
    """What the drains with one length of prompts took."""

    pauses_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """Between two pieces of a request, in the second before each drain: what a step takes on a busy machine."""
    drains_s: list[float] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    """Tokens, of each request in all drains."""
    attempts: list[int] = field(default_factory=list)
    wrong: int = 0


async def drained_s(target: str, name: str) -> float:
    """Drains an instance; the seconds until it has no request left."""
    async with open_channel(target) as channel:
        stub = InstanceServiceStub(channel)
        began_s = time.monotonic()
        async with asyncio.timeout(DRAIN_S):
            request = instance_pb2.DrainRequest(instance_id=name)
            while (await stub.Drain(request, timeout=RPC_S)).requests:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        return time.monotonic() - began_s


async def undrain(target: str, name: str) -> None:
    """Lets it take requests again."""
    async with open_channel(target) as channel:
        await InstanceServiceStub(channel).Drain(instance_pb2.DrainRequest(instance_id=name, undo=True), timeout=RPC_S)


async def measure_context(context: int, count: int) -> Drains:
    found = Drains()
    config = StackConfig.of(
        engine="fake",
        fake_verify_kv=False,
        fake_kv_token_bytes=KV_TOKEN_BYTES,
        max_model_len=MODEL_LEN,
        kv_cache_memory="1GiB",
        replication="pair",
        replica_memory="1GiB",
        max_batch=64,
        decode_placement="imbalance",
        prefill_count=1,
        decode_count=len(DECODES),
        metrics_port=METRICS_PORT,
        restart=False,
        drain_timeout_s=2.0,
        prefill_flags=("--chunk-tokens", "4096"),
        decode_flags=("--fake-step-s", str(STEP_S), "--fake-prefill-token-s", str(RECOMPUTED_TOKEN_S)),
    )
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client:
        streams = [AnswerStream(f"long-{number}", prompt_of(context, number)) for number in range(REQUESTS)]
        reading = [asyncio.create_task(stream.read(client, MAX_TOKENS)) for stream in streams]
        await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= 20, RUNNING_S)
        for _ in range(count):
            await whole_replicas_of(stack, DECODES, REQUESTS, LAG_TOKENS)
            owner = busiest(stack, DECODES)
            began_s = time.monotonic()
            found.steps_s += [gap_s for stream in streams for gap_s in stream.gaps_s(began_s - 1.0)]
            found.drains_s.append(await drained_s(stack.target, owner))
            await go_on(streams, time.monotonic(), DRAIN_S)
            found.pauses_s += [stream.pause_s(began_s) for stream in streams]
            await undrain(stack.target, owner)
        left = MAX_TOKENS - max(len(stream.token_ids) for stream in streams)
        assert left >= 1_000, f"the last drain had requests with {left} tokens to go"
        for stream in streams:
            await client.cancel(stream.request_id)
        await asyncio.gather(*reading)
    timings = [stream.timing for stream in streams if stream.timing is not None]
    found.recomputed = [timing.recomputed_tokens for timing in timings]
    found.attempts = [timing.attempts for timing in timings]
    found.wrong = sum(not stream.is_exact(MODEL) for stream in streams)
    return found


async def measure_async(options: Options, report: Report) -> None:
    count = options.choose(6, 2)
    report.workload = {
        "engine": "fake",
        "requests": REQUESTS,
        "contexts": list(CONTEXTS),
        "step_s": STEP_S,
        "recomputed_token_s": RECOMPUTED_TOKEN_S,
        "kv_token_bytes": KV_TOKEN_BYTES,
        "drains": count,
    }
    found: dict[int, Drains] = {}
    for context in CONTEXTS:
        found[context] = await measure_context(context, count)
        _report(report, context, count, found[context])
    short, long = (percentile(found[context].pauses_s, 99) for context in CONTEXTS)
    report.ratio(f"{GROWTH} x pause p99, context {CONTEXTS[0]} / {CONTEXTS[1]}", GROWTH * short / long, 1.0)


def _report(report: Report, context: int, count: int, drains: Drains) -> None:
    step_s = statistics.median(drains.steps_s)
    asked_s, asked_here_s = (PAUSE_STEPS * step + PAUSE_S for step in (STEP_S, max(STEP_S, step_s)))
    report.row("pause of a request", [1e3 * pause_s for pause_s in drains.pauses_s], "ms", context=context)
    report.row("step before a drain", [1e3 * gap_s for gap_s in drains.steps_s], "ms", context=context)
    report.row("drain, until no request is left", drains.drains_s, "s", context=context)
    recomputed = [tokens / count for tokens in drains.recomputed]
    report.row("tokens computed again per migration", recomputed, "tokens", context=context)
    report.row("attempts of a request", drains.attempts, "", context=context)
    p99_s = percentile(drains.pauses_s, 99)
    report.note(
        f"context {context}: pause p99 {1e3 * p99_s:.0f} ms, asked for {1e3 * asked_s:.0f} ms, or "
        f"{1e3 * asked_here_s:.0f} ms with steps of {1e3 * step_s:.0f} ms, as they were before the drains; slowest "
        f"drain {max(drains.drains_s):.2f} s; answers that were wrong: {drains.wrong}"
    )
    report.ratio(f"asked for (3 steps + 20 ms) / pause p99, context {context}", asked_s / p99_s, 1.0)
    report.ratio(f"asked for (3 steps as measured + 20 ms) / pause p99, context {context}", asked_here_s / p99_s, 1.0)
    report.ratio(f"asked for (2 s) / slowest drain, context {context}", ASKED_DRAIN_S / max(drains.drains_s), 1.0)
    report.ratio(f"answers exact, of all, context {context}", 1 - drains.wrong / REQUESTS, 1.0)


def measure(options: Options, report: Report) -> None:
    """Drains two decode instances in turn, with requests of two lengths."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.migration", measure, description=__doc__)
