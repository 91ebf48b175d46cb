"""What redundant KV caches take, and what keeping them up to date takes: AcceLLM's claims (sections 4.1.2 and 5.3).

Real services on the timed engine: a router and four instances that do both phases, as AcceLLM's do, in pairs
(`--replication pair`): each holds the copies of the other's requests. The mixed workload of table 2: prompts and
answers of 20 to 1,000 tokens, uniform. A closed loop keeps a number of requests in flight; by Little's law that is a
rate of requests times their time in the cluster, so the claims about 4, 8 and 12 requests per second can be worked out
from it.

Memory: of the copies, over that of the requests' own KV. Write-back: tokens of answers that are copied, over tokens of
prompts; and what copies cost, against the same stack without them, turn by turn.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import TIMEOUT_S, AnswerStream, metric, percentile, prompt_of
from benchmarks.support.bursts import read_metric
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

LATENCY_MODEL = "opt-13b-a100-tp4"
INSTANCES = tuple(f"colocated-{number}" for number in range(4))
METRICS_PORTS = {"off": 19_480, "pair": 19_490}
TOKENS = (20, 1_000)
IN_FLIGHT = (8, 16, 32)
COMPARED = 16
BLOCK_TOKENS, KV_BLOCK_BYTES = 16, 4_096
"""Of the timed engine's pool."""
LLAMA_TOKEN_BYTES = 80 * 2 * 8 * 128 * 2
"""KV of Llama-2 70B, AcceLLM's model, in 16 bits."""
PAPER_GB = {4: 1.0, 8: 3.5, 12: 5.0}
"""More memory per instance than Splitwise, by requests per second."""
LOOK_S = 0.5
_PAPER = "AcceLLM"


@dataclass
class CopiedLoad:
    """One turn of one stack at one level."""

    seconds: float = 0.0
    streams: list[AnswerStream] = field(default_factory=list)
    owned: list[float] = field(default_factory=list)
    """Bytes of the requests' own KV, at each look."""
    copies: list[float] = field(default_factory=list)
    """Bytes of copies, at the same looks."""
    copied_tokens: float = 0.0
    prompt_tokens: float = 0.0
    drawn_tokens: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of answers."""
        return self.drawn_tokens / self.seconds

    @property
    def e2e_s(self) -> float:
        """Mean time of a whole answer."""
        return statistics.mean(stream.at_s[-1] - stream.sent_s for stream in self.streams if stream.timing is not None)

    @property
    def gap_p99_s(self) -> float:
        """Between pieces."""
        gaps = (b - a for stream in self.streams for a, b in zip(stream.at_s, stream.at_s[1:], strict=False))
        return percentile(gaps, 99)


def _look(stack: LocalStack) -> tuple[float, float]:
    ports = [stack.config.metrics_port_of(name) for name in INSTANCES]
    owned = sum(read_metric(port, "kaveri_kv_blocks", state="held") for port in ports) * KV_BLOCK_BYTES
    is_copying = stack.config.settings["replication"] != "off"
    copies = sum(read_metric(port, "kaveri_replica_bytes", state="used") for port in ports) if is_copying else 0.0
    return owned, copies


def _counters(stack: LocalStack) -> list[float]:
    names = ("kaveri_replica_copied_tokens_total", "kaveri_prefill_tokens_total", "kaveri_decode_tokens_total")
    return [metric(stack, name, INSTANCES) for name in names]


def requests(first: int) -> Iterator[tuple[AnswerStream, int]]:
    """Endless, with their answers' lengths."""
    rng = random.Random(first)
    while True:
        yield AnswerStream(f"request-{first}", prompt_of(rng.randint(*TOKENS), first)), rng.randint(*TOKENS)
        first += 1


async def level(stack: LocalStack, client: AsyncClient, in_flight: int, seconds: float, first: int) -> CopiedLoad:
    """Keeps so many in flight. What is under way at the end is cancelled."""
    load, waiting = CopiedLoad(), requests(first)

    async def place() -> None:
        while True:
            stream, answer_tokens = next(waiting)
            load.streams.append(stream)
            await stream.read(client, answer_tokens)

    before = await asyncio.to_thread(_counters, stack)
    began_s = time.monotonic()
    places = [asyncio.create_task(place()) for _ in range(in_flight)]
    while time.monotonic() < began_s + seconds:
        await asyncio.sleep(LOOK_S)
        owned, copies = await asyncio.to_thread(_look, stack)
        load.owned.append(owned)
        load.copies.append(copies)
        for done in (task for task in places if task.done()):
            done.result()
    load.seconds = time.monotonic() - began_s
    after = await asyncio.to_thread(_counters, stack)
    load.copied_tokens, load.prompt_tokens, load.drawn_tokens = (b - a for a, b in zip(before, after, strict=True))
    for task in places:
        task.cancel()
    await asyncio.gather(*places, return_exceptions=True)
    return load


