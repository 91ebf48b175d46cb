"""What the death of a decode instance costs its requests: resumed from replicas, against computed again, in one run.

Real processes: a router, a prefill and three decode instances on the timed engine, with OPT-13B's latencies on an A100.
All requests run on one decode instance, which is killed. Measured from the kill on: the time until every request has a
new token, the pause of each request, and the time to first token of short requests that go on arriving, against that of
the seconds before the kill. Every token is compared with the model's own, and what is computed again is counted.
"""

import asyncio
import contextlib
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.client.answer import ServerTiming
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.latency.model import load_latency_model
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

LATENCY_MODEL = "opt-13b-a100-tp1"
REQUESTS = 32
CONTEXTS = (1_000, 4_000)
BLOCK_TOKENS = 16
MAX_TOKENS = 1_500
METRICS_PORT = 19_320
INSTANCES = ("router-0", "prefill-0", "decode-0", "decode-1", "decode-2")
WATCHED_S = 10.0
"""Of other requests, before the kill and after it."""
ARRIVAL_S = 0.25
SHORT_PROMPT_TOKENS = 64
SHORT_TOKENS = 2
IN_FLIGHT_PIECES = 5
MODEL = FakeModel(max_model_len=6_144, verify=False)


@dataclass
class Stream:
    """One answer, and when its pieces came."""

    request_id: str
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    timing: ServerTiming | None = None

    async def read(self, client: AsyncClient, max_tokens: int = MAX_TOKENS) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        stream = client.stream(prompt_token_ids=self.prompt, params=params, request_id=self.request_id, timeout_s=600)
        async with stream:
            async for chunk in stream:
                assert chunk.index == len(self.token_ids), "a token is missing, or came twice"
                if chunk.token_ids:
                    self.token_ids += chunk.token_ids
                    self.at_s.append(time.monotonic())
        assert chunk.timing is not None
        self.timing = chunk.timing.server

    def pause_s(self, killed_s: float) -> float:
        """Its longest time between two pieces of which the second came after the kill."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max(later - sooner for sooner, later in pairs if later > killed_s)

    def has_gone_on(self, killed_s: float) -> bool:
        """Whether it has more tokens than may have been on their way when the instance was killed."""
        return sum(at_s > killed_s for at_s in self.at_s) > IN_FLIGHT_PIECES

    @property
    def is_exact(self) -> bool:
        return self.token_ids == list(MODEL.answer(self.prompt, 0, len(self.token_ids)))


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
    resumed: int
    suspicions: float
    """Token streams that the router gave up because they went silent. The killed instance's is not among them."""


def metric(name: str, *instances: str) -> float:
    """The sum of one metric over instances and labels; a dead one has none."""
    total = 0.0
    for instance in instances:
        port = METRICS_PORT + INSTANCES.index(instance)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer,
        ):
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
            total += sum(map(float, found))
    return total


def prompt_of(context: int, number: int, seed: int) -> tuple[int, ...]:
    return tuple(1 + (seed + 37 * number + place) % 900 for place in range(context))


async def arrivals(client: AsyncClient, seed: int, until_s: float) -> list[float]:
    """Times to first token of short requests that arrive until then."""
    reading: list[tuple[float, Stream, asyncio.Task[None]]] = []
    number = 0
    while time.monotonic() < until_s:
        stream = Stream(f"short-{seed}-{number}", prompt_of(SHORT_PROMPT_TOKENS, number, seed))
        task = asyncio.create_task(stream.read(client, SHORT_TOKENS))
        reading.append((time.monotonic(), stream, task))
        number += 1
        await asyncio.sleep(ARRIVAL_S)
    await asyncio.gather(*(task for _, _, task in reading))
    return [stream.at_s[0] - began_s for began_s, stream, _ in reading]


