"""What one failure costs a request, and a trace with several: DéjàVu (arXiv 2403.01876), figures 4, 10 and 11.

Real services on the timed engine: a router, a prefill and three decode instances, each of which is killed where the
paper's failure is. Three ways of going on are compared with the same requests without a failure, in one run:

    restarted    the client gives the answer up and asks again, from the start: the paper's systems of today
    recomputed   the router sends prompt and tokens so far to another instance
    resumed      another instance has a replica

Figure 4: one request, 500 tokens of prompt and 500 of answer, a failure after 250. Figure 10: 8 requests of OPT-66B, a
failure half way. Figure 11: the completions of a set of requests over time, three failures, each of one decode instance
that is then started again.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import TIMEOUT_S, AnswerStream, busiest, prompt_of, replicas_of, wait_until
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

DECODES = ("decode-0", "decode-1", "decode-2")
METRICS_PORTS = {"off": 19_460, "spread": 19_470}
PROMPT_TOKENS = 500
RESTARTED, RECOMPUTED, RESUMED = "restarted", "recomputed", "resumed"
MODES = {RESTARTED: "off", RECOMPUTED: "off", RESUMED: "spread"}
READY_S = 120.0
ASKED = 1.03
TRACE_IN_FLIGHT = 8
TRACE_ANSWERS = (100, 400)
TRACE_FAILURES = (0.25, 0.5, 0.75)
"""Of the requests that have ended."""
MODEL = FakeModel(verify=False)
_PAPER = "DéjàVu (arXiv 2403.01876)"


@dataclass(frozen=True)
class Figure:
    """Requests that decode together, of whose instance the process is killed."""

    name: str
    latency_model: str
    requests: int
    answer_tokens: int
    paper: dict[str, str]
    """What the paper shows, by way of going on."""


FIGURES = (
    Figure("figure 4", "opt-13b-a100-tp1", 1, 500, {RESTARTED: "1.89"}),
    Figure("figure 10", "opt-66b-a100-tp4", 8, 500, {RESTARTED: "1.91", RESUMED: "1.24"}),
)


def stack_config(latency_model: str, mode: str) -> StackConfig:
    """mode: of --replication."""
    return StackConfig.of(
        engine="timed",
        latency_model=latency_model,
        replication=mode,
        decode_placement="imbalance",
        prefill_count=1,
        decode_count=len(DECODES),
        metrics_port=METRICS_PORTS[mode],
        restart=False,
        drain_timeout_s=2.0,
    )


async def answers(client: AsyncClient, streams: list[AnswerStream], answer_tokens: int) -> float:
    """Seconds until all are whole."""
    began_s = time.monotonic()
    await asyncio.gather(*(stream.read(client, answer_tokens) for stream in streams))
    return time.monotonic() - began_s


def fresh(count: int, numbers: Iterator[int]) -> list[AnswerStream]:
    """Requests with prompts of their own."""
    return [
        AnswerStream(f"request-{number}", prompt_of(PROMPT_TOKENS, number))
        for number in itertools.islice(numbers, count)
    ]


async def failed(stack: LocalStack, client: AsyncClient, figure: Figure, how: str, numbers: Iterator[int]) -> float:
    """Seconds until all answers are whole, with the failure."""
    streams = fresh(figure.requests, numbers)
    began_s = time.monotonic()
    reading = asyncio.gather(*(stream.read(client, figure.answer_tokens) for stream in streams))
    if how == RESUMED:
        await replicas_of(stack, DECODES, figure.requests)
    half = figure.answer_tokens // 2
    while min(len(stream.token_ids) for stream in streams) < half:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    owner = busiest(stack, DECODES)
    await stack.process(owner).kill()
    if how == RESTARTED:
        again = fresh(figure.requests, numbers)
        cancelling = [client.cancel(stream.request_id) for stream in streams]
        await asyncio.gather(answers(client, again, figure.answer_tokens), *cancelling)
        seconds = time.monotonic() - began_s
        await reading
        streams = again
    else:
        await reading
        seconds = time.monotonic() - began_s
    for stream in streams:
        assert len(stream.token_ids) == figure.answer_tokens, "an answer is not whole"
        assert stream.is_exact(MODEL), "an answer is wrong"
    await stack.restart(owner)
    await stack.wait_until_ready(READY_S)
    return seconds


async def measure_figure(figure: Figure, mode: str, repeats: int) -> dict[str, list[float]]:
    """Seconds, by way of going on; "" without a failure."""
    found: dict[str, list[float]] = {}
    numbers = itertools.count()
    async with (
        LocalStack(stack_config(figure.latency_model, mode)) as stack,
        AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client,
    ):
        await AnswerStream("warm", prompt_of(PROMPT_TOKENS, 10_000)).read(client, 4)
        for _ in range(repeats):
            seconds = await answers(client, fresh(figure.requests, numbers), figure.answer_tokens)
            found.setdefault("", []).append(seconds)
            for how in (how for how, needed in MODES.items() if needed == mode):
                found.setdefault(how, []).append(await failed(stack, client, figure, how, numbers))
    return found


@dataclass
class FailureTrace:
    """A set of requests, as many in flight as there are places."""

    ended_s: list[float] = field(default_factory=list)
    """Of each request, after the begin."""
    failures_s: list[float] = field(default_factory=list)

    @property
    def runtime_s(self) -> float:
        """Until the last has ended."""
        return max(self.ended_s)


async def trace(stack: LocalStack, client: AsyncClient, count: int, first: int, fails: bool) -> FailureTrace:
    rng = random.Random(first)
    streams = [
        (AnswerStream(f"trace-{number}", prompt_of(PROMPT_TOKENS, number)), rng.randrange(*TRACE_ANSWERS))
        for number in range(first, first + count)
    ]
    waiting = iter(streams)
    found = FailureTrace()
    began_s = time.monotonic()

    async def place() -> None:
        for stream, answer_tokens in waiting:
            await stream.read(client, answer_tokens)
            found.ended_s.append(time.monotonic() - began_s)
            assert stream.is_exact(MODEL), "an answer is wrong"

    async def fail() -> None:
        for share in TRACE_FAILURES if fails else ():
            await wait_until(lambda share=share: len(found.ended_s) >= share * count, TIMEOUT_S)  # type: ignore[misc]
            owner = busiest(stack, [name for name in DECODES if name in stack.view().instances])
            found.failures_s.append(time.monotonic() - began_s)
            await stack.process(owner).kill()
            await stack.restart(owner)
            await stack.wait_until_ready(READY_S)

    await asyncio.gather(fail(), *(place() for _ in range(TRACE_IN_FLIGHT)))
    return found


async def measure_trace(mode: str, count: int) -> tuple[FailureTrace, FailureTrace]:
    """Without failures, and with them."""
    async with (
        LocalStack(stack_config(FIGURES[0].latency_model, mode)) as stack,
        AsyncClient(stack.targets, timeout_s=TIMEOUT_S) as client,
    ):
        await AnswerStream("warm", prompt_of(PROMPT_TOKENS, 10_000)).read(client, 4)
        quiet = await trace(stack, client, count, 0, fails=False)
        return quiet, await trace(stack, client, count, 20_000, fails=True)


async def measure_async(options: Options, report: Report) -> None:
    count = options.choose(64, 16)
    report.workload = {
        "engine": "timed",
        "prompt_tokens": PROMPT_TOKENS,
        "figures": [f"{figure.name}: {figure.requests} of {figure.latency_model}" for figure in FIGURES],
        "answer_tokens": [figure.answer_tokens for figure in FIGURES],
        "trace": f"{count} requests, {TRACE_IN_FLIGHT} in flight, {len(TRACE_FAILURES)} failures",
        "trace_answer_tokens": list(TRACE_ANSWERS),
        "decode_instances": len(DECODES),
    }
    for figure in FIGURES[: options.choose(2, 1)]:
        repeats = 2 if figure.requests == 1 and not options.quick else 1
        # Two stacks at once: computing is off the CPU.
        taken = await asyncio.gather(*(measure_figure(figure, mode, repeats) for mode in METRICS_PORTS))
        _report_figure(report, figure, *taken)
    without, resumed = await asyncio.gather(*(measure_trace(mode, count) for mode in METRICS_PORTS))
    _report_trace(report, without, resumed)


def _report_figure(
    report: Report, figure: Figure, without: dict[str, list[float]], replicated: dict[str, list[float]]
) -> None:
    undisturbed_s = statistics.median(without[""])
    report.row(f"{figure.name}: all answers", without[""], "s", way="no failure")
    report.row(f"{figure.name}: all answers", replicated[""], "s", way="no failure, with replicas")
    why = {
        RESTARTED: "half of the answer is drawn twice, and the prompt computed twice: 1.5 and little more; the paper's "
        "also waits for the failure to be noticed and for workers to start",
        RECOMPUTED: "no token is drawn twice: prompt and tokens so far are one prefill; the paper has no such system",
        RESUMED: "a killed process is noticed at once by its closed connections, and another instance with the same "
        "model goes on; the paper loses a stage of a pipeline and repairs it",
    }
    for how in MODES:
        seconds = (without | replicated)[how]
        report.row(f"{figure.name}: all answers", seconds, "s", way=how)
        ratio = statistics.median(seconds) / undisturbed_s
        report.compare(
            f"{_PAPER}, {figure.name}: time with a failure over time without, {how}",
            figure.paper.get(how, "-"),
            f"{ratio:.3f}",
            why[how],
        )
        report.ratio(f"{figure.name}: with a failure / without, {how}", ratio)
        if how == RESUMED:
            report.ratio(f"{figure.name}: asked for ({ASKED}) / resumed", ASKED / ratio, 1.0)


def _report_trace(
    report: Report, without: tuple[FailureTrace, FailureTrace], resumed: tuple[FailureTrace, FailureTrace]
) -> None:
    runtimes: dict[str, float] = {}
    for name, (quiet, failing) in (("recomputed", without), ("resumed", resumed)):
        report.row("figure 11: runtime", [quiet.runtime_s], "s", way=f"no failure, {name}")
        report.row("figure 11: runtime", [failing.runtime_s], "s", way=f"three failures, {name}")
        report.row("figure 11: a request's end", failing.ended_s, "s", way=f"three failures, {name}")
        failures = ", ".join(f"{at_s:.0f}" for at_s in failing.failures_s)
        thirds = [sorted(failing.ended_s)[len(failing.ended_s) * part // 4 - 1] for part in (1, 2, 3, 4)]
        ends = ", ".join(f"{at_s:.1f}" for at_s in thirds)
        report.note(f"figure 11, {name}: failures after {failures} s; quarters of the requests ended after {ends} s")
        runtimes[name] = failing.runtime_s / quiet.runtime_s
        report.ratio(f"figure 11: runtime with three failures / without, {name}", runtimes[name])
    report.compare(
        f"{_PAPER}, figure 11: runtime of the baseline over that with replicas, three failures",
        "1.16",
        f"{runtimes['recomputed'] / runtimes['resumed']:.3f}",
        "the paper's baseline restarts all workers and begins all active requests from scratch; here one of three "
        "instances is lost, and without replicas its requests are computed again from the tokens that they have",
    )


def measure(options: Options, report: Report) -> None:
    """Three figures of the paper."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.failures", measure, description=__doc__)
