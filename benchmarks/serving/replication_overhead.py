"""What copies cost requests while nothing fails: the same load with replication and without, turn by turn.

Two whole stacks run side by side, each a router, a prefill and two decode instances as real processes; the one whose
turn it is not is idle. With the timed engine, which takes OPT-13B's time on an A100, computing is off the CPU, and the
KV that is pushed and copied has the size it says, 64 or 800 KiB a token; kaveri-tiny computes on the cores that copy. A
closed loop keeps as many requests in flight as the case says. The lag of copies is looked at four times a second, on
both stacks, so that looking costs both the same. Copies are in host memory, spread over the decode instances; in one
case they are in the pools of pairs, where a prompt's KV stays where it was computed (`kaveri up --pairs`).
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.support.answer_streams import TIMEOUT_S, AnswerStream, metric, most, percentile, prompt_of, replicas_of
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

LATENCY_MODEL = "opt-13b-a100-tp1"
PREFILL, DECODES = ("prefill-0",), ("decode-0", "decode-1")
METRICS_PORTS = {"off": 19_440, "on": 19_450}
SPREAD = {"replication": "spread"}
PAIRS = {"replication": "pair", "replica_place": "pool"}
LOOK_S = 0.25
SETTLING_S = 1.0
MODEL = FakeModel(verify=False)


@dataclass(frozen=True)
class OverheadCase:
    """One engine and one load."""

    name: str
    in_flight: int
    prompt_tokens: int
    answer_tokens: int
    least_speed: float
    """Tokens per second, with copies over without."""
    settings: dict[str, Any] = field(default_factory=dict)
    is_timed: bool = True
    block_tokens: int = 16
    steady_tokens: int = 160
    """Of each answer while no prompts arrive: enough to run on for seconds behind SETTLING_S."""
    copies: dict[str, str] = field(default_factory=lambda: SPREAD)
    """Settings of the stack with copies."""
    rounds: int = 4
    """Measured on each stack. From round to round the p99 of the gaps varies by about 5 %, so 12 rounds cannot tell
    1.03 from 1.05."""


def timed(kv_token_bytes: int, in_flight: int, answer_tokens: int, pool: str, rounds: int) -> OverheadCase:
    """OPT-13B's time, with this much KV for each token."""
    settings = {
        "engine": "timed",
        "latency_model": LATENCY_MODEL,
        "fake_kv_token_bytes": kv_token_bytes,
        "max_model_len": 512,
        "kv_cache_memory": pool,
        "replica_memory": pool,
    }
    name = f"{kv_token_bytes // 1024} KiB a token, compute off the CPU"
    return OverheadCase(name, in_flight, 256, answer_tokens, 0.98, settings, rounds=rounds)


def computing(engine: str, block_tokens: int) -> OverheadCase:
    """kaveri-tiny, on these cores."""
    settings = {"engine": engine, "kv_cache_memory": "64MiB", "replica_memory": "64MiB"}
    name = "kaveri-tiny" if engine == "transformers" else "vLLM"
    return OverheadCase(
        name, 8, 256, 64, 0.95, settings, is_timed=False, block_tokens=block_tokens, steady_tokens=1_500
    )


def in_pools(case: OverheadCase, pool: str) -> OverheadCase:
    """The same with copies in the pools of pairs. `pool` is as large as a pool and the host memory for copies together:
    in a smaller one, copies give way to requests and are made again."""
    settings = case.settings | {"kv_cache_memory": pool}
    return replace(case, name=f"{case.name}, copies in pools", settings=settings, copies=PAIRS)


CASES = (
    timed(64 * 1024, 32, 96, "640MiB", 4),
    timed(800 * 1024, 6, 160, "1400MiB", 36),
    in_pools(timed(800 * 1024, 6, 160, "1400MiB", 12), "2800MiB"),
    computing("transformers", 16),
)


@dataclass
class OverheadRound:
    """One turn of one stack."""

    tokens_per_s: float
    ttft_s: list[float]
    gaps_s: list[float]
    """Between the pieces of each answer."""
    lags: list[float]
    """Most tokens that a copy lacked, at each look."""
    unprotected: list[float]
    copied: float
    """Tokens copied over tokens computed."""
    wrong: int


