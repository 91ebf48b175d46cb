"""What a change of owner costs: the pause of the requests that change their instance, and the steps of the others.

Real processes: a router and two instances of both phases, a pair, which keep the KV of requests that leave them and
copies of each other's requests in their pools. The fake engine takes the same time for each step whatever the context,
so that what grows with the context is the change's. All requests have whole copies. One instance is ordered to prefill
only, so that all its requests change to the other, which decodes its own meanwhile (the bystanders). It is ordered to
decode again, and gets some back; then it is the other's turn. At the end one of the two is killed. Beside it, the same
with copies in host memory.

The pause is the longest time between two pieces of a request around the change, less the time of a step. The instance
that goes on is in a step when the request arrives, as a rule, and the request waits for the next one.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import (
    TIMEOUT_S,
    AnswerStream,
    busiest,
    go_on,
    metric,
    percentile,
    prompt_of,
    wait_until,
    whole_replicas_of,
)
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.domain.view import BOTH_PHASES, DrainWay, Phase
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.server import open_channel
from kaveri.v1 import instance_pb2
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.wire.messages import drain_way_to_proto, phases_to_proto

REQUESTS = 16
CONTEXTS = (256, 2_048, 7_000)
STEP_S = 0.025
KV_TOKEN_BYTES = 8_192
BLOCK_TOKENS = 16
MODEL_LEN = 9_216
MAX_TOKENS = 2_000
LAG_TOKENS = 32
METRICS_PORT = 19_400
PAIR = ("colocated-0", "colocated-1")
RPC_S = 10.0
RUNNING_S, GO_ON_S, SHARED_S = 200.0, 60.0, 20.0
BEFORE_S = 1.0
LEAST_SHARE = 4
P99_STEPS, P99_S = 2, 0.005
SLOWED = 1.05
MODEL = FakeModel(max_model_len=MODEL_LEN, verify=False)


@dataclass
class Changes:
    """What the changes of owner with one length of prompts cost."""

    pauses_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """Between two pieces of a request, in the second before each change."""
    bystanders: list[float] = field(default_factory=list)
    """For each change: mean time between two pieces of the bystanders, over that before."""
    recomputed: list[int] = field(default_factory=list)
    """Tokens, of each request on the killed instance."""
    prompts_again: float = 0.0
    """Prompt tokens that prefill has computed again after the kill."""
    attempts: int = 0
    wrong: int = 0


def log_size(stack: LocalStack, name: str) -> int:
    return stack.process(name).log_path.stat().st_size


def resumed_since(stack: LocalStack, name: str, offset: int) -> dict[str, int]:
    """Requests that an instance's log, from byte `offset` on, reports as resumed from a copy, each with the tokens that
    were computed again: without the last one, which was drawn and not computed before."""
    lines = stack.process(name).log_path.read_bytes()[offset:].decode(errors="replace").splitlines()
    events = [json.loads(line) for line in lines if '"request_resumed"' in line]
    return {event["request_id"]: event["recomputed_tokens"] - 1 for event in events}


def running_on(stack: LocalStack, name: str) -> int:
    return stack.view().instances[name].load.running_requests


async def order(stack: LocalStack, name: str, *phases: Phase) -> None:
    """Let an instance serve these phases; its running requests move where their copies are."""
    async with open_channel(stack.target) as channel:
        request = instance_pb2.SetPhasesRequest(
            instance_id=name, phases=phases_to_proto(phases), drain=drain_way_to_proto(DrainWay.MIGRATE)
        )
        answer = await InstanceServiceStub(channel).SetPhases(request, timeout=RPC_S)
        assert answer.accepted, "the order was refused"


async def change_owner(stack: LocalStack, streams: list[AnswerStream], found: Changes) -> None:
    """Let the busier instance prefill only, and then serve both phases again."""
    await whole_replicas_of(stack, PAIR, REQUESTS, LAG_TOKENS)
    owner = busiest(stack, PAIR)
    target = next(name for name in PAIR if name != owner)
    offset = log_size(stack, target)
    # An instance that only prefills pushes to one that only decodes.
    await order(stack, target, Phase.DECODE)
    began_s = time.monotonic()
    await order(stack, owner, Phase.PREFILL)
    await wait_until(lambda: running_on(stack, owner) == 0, SHARED_S)
    ended_s = time.monotonic()
    await go_on(streams, ended_s, GO_ON_S)
    moved = resumed_since(stack, target, offset)
    before = [gap_s for stream in streams for gap_s in stream.gaps_s(began_s - BEFORE_S, began_s)]
    found.steps_s += before
    step_s = statistics.median(before)
    found.pauses_s += [
        max(stream.gaps_s(began_s, ended_s + 2 * STEP_S)) - step_s for stream in streams if stream.request_id in moved
    ]
    others = [stream for stream in streams if stream.request_id not in moved]
    gaps_s = [gap_s for stream in others for gap_s in stream.gaps_s(began_s, ended_s)]
    if gaps_s:
        found.bystanders.append(statistics.mean(gaps_s) / statistics.mean(before))
    for name in (owner, target):
        await order(stack, name, *BOTH_PHASES)
    await wait_until(lambda: running_on(stack, owner) >= REQUESTS // LEAST_SHARE, SHARED_S)


async def kill_one(stack: LocalStack, streams: list[AnswerStream], context: int, found: Changes) -> None:
    await whole_replicas_of(stack, PAIR, REQUESTS, LAG_TOKENS)
    owner = busiest(stack, PAIR)
    target = next(name for name in PAIR if name != owner)
    offset = log_size(stack, target)
    computed = metric(stack, "kaveri_prefill_tokens_total", [target])
    killed_s = time.monotonic()
    await stack.process(owner).kill()
    await go_on(streams, killed_s, GO_ON_S)
    found.prompts_again += metric(stack, "kaveri_prefill_tokens_total", [target]) - computed
    found.recomputed += resumed_since(stack, target, offset).values()


async def measure_context(context: int, count: int, place: str) -> Changes:
    found = Changes()
    pool_bytes = int(1.3 * REQUESTS * (context + MAX_TOKENS) * KV_TOKEN_BYTES)
    config = StackConfig.of(
        engine="fake",
        fake_verify_kv=False,
        fake_kv_token_bytes=KV_TOKEN_BYTES,
        max_model_len=MODEL_LEN,
        kv_cache_memory=str(max(pool_bytes, 2 * MODEL_LEN * KV_TOKEN_BYTES)),
        replication="pair",
        replica_place=place,
        replica_memory=str(pool_bytes),
        max_batch=64,
        prefill_count=0,
        decode_count=0,
        colocated_count=len(PAIR),
        metrics_port=METRICS_PORT,
        restart=False,
        drain_timeout_s=2.0,
        colocated_flags=("--chunk-tokens", "4096", "--fake-step-s", str(STEP_S)),
    )
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client:
        streams = [AnswerStream(f"long-{number}", prompt_of(context, number)) for number in range(REQUESTS)]
        reading = [asyncio.create_task(stream.read(client, MAX_TOKENS)) for stream in streams]
        await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= 20, RUNNING_S)
        for _ in range(count):
            await change_owner(stack, streams, found)
        await kill_one(stack, streams, context, found)
        assert max(len(stream.token_ids) for stream in streams) < MAX_TOKENS - 20, "the answers have ended too early"
        for stream in streams:
            await client.cancel(stream.request_id)
        await asyncio.gather(*reading)
    found.attempts = max(stream.timing.attempts for stream in streams if stream.timing is not None)
    found.wrong = sum(not stream.is_exact(MODEL) for stream in streams)
    return found


async def measure_async(options: Options, report: Report) -> None:
    count = options.choose(6, 2)
    report.workload = {
        "engine": "fake",
        "requests": REQUESTS,
        "contexts": list(CONTEXTS),
        "step_s": STEP_S,
        "kv_token_bytes": KV_TOKEN_BYTES,
        "block_tokens": BLOCK_TOKENS,
        "changes": count,
    }
    for place in ("pool", "host"):
        for context in CONTEXTS:
            _report(report, place, context, await measure_context(context, count, place))


def _report(report: Report, place: str, context: int, found: Changes) -> None:
    labels = {"copies": place, "context": context}
    step_s = statistics.median(found.steps_s)
    report.row("pause of a request", [1e3 * pause_s for pause_s in found.pauses_s], "ms", **labels)
    report.row("step before a change", [1e3 * gap_s for gap_s in found.steps_s], "ms", **labels)
    report.row("steps of bystanders, over those before", found.bystanders, "", **labels)
    report.row("tokens computed again after a kill", found.recomputed, "tokens", **labels)
    p50_s, p99_s = (max(1e-4, percentile(found.pauses_s, percent)) for percent in (50, 99))
    report.note(
        f"copies in the {place}, context {context}: pause p50 {1e3 * p50_s:.1f} ms, p99 {1e3 * p99_s:.1f} ms, with "
        f"steps of {1e3 * step_s:.1f} ms; after the kill at most {max(found.recomputed)} tokens of a request and "
        f"{found.prompts_again:g} prompt tokens in all were computed again; attempts {found.attempts}; answers that "
        f"were wrong: {found.wrong}"
    )
    if place == "host":
        return
    asked_s = P99_STEPS * step_s + P99_S
    report.ratio(f"asked for (1 step) / pause p50, context {context}", step_s / p50_s, 1.0)
    report.ratio(f"asked for (2 steps + 5 ms) / pause p99, context {context}", asked_s / p99_s, 1.0)
    slowed = statistics.median(found.bystanders)
    report.ratio(f"asked for ({SLOWED}) / steps of bystanders, context {context}", SLOWED / slowed, 1.0)
    again = max(1, *found.recomputed)
    report.ratio(f"a block of tokens / computed again after a kill, context {context}", BLOCK_TOKENS / again, 1.0)
    report.ratio(f"answers exact, of all, context {context}", 1 - found.wrong / REQUESTS, 1.0)


def measure(options: Options, report: Report) -> None:
    """Lets two instances change their requests' owner in turn, with requests of three lengths, and kills one."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.owner_change", measure, description=__doc__)
