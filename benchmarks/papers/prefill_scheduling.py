"""Prefill scheduling: the order of waiting prompts, chunks against a fixed batch of whole prompts, the cost of sorting.

TetriInfer's section 5.2.1 and figure 16, on real services with the timed engine: one prefill instance gets a burst of
prompts while it computes a long one. All times count from that prompt's first token, as if the burst had arrived then.
Answers have two tokens, so the hand-over is real but decode does not matter.

The fixed batch of 16 is emulated: each 16 consecutive prompts of the burst have the same 16 lengths in random order,
and the chunk size is their sum. So FCFS fills each step with exactly 16 whole prompts, which all get their first token
at its end, as in a fixed batch.
"""

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.support.bursts import LATENCY_MODEL, PAPER, SHAREGPT_PROMPT_TOKENS, send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.loadgen.driver import LoadRun
from kaveri.policy.ordering import OrderingPolicy, order_prompts
from kaveri.policy.prompt_queue import PromptQueue
from kaveri.workload.requests import PlannedRequest, RequestLengths

BATCH = len(SHAREGPT_PROMPT_TOKENS)
CHUNK_TOKENS = 512
BLOCKER_TOKENS = 8000
MAX_MODEL_LEN = 16384
GAP_S = 0.0015
"""Between two prompts of the burst, so that they are queued in their order."""
SORTED_COUNTS = (16, 128, 1024)
_NEW_STEP_S = 0.05
_QUEUED_BEFORE_S = 0.2
"""The first order is made when two chunks of the long prompt are left."""


class _ScheduledPrompt(NamedTuple):
    number: int
    token_count: int


@dataclass(frozen=True)
class SchedulingSetting:
    """One way to schedule."""

    name: str
    policy: OrderingPolicy
    scheduling_batch: int
    chunk_tokens: int = CHUNK_TOKENS


FIXED = SchedulingSetting("fixed batch of 16", OrderingPolicy.FCFS, BATCH, sum(SHAREGPT_PROMPT_TOKENS))
SETTINGS = (
    *(SchedulingSetting(f"{policy} {batch}", policy, batch) for batch in (16, 128) for policy in OrderingPolicy),
    FIXED,
)


@dataclass(frozen=True)
class Burst:
    """What one burst has shown; means over its prompts, in seconds."""

    wait_s: float
    """Until the first step that computes a part of the prompt."""
    prefill_s: float
    """From there to the first token."""
    ttft_s: float
    """The sum of both."""
    prompts_per_token_time: float
    """First tokens that came together: prompts of one step, where a step computes whole ones."""
    queued_in_time: bool