async def one_round(
    stack: LocalStack, client: AsyncClient, case: OverheadCase, count: int, first_number: int
) -> OverheadRound:
    streams = [
        AnswerStream(f"request-{number}", prompt_of(case.prompt_tokens, number))
        for number in range(first_number, first_number + count)
    ]
    before = [await asyncio.to_thread(_tokens, stack, kind) for kind in _KINDS]
    waiting = iter(streams)
    lags: list[float] = []
    unprotected: list[float] = []
    looking = asyncio.create_task(_look(stack, lags, unprotected))
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(case.in_flight):
            group.create_task(_ask(client, waiting, case.answer_tokens))
    seconds = time.monotonic() - began_s
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    after = [await asyncio.to_thread(_tokens, stack, kind) for kind in _KINDS]
    copied, prompts, drawn = (last - first for first, last in zip(before, after, strict=True))
    gaps_s = [later - sooner for stream in streams for sooner, later in zip(stream.at_s, stream.at_s[1:], strict=False)]
    return OverheadRound(
        tokens_per_s=count * case.answer_tokens / seconds,
        ttft_s=[stream.at_s[0] - stream.sent_s for stream in streams],
        gaps_s=gaps_s,
        lags=lags,
        unprotected=unprotected,
        copied=copied / (prompts + drawn),
        wrong=sum(case.is_timed and not stream.is_exact(MODEL) for stream in streams),
    )


_KINDS = (
    ("kaveri_replica_copied_tokens_total", DECODES),
    ("kaveri_prefill_tokens_total", PREFILL),
    ("kaveri_decode_tokens_total", DECODES),
)


def _tokens(stack: LocalStack, kind: tuple[str, Sequence[str]]) -> float:
    return metric(stack, *kind)


async def _ask(client: AsyncClient, waiting: Iterator[AnswerStream], answer_tokens: int) -> None:
    for stream in waiting:
        await stream.read(client, answer_tokens)