async def measure_async(options: Options, report: Report) -> None:
    seconds, repeats = options.choose(15.0, 6.0), options.choose(3, 1)
    report.workload = {
        "engine": "timed",
        "latency_model": LATENCY_MODEL,
        "instances": len(INSTANCES),
        "prompt_tokens": list(TOKENS),
        "answer_tokens": list(TOKENS),
        "in_flight": list(IN_FLIGHT),
        "seconds_of_a_turn": seconds,
    }
    async with contextlib.AsyncExitStack() as opened:
        stacks: dict[str, tuple[LocalStack, AsyncClient]] = {}
        for mode, port in METRICS_PORTS.items():
            config = StackConfig.of(
                engine="timed",
                latency_model=LATENCY_MODEL,
                max_model_len=2_048,
                kv_cache_memory="64MiB",
                replication=mode,
                replica_memory="64MiB",
                replica_min_tokens=BLOCK_TOKENS,
                prefill_count=0,
                decode_count=0,
                colocated_count=len(INSTANCES),
                metrics_port=port,
                restart=False,
                drain_timeout_s=2.0,
            )
            stack = await opened.enter_async_context(LocalStack(config))
            client = await opened.enter_async_context(AsyncClient(stack.targets, timeout_s=TIMEOUT_S))
            stacks[mode] = stack, client
            await AnswerStream("warm", prompt_of(64, 1)).read(client, 8)
        levels = {
            in_flight: await level(*stacks["pair"], in_flight, seconds, 10_000 * (1 + index))
            for index, in_flight in enumerate(IN_FLIGHT)
        }
        compared: dict[str, list[CopiedLoad]] = {mode: [] for mode in stacks}
        for repeat in range(repeats):
            for mode in sorted(stacks, reverse=bool(repeat % 2)):
                compared[mode].append(await level(*stacks[mode], COMPARED, seconds, 10_000 * (10 + repeat)))
    _report_memory(report, levels)
    _report_write_back(report, compared)


def _report_memory(report: Report, levels: dict[int, CopiedLoad]) -> None:
    shares: list[float] = []
    for in_flight, load in levels.items():
        # In the second half of a turn requests of all ages run.
        half = len(load.owned) // 2
        own, copies = load.owned[half:], load.copies[half:]
        report.row(
            "KV of requests, per instance", [size / 2**20 / len(INSTANCES) for size in own], "MiB", flight=in_flight
        )
        report.row("copies, per instance", [size / 2**20 / len(INSTANCES) for size in copies], "MiB", flight=in_flight)
        shares.append(statistics.mean(copies) / statistics.mean(own))
        report.ratio(f"memory of copies / of the requests' own KV, {in_flight} in flight", shares[-1])
    middle = levels[IN_FLIGHT[1]]
    half = len(middle.copies) // 2
    tokens = statistics.mean(middle.copies[half:]) / KV_BLOCK_BYTES * BLOCK_TOKENS / IN_FLIGHT[1]
    e2e_s = middle.e2e_s
    ours = {rate: rate * e2e_s * tokens * LLAMA_TOKEN_BYTES / len(INSTANCES) / 1e9 for rate in PAPER_GB}
    shown = ", ".join(f"{size:.1f} GB at {rate}/s" for rate, size in ours.items())
    report.compare(
        f"{_PAPER}, figure 9: more memory per instance for redundancy, at 4, 8 and 12 requests per second",
        ", ".join(f"{size:g} GB" for size in PAPER_GB.values()),
        shown,
        f"worked out: a copy has {tokens:.0f} tokens on average and a request is here for {e2e_s:.1f} s (OPT-13B on "
        "four A100), with 320 KiB a token of Llama-2 70B. Every request is copied from its first block on; AcceLLM's "
        "time per token is not published, and it keeps the prefill side's copy only where there is room",
    )
    report.note("a copy takes the bytes of its KV, and one block that is granted ahead")


def _report_write_back(report: Report, compared: dict[str, list[CopiedLoad]]) -> None:
    for mode, loads in compared.items():
        report.row("output tokens/s", [load.tokens_per_s for load in loads], "tokens/s", replication=mode)
        report.row("time of an answer", [load.e2e_s for load in loads], "s", replication=mode)
        report.row("ITL p99", [1e3 * load.gap_p99_s for load in loads], "ms", replication=mode)
    off, on = compared["off"], compared["pair"]
    pairs = list(zip(on, off, strict=True))
    speed = statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
    gap = statistics.median(ours.gap_p99_s / theirs.gap_p99_s for ours, theirs in pairs)
    report.ratio("tokens/s, with copies / without", speed)
    report.ratio("ITL p99, with copies / without", gap)
    drawn, prompts, copied = (
        sum(getattr(load, name) for load in on) for name in ("drawn_tokens", "prompt_tokens", "copied_tokens")
    )
    report.ratio("tokens of answers / tokens of prompts, copied", drawn / prompts)
    report.ratio("tokens copied / computed", copied / (drawn + prompts))
    report.compare(
        f"{_PAPER}, section 5.3: lines written back to the copies, beside what prefill moves",
        "minimal, with a limited effect on the interconnect",
        f"{drawn / prompts:.2f} tokens written back for each prompt token; {speed:.3f} of the tokens per second",
        "as many bytes as prefill's where answers are as long as prompts, but over the time of a whole answer: whole "
        "blocks in the background. Prompts are copied as well, since no prefill side is left with a copy here",
    )
    report.compare(
        f"{_PAPER}, section 5.3: no spikes of the time between tokens",
        "none",
        f"ITL p99 {gap:.3f} of that without copies",
        "an instance computes chunks of prompts beside its batch here; AcceLLM's never does both at once",
    )


def measure(options: Options, report: Report) -> None:
    """Three levels of load with copies, and one of them without."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.redundancy", measure, description=__doc__)