async def one_kill(context: int, mode: str, seed: int) -> Recovery:
    """mode: of --replication."""
    config = StackConfig.of(
        engine="timed",
        latency_model=LATENCY_MODEL,
        fake_verify_kv=False,
        max_model_len=str(MODEL.max_model_len),
        kv_cache_memory="256MiB",
        replication=mode,
        replica_memory="256MiB",
        max_batch="64",
        decode_placement="imbalance",
        router_count=1,
        prefill_count=1,
        decode_count=3,
        metrics_port=METRICS_PORT,
        restart=False,
    )
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=600) as client:
        await Stream("warm", prompt_of(SHORT_PROMPT_TOKENS, 0, seed)).read(client, 4)
        prompts = [prompt_of(context, number, seed) for number in range(REQUESTS)]
        streams = [Stream(f"long-{number}", prompt) for number, prompt in enumerate(prompts)]
        before = metric("kaveri_prefill_tokens_total", "prefill-0")
        reading = [asyncio.create_task(stream.read(client)) for stream in streams]
        while min(len(stream.token_ids) for stream in streams) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if mode != "off":
            async with asyncio.timeout(30):
                while metric("kaveri_replicas_owned", *INSTANCES[2:]) < REQUESTS:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        ttft_before_s = await arrivals(client, 2 * seed, time.monotonic() + WATCHED_S)
        owner = max(INSTANCES[2:], key=lambda name: stack.view().instances[name].load.running_requests)
        contexts = [context + len(stream.token_ids) for stream in streams]
        step_s = load_latency_model(LATENCY_MODEL).step_s([(length, 1) for length in contexts])
        killed_s = time.monotonic()
        await stack.process(owner).kill()
        ttft_after_s = await arrivals(client, 2 * seed + 1, killed_s + WATCHED_S)
        async with asyncio.timeout(300):
            while not all(stream.has_gone_on(killed_s) for stream in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        again = metric("kaveri_prefill_tokens_total", "prefill-0") - before - REQUESTS * context
        again -= (len(ttft_before_s) + len(ttft_after_s)) * SHORT_PROMPT_TOKENS
        for stream in streams:
            await client.cancel(stream.request_id)
        await asyncio.gather(*reading)
        timings = [stream.timing for stream in streams if stream.timing is not None]
        moved = [stream for stream in streams if stream.timing is not None and stream.timing.attempts > 1]
        pauses_s = [stream.pause_s(killed_s) for stream in moved]
        return Recovery(
            all_go_on_s=max(pauses_s),
            pauses_s=pauses_s,
            step_s=step_s,
            ttft_before_s=ttft_before_s,
            ttft_after_s=ttft_after_s,
            wrong=sum(not stream.is_exact for stream in streams),
            prompts_again=again / context,
            recomputed=[timing.recomputed_tokens for timing in timings if timing.resumes],
            resumed=sum(timing.resumes > 0 for timing in timings),
            suspicions=metric("kaveri_router_suspicions_total", "router-0"),
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "engine": "timed",
        "latency_model": LATENCY_MODEL,
        "requests": REQUESTS,
        "contexts": list(CONTEXTS),
        "prefill_instances": 1,
        "decode_instances": 3,
        "arrivals_per_s": 1 / ARRIVAL_S,
    }
    for context in options.choose(CONTEXTS, CONTEXTS[:1]):
        found: dict[str, list[Recovery]] = {"off": [], "spread": []}
        for repeat in range(options.choose(2, 1)):
            for mode, kills in found.items():
                kills.append(await one_kill(context, mode, 11 * repeat))
        _report(report, context, found["off"], found["spread"])


def _report(report: Report, context: int, recomputed: list[Recovery], resumed: list[Recovery]) -> None:
    for name, kills in (("recomputed", recomputed), ("resumed", resumed)):
        pauses = [pause_s for kill in kills for pause_s in kill.pauses_s]
        report.row("until all go on", [kill.all_go_on_s for kill in kills], "s", context=context, how=name)
        report.row("pause of a request", pauses, "s", context=context, how=name)
        report.row(
            "TTFT p99 of others, before",
            [percentile(kill.ttft_before_s, 99) for kill in kills],
            "s",
            context=context,
            how=name,
        )
        report.row(
            "TTFT p99 of others, after",
            [percentile(kill.ttft_after_s, 99) for kill in kills],
            "s",
            context=context,
            how=name,
        )
    slow, fast = (statistics.median(kill.all_go_on_s for kill in kills) for kills in (recomputed, resumed))
    report.ratio(f"recomputed / resumed, until all go on, context {context}", slow / fast, 20.0)
    beyond = [pause_s - 2 * kill.step_s for kill in resumed for pause_s in kill.pauses_s]
    step_ms = 1e3 * statistics.median(kill.step_s for kill in resumed)
    for percent, asked_s in ((50, 0.1), (99, 0.3)):
        found_s = max(1e-3, percentile(beyond, percent))
        report.note(
            f"context {context}: pause beyond two steps of {step_ms:.0f} ms, p{percent}: {1e3 * found_s:.0f} ms"
        )
        report.ratio(
            f"asked for ({asked_s:g} s) / pause p{percent} beyond two steps, context {context}", asked_s / found_s, 1.0
        )
    before, after = (
        percentile([ttft_s for kill in resumed for ttft_s in getattr(kill, name)], 99)
        for name in ("ttft_before_s", "ttft_after_s")
    )
    report.ratio(f"1.2 x TTFT p99 of others before / after, context {context}", 1.2 * before / after, 1.0)
    tokens = sorted(count for kill in resumed for count in kill.recomputed)
    report.note(
        f"context {context}: resumed {sum(kill.resumed for kill in resumed)} of "
        f"{sum(len(kill.pauses_s) for kill in resumed)}; prompts "
        f"computed twice: {sum(kill.prompts_again for kill in resumed):.2f}; "
        f"tokens recomputed: most {max(tokens, default=0)}; "
        f"instances taken for dead that lived: {sum(kill.suspicions for kill in resumed):.0f}"
    )
    wrong = sum(kill.wrong for kill in (*recomputed, *resumed))
    report.ratio(
        f"answers exact, of all, context {context}", 1 - wrong / (REQUESTS * len((*recomputed, *resumed))), 1.0
    )
    if len(tokens) > 1:
        report.ratio(
            f"2 blocks / tokens recomputed p99, context {context}",
            2 * BLOCK_TOKENS / max(1.0, percentile(tokens, 99)),
            1.0,
        )


def measure(options: Options, report: Report) -> None:
    """Kills the decode instance that runs all requests, with replicas and without."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.recovery", measure, description=__doc__)