async def _look(stack: LocalStack, lags: list[float], unprotected: list[float]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        lags.append(await asyncio.to_thread(most, stack, "kaveri_replica_lag_tokens", DECODES))
        unprotected.append(await asyncio.to_thread(metric, stack, "kaveri_unprotected_requests", DECODES))


async def steady_lags(stack: LocalStack, client: AsyncClient, case: OverheadCase) -> list[float]:
    """Most tokens that a copy lacks, at each look, while all requests run and their prompts have been copied."""
    streams = [
        AnswerStream(f"steady-{number}", prompt_of(case.prompt_tokens, number)) for number in range(case.in_flight)
    ]
    reading = [asyncio.create_task(stream.read(client, case.steady_tokens)) for stream in streams]
    await replicas_of(stack, DECODES, case.in_flight)
    await asyncio.sleep(SETTLING_S)
    lags: list[float] = []
    while not any(task.done() for task in reading):
        lags.append(await asyncio.to_thread(most, stack, "kaveri_replica_lag_tokens", DECODES))
        await asyncio.sleep(LOOK_S)
    await asyncio.gather(*reading)
    return lags


async def measure_case(
    case: OverheadCase, repeats: int, turns: int
) -> tuple[dict[str, list[OverheadRound]], list[float]]:
    """The rounds of each stack, and the lags of copies without arrivals. turns: how many requests each place in flight
    has in one round."""
    found: dict[str, list[OverheadRound]] = {mode: [] for mode in METRICS_PORTS}
    async with contextlib.AsyncExitStack() as opened:
        stacks: dict[str, tuple[LocalStack, AsyncClient]] = {}
        for mode, port in METRICS_PORTS.items():
            config = StackConfig.of(
                **case.settings,
                **(case.copies if mode == "on" else {"replication": "off"}),
                max_batch=64,
                prefill_count=len(PREFILL),
                decode_count=len(DECODES),
                metrics_port=port,
                restart=False,
                drain_timeout_s=20.0,
            )
            stack = await opened.enter_async_context(LocalStack(config))
            client = await opened.enter_async_context(AsyncClient(stack.targets, timeout_s=TIMEOUT_S))
            stacks[mode] = stack, client
            await one_round(stack, client, case, case.in_flight, first_number=0)
        for repeat in range(repeats):
            count = case.in_flight * turns
            # Which one goes first changes, so that drift of the machine hits both.
            for mode in sorted(stacks, reverse=bool(repeat % 2)):
                found[mode].append(await one_round(*stacks[mode], case, count, (1 + repeat) * 10_000))
        return found, await steady_lags(*stacks["on"], case)


async def measure_cases(cases: Sequence[OverheadCase], options: Options, report: Report) -> None:
    """One after the other."""
    turns = options.choose(3, 1)
    report.workload = {
        "cases": [
            {
                "name": case.name,
                "in_flight": case.in_flight,
                "prompt_tokens": case.prompt_tokens,
                "answer_tokens": case.answer_tokens,
                "rounds": options.choose(case.rounds, 1),
            }
            for case in cases
        ],
        "latency_model": LATENCY_MODEL,
        "requests_of_a_round": f"{turns} for each in flight",
        "warm_up": "one for each in flight, on each stack",
    }
    for case in cases:
        _report(report, case, *await measure_case(case, options.choose(case.rounds, 1), turns))


def _report(report: Report, case: OverheadCase, found: dict[str, list[OverheadRound]], steady: list[float]) -> None:
    for mode, rounds in found.items():
        labels = {"case": case.name, "replication": case.copies["replication"] if mode == "on" else mode}
        report.row("output tokens/s", [each.tokens_per_s for each in rounds], "tokens/s", **labels)
        report.row("TTFT p50", [1e3 * statistics.median(each.ttft_s) for each in rounds], "ms", **labels)
        report.row("ITL p50", [1e3 * statistics.median(each.gaps_s) for each in rounds], "ms", **labels)
        report.row("ITL p99", [1e3 * percentile(each.gaps_s, 99) for each in rounds], "ms", **labels)
    off, on = found["off"], found["on"]
    pairs = list(zip(on, off, strict=True))
    speed = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs]
    first = [statistics.median(theirs.ttft_s) / statistics.median(ours.ttft_s) for ours, theirs in pairs]
    gap = [percentile(theirs.gaps_s, 99) / percentile(ours.gaps_s, 99) for ours, theirs in pairs]
    for name, values in (("tokens/s, on / off", speed), ("TTFT p50, off / on", first), ("ITL p99, off / on", gap)):
        report.row(name, values, "", case=case.name)
    report.ratio(f"tokens/s, on / off, {case.name}", statistics.median(speed), case.least_speed)
    report.ratio(f"1.05 x TTFT p50, off / on, {case.name}", 1.05 * statistics.median(first), 1.0)
    report.ratio(f"1.05 x ITL p99, off / on, {case.name}", 1.05 * statistics.median(gap), 1.0)
    lag = percentile(steady, 99)
    arriving = [lag for each in on for lag in each.lags]
    report.row("most tokens that a copy lacks", steady, "tokens", case=case.name, load="no arrivals")
    report.row("most tokens that a copy lacks", arriving, "tokens", case=case.name, load="prompts arrive")
    report.row(
        "requests without a whole block copied", [n for each in on for n in each.unprotected], "", case=case.name
    )
    report.ratio(f"2 blocks / lag p99, {case.name}", 2 * case.block_tokens / max(1.0, lag), 1.0)
    copied = max(each.copied for each in on)
    report.ratio(f"1.02 x computed / copied tokens, {case.name}", 1.02 / max(1e-9, copied), 1.0)
    wrong = sum(each.wrong for each in (*on, *off))
    report.note(
        f"{case.name}: lag p99 {lag:.0f} tokens; copied over computed at most {copied:.3f}; wrong answers: {wrong}"
    )


def measure(options: Options, report: Report) -> None:
    """All cases, each on two stacks in turn."""
    asyncio.run(measure_cases(CASES, options, report))


if __name__ == "__main__":
    run("serving.replication_overhead", measure, description=__doc__)
