"""What the death of a decode instance costs its requests: resumed from replicas, against computed again, in one run.

Real processes: a router, a prefill and three decode instances. With the timed engine, which takes OPT-13B's time on an
A100, computing is off the CPU; kaveri-tiny computes on the cores that recover. All requests run on one decode
instance, which is killed. Measured from the kill on: the time until every request has a new token, the pause of each
request, and the time to first token of short requests that go on arriving, against that of the seconds before the kill.
The fake model's tokens are compared with its own, and what is computed again is counted.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.latency.model import load_latency_model
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

LATENCY_MODEL = "opt-13b-a100-tp1"
REQUESTS = 32
MODEL_LEN = 6_144
METRICS_PORT = 19_320
DECODES = ("decode-0", "decode-1", "decode-2")
BEFORE_S = 5.0
AFTER_S = 10.0
"""How long other requests arrive, before the kill and after it."""
ARRIVAL_S = 0.1
SHORT_PROMPT_TOKENS = 64
SHORT_TOKENS = 2
GOING_ON_S = 200.0
MODEL = FakeModel(max_model_len=MODEL_LEN, verify=False)


@dataclass(frozen=True)
class RecoveryCase:
    """One engine with one length of prompts."""

    name: str
    context: int
    settings: dict[str, Any]
    least_ratio: float
    """Recomputed over resumed, until all go on."""
    is_timed: bool = False
    max_tokens: int = 1_500
    block_tokens: int = 16
    repeats: int = 1


def timed(context: int, repeats: int) -> RecoveryCase:
    """OPT-13B on an A100."""
    settings = {
        "engine": "timed",
        "latency_model": LATENCY_MODEL,
        "fake_verify_kv": False,
        "max_model_len": MODEL_LEN,
        "kv_cache_memory": "128MiB",
        "replica_memory": "128MiB",
    }
    return RecoveryCase(f"timed, context {context}", context, settings, 20.0, is_timed=True, repeats=repeats)


def computing(engine: str, block_tokens: int) -> RecoveryCase:
    """kaveri-tiny, on these cores."""
    settings = {"engine": engine, "max_model_len": 2_048, "kv_cache_memory": "512MiB", "replica_memory": "512MiB"}
    name = "kaveri-tiny" if engine == "transformers" else "vLLM"
    return RecoveryCase(f"{name}, context 1000", 1_000, settings, 3.0, max_tokens=1_000, block_tokens=block_tokens)


@dataclass
class Recovery:
    """What one kill cost."""

    all_go_on_s: float
    """From the kill until the last of the requests that ran there has a new token, or a step longer."""
    pauses_s: list[float]
    step_s: float
    """Of the model, for all requests at the time of the kill."""
    ttft_before_s: list[float]
    ttft_after_s: list[float]
    wrong: int
    prompts_again: float
    """Prompt tokens that prefill has computed again, over those of one request."""
    recomputed: list[int]
    """Tokens, of each request that was resumed."""
    suspicions: float
    """Token streams that the router gave up because they went silent. The killed instance's is not among them."""


async def arrivals(client: AsyncClient, seed: int, until_s: float) -> list[float]:
    """Times to first token of short requests that arrive until then."""
    streams: list[AnswerStream] = []
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until_s:
            number = len(streams)
            stream = AnswerStream(f"short-{seed}-{number}", prompt_of(SHORT_PROMPT_TOKENS, number, seed))
            streams.append(stream)
            group.create_task(stream.read(client, SHORT_TOKENS))
            await asyncio.sleep(ARRIVAL_S)
    return [stream.at_s[0] - stream.sent_s for stream in streams]


async def one_kill(case: RecoveryCase, mode: str, seed: int) -> Recovery:
    """mode: of --replication."""
    config = StackConfig.of(
        **case.settings,
        replication=mode,
        max_batch=64,
        decode_placement="imbalance",
        prefill_count=1,
        decode_count=len(DECODES),
        metrics_port=METRICS_PORT,
        restart=False,
        drain_timeout_s=2.0,
    )
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client:
        await AnswerStream("warm", prompt_of(SHORT_PROMPT_TOKENS, 0, seed)).read(client, 4)
        before = metric(stack, "kaveri_prefill_tokens_total", ["prefill-0"])
        streams = [AnswerStream(f"long-{number}", prompt_of(case.context, number, seed)) for number in range(REQUESTS)]
        reading = [asyncio.create_task(stream.read(client, case.max_tokens)) for stream in streams]
        await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= 20, GOING_ON_S)
        if mode != "off":
            await replicas_of(stack, DECODES, REQUESTS)
        ttft_before_s = await arrivals(client, 2 * seed, time.monotonic() + BEFORE_S)
        owner = busiest(stack, DECODES)
        contexts = [case.context + len(stream.token_ids) for stream in streams]
        killed_s = time.monotonic()
        await stack.process(owner).kill()
        ttft_after_s = await arrivals(client, 2 * seed + 1, killed_s + AFTER_S)
        await go_on(streams, killed_s, GOING_ON_S)
        again = metric(stack, "kaveri_prefill_tokens_total", ["prefill-0"]) - before - REQUESTS * case.context
        again -= (len(ttft_before_s) + len(ttft_after_s)) * SHORT_PROMPT_TOKENS
        for stream in streams:
            await client.cancel(stream.request_id)
        await asyncio.gather(*reading)
        timings = [(stream, stream.timing) for stream in streams if stream.timing is not None]
        pauses_s = [stream.pause_s(killed_s) for stream, timing in timings if timing.attempts > 1]
        return Recovery(
            all_go_on_s=max(pauses_s),
            pauses_s=pauses_s,
            step_s=load_latency_model(LATENCY_MODEL).step_s([(length, 1) for length in contexts]),
            ttft_before_s=ttft_before_s,
            ttft_after_s=ttft_after_s,
            wrong=sum(case.is_timed and not stream.is_exact(MODEL) for stream in streams),
            prompts_again=again / case.context,
            recomputed=[timing.recomputed_tokens for _, timing in timings if timing.resumes],
            suspicions=metric(stack, "kaveri_router_suspicions_total", ["router-0"]),
        )