def plan(count: int, rng: random.Random) -> list[PlannedRequest]:
    """The long prompt, then `count` prompts."""
    lengths = [length for _ in range(count // BATCH) for length in rng.sample(SHAREGPT_PROMPT_TOKENS, BATCH)]
    burst = [
        PlannedRequest(number, 0.05 + number * GAP_S, RequestLengths(length, 2))
        for number, length in enumerate(lengths, 1)
    ]
    return [PlannedRequest(0, 0.0, RequestLengths(BLOCKER_TOKENS, 2)), *burst]


def summed_up(run: LoadRun) -> Burst:
    blocker, *records = run.records
    ttfts_s = sorted(record.first_s - blocker.first_s for record in records if record.arrivals_s)
    steps = 1 + sum(later - earlier > _NEW_STEP_S for earlier, later in itertools.pairwise(ttfts_s))
    prefill_s = statistics.fmean(record.server.prefill_s for record in records if record.server is not None)
    ttft_s = statistics.fmean(ttfts_s)
    return Burst(
        wait_s=ttft_s - prefill_s,
        prefill_s=prefill_s,
        ttft_s=ttft_s,
        prompts_per_token_time=len(records) / steps,
        queued_in_time=max(record.sent_s for record in records) < blocker.first_s - _QUEUED_BEFORE_S,
    )


@contextlib.asynccontextmanager
async def setting_client(setting: SchedulingSetting, report: Report) -> AsyncIterator[AsyncClient]:
    """A client of a stack with one setting. The stack has served a short burst, which is not counted."""
    flags = ("--prefill-policy", setting.policy, "--prefill-sched-batch", str(setting.scheduling_batch))
    chunks = ("--chunk-tokens", str(setting.chunk_tokens))
    async with (
        timed_stack(
            report,
            setting.name,
            prefill_count=1,
            decode_count=1,
            max_model_len=MAX_MODEL_LEN,
            prefill_flags=(*flags, *chunks),
        ) as stack,
        AsyncClient(stack.target) as client,
    ):
        await send(client, plan(BATCH, random.Random(0))[1:], 0, report)
        yield client


async def bursts(
    settings: Sequence[SchedulingSetting], count: int, repeats: int, report: Report
) -> dict[str, list[Burst]]:
    """Every burst under every setting in turn, by the setting's name.

    What is compared so ran within the same minutes. All stacks run side by side; those that serve no burst are idle.
    """
    taken: dict[str, list[Burst]] = {setting.name: [] for setting in settings}
    async with contextlib.AsyncExitStack() as running:
        clients = {
            setting.name: await running.enter_async_context(setting_client(setting, report)) for setting in settings
        }
        for repeat in range(1, repeats + 1):
            for name, client in clients.items():
                burst = summed_up(await send(client, plan(count, random.Random(repeat)), repeat, report))
                if not burst.queued_in_time:
                    report.note(f"{name}: the burst was not queued before its first prompt could start")
                taken[name].append(burst)
    return taken


def sorting_us(count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds to order `count` prompts, and to take them through a queue that orders them, per repeat."""
    rng = random.Random(count)
    waiting = [_ScheduledPrompt(number, rng.choice(SHAREGPT_PROMPT_TOKENS)) for number in range(count)]
    sort_us, schedule_us = [], []
    for _ in range(repeats):
        began_s = time.perf_counter()
        order_prompts(OrderingPolicy.SJF, waiting)
        sort_us.append(1e6 * (time.perf_counter() - began_s))
        queue: PromptQueue[_ScheduledPrompt] = PromptQueue(OrderingPolicy.SJF, CHUNK_TOKENS, count, count)
        for prompt in waiting:
            queue.hold(prompt)
        began_s = time.perf_counter()
        for prompt in waiting:
            queue.release(prompt)
        queue.next()
        schedule_us.append(1e6 * (time.perf_counter() - began_s))
    return sort_us, schedule_us


async def measure_async(options: Options, report: Report) -> None:
    count, repeats = options.choose(128, 32), options.choose(3, 1)
    report.workload = {
        "engine": f"timed, {LATENCY_MODEL}",
        "prompts": count,
        "prompt_tokens": list(SHAREGPT_PROMPT_TOKENS),
        "chunk_tokens": CHUNK_TOKENS,
        "arrival": "a burst while one prompt of 8000 tokens is computed",
        "prefill_instances": 1,
    }
    # In batches of 16 and 128 FCFS is the same.
    settings = [
        setting for setting in SETTINGS if setting.policy is not OrderingPolicy.FCFS or setting.scheduling_batch != 128
    ]
    taken = await bursts(settings, count, repeats, report)
    for name, found in taken.items():
        report.row("mean wait", [each.wait_s for each in found], "s", setting=name)
        report.row("mean prefill latency", [each.prefill_s for each in found], "s", setting=name)
        report.row("mean TTFT", [each.ttft_s for each in found], "s", setting=name)
    steps = [each.prompts_per_token_time for each in taken[FIXED.name]]
    report.row("prompts of a step", steps, "prompts", setting=FIXED.name)

    def ratio(name: str, phase: str, ours: str, theirs: str) -> float:
        pairs = zip(taken[ours], taken[theirs], strict=True)
        value: float = statistics.median(getattr(our, phase) / getattr(their, phase) for our, their in pairs)
        report.ratio(name, value)
        return value

    wait = ratio("mean wait, SJF / FCFS, batch 16", "wait_s", "sjf 16", "fcfs 16")
    ratio("mean wait, LJF / FCFS, batch 16", "wait_s", "ljf 16", "fcfs 16")
    ratio("mean wait, SJF / FCFS, batch 128", "wait_s", "sjf 128", "fcfs 16")
    first = ratio("mean TTFT, SJF, batch 128 / 16", "ttft_s", "sjf 128", "sjf 16")
    latency = ratio("mean prefill latency, chunks FCFS / fixed batch", "prefill_s", "fcfs 16", FIXED.name)
    whole = ratio("mean TTFT, chunks FCFS / fixed batch", "ttft_s", "fcfs 16", FIXED.name)
    for sorted_count in SORTED_COUNTS:
        sort_us, schedule_us = sorting_us(sorted_count, options.choose(200, 50))
        report.row("sort a scheduling batch", sort_us, "us", prompts=sorted_count)
        report.row("queue and sort one", schedule_us, "us", prompts=sorted_count)
    _compare(report, count, wait, first, latency, whole)


def _compare(report: Report, count: int, wait: float, first: float, latency: float, whole: float) -> None:
    report.note(
        f"SJF against FCFS at batch 16: wait {wait - 1:+.1%}; {PAPER}, section 5.2.1: -7.8 %. Only the wait within a "
        f"prompt's own 16 can shrink, and that is about {16 / count:.0%} of the whole burst, so the figure depends on "
        "how many batches wait at once, and on how uneven lengths are"
    )
    report.note(
        f"SJF from batch 16 to 128: TTFT {first - 1:+.1%}; paper: -46.5 %. At 128 the whole burst is sorted, and the "
        "gain is that of shortest-job-first over the distribution of lengths, which in the paper's sample is not known"
    )
    report.note(
        f"chunks against a fixed batch of 16, prefill latency: {latency - 1:+.1%}; paper: -86.4 %. A prompt of a fixed "
        "batch waits for the other fifteen; in chunks it is done when its own last chunk is. The paper's baseline is "
        "vLLM, whose prefill also waits for decode steps and KV memory of the same instance, which is not measured here"
    )
    report.note(
        f"TTFT of chunks against the fixed batch: {whole - 1:+.1%}. It holds the wait too, and so the throughput: in "
        "this latency model a step costs 14.7 ms beside its tokens, which a step of 16 prompts pays once and chunks of "
        "512 many times, and it has no length of a step beyond which longer ones gain nothing"
    )


def measure(options: Options, report: Report) -> None:
    """Each setting on a stack of its own, with the same bursts, which take turns."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.prefill_scheduling", measure, description=__doc__)