async def measure_cases(cases: Sequence[RecoveryCase], report: Report) -> None:
    """One after the other."""
    report.workload = {
        "cases": [case.name for case in cases],
        "latency_model": LATENCY_MODEL,
        "requests": REQUESTS,
        "prefill_instances": 1,
        "decode_instances": len(DECODES),
        "arrivals_per_s": 1 / ARRIVAL_S,
    }
    for case in cases:
        found = _Found()
        for repeat in range(case.repeats):
            found.recomputed.append(await one_kill(case, "off", 11 * repeat))
            found.resumed.append(await one_kill(case, "spread", 11 * repeat))
        _report(report, case, found)


@dataclass
class _Found:
    recomputed: list[Recovery] = field(default_factory=list)
    resumed: list[Recovery] = field(default_factory=list)


def _report(report: Report, case: RecoveryCase, found: _Found) -> None:
    for how, kills in (("recomputed", found.recomputed), ("resumed", found.resumed)):
        labels = {"case": case.name, "how": how}
        report.row("until all go on", [kill.all_go_on_s for kill in kills], "s", **labels)
        report.row("pause of a request", [pause_s for kill in kills for pause_s in kill.pauses_s], "s", **labels)
        for when in ("before", "after"):
            p99s = [percentile(getattr(kill, f"ttft_{when}_s"), 99) for kill in kills]
            report.row(f"TTFT p99 of others, {when}", p99s, "s", **labels)
    slow, fast = (statistics.median(kill.all_go_on_s for kill in kills) for kills in (found.recomputed, found.resumed))
    report.ratio(f"recomputed / resumed, until all go on, {case.name}", slow / fast, case.least_ratio)
    if case.is_timed:
        _report_pauses(report, case, found.resumed)
    _report_again(report, case, found)


def _report_pauses(report: Report, case: RecoveryCase, resumed: Sequence[Recovery]) -> None:
    beyond = [pause_s - 2 * kill.step_s for kill in resumed for pause_s in kill.pauses_s]
    step_ms = 1e3 * statistics.median(kill.step_s for kill in resumed)
    for percent, asked_s in ((50, 0.1), (99, 0.3)):
        found_s = max(1e-3, percentile(beyond, percent))
        report.note(
            f"{case.name}: pause beyond two steps of {step_ms:.0f} ms, p{percent}: {1e3 * found_s:.0f} ms (asked for: "
            f"{1e3 * asked_s:.0f} ms)"
        )
        report.ratio(
            f"asked for ({asked_s:g} s) / pause p{percent} beyond two steps, {case.name}", asked_s / found_s, 1
        )
    before, after = (
        percentile([ttft_s for kill in resumed for ttft_s in kill_ttft(kill)], 99)
        for kill_ttft in (lambda kill: kill.ttft_before_s, lambda kill: kill.ttft_after_s)
    )
    report.ratio(f"1.2 x TTFT p99 of others before / after, {case.name}", 1.2 * before / after, 1.0)


def _report_again(report: Report, case: RecoveryCase, found: _Found) -> None:
    resumed = found.resumed
    tokens = [count for kill in resumed for count in kill.recomputed]
    moved = sum(len(kill.pauses_s) for kill in resumed)
    report.note(
        f"{case.name}: resumed {len(tokens)} of {moved}; prompts computed twice: "
        f"{sum(kill.prompts_again for kill in resumed):.2f}, without copies "
        f"{sum(kill.prompts_again for kill in found.recomputed):.2f}; tokens recomputed: most "
        f"{max(tokens, default=0)}; instances taken for dead that lived: {sum(kill.suspicions for kill in resumed):.0f}"
    )
    report.ratio(
        f"prompts not computed twice, of those lost, {case.name}",
        1 - sum(max(0.0, kill.prompts_again) for kill in resumed) / moved,
        1.0,
    )
    if tokens:
        most = max(1.0, percentile(tokens, 99))
        report.ratio(f"2 blocks / tokens recomputed p99, {case.name}", 2 * case.block_tokens / most, 1.0)
    if case.is_timed:
        kills = (*found.recomputed, *resumed)
        wrong = sum(kill.wrong for kill in kills)
        report.ratio(f"answers exact, of all, {case.name}", 1 - wrong / (REQUESTS * len(kills)), 1.0)


def measure(options: Options, report: Report) -> None:
    """Kills the decode instance that runs all requests, with replicas and without."""
    cases: list[RecoveryCase] = options.choose([timed(1_000, 2), timed(4_000, 1)], [timed(1_000, 1)])
    cases += options.choose([computing("transformers", 16)], [])
    asyncio.run(measure_cases(cases, report))


if __name__ == "__main__":
    run("serving.recovery", measure, description=__doc__)
