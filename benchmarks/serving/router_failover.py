"""What the death of a router costs its clients: 64 streams over two routers, one of which is killed half way.

Real processes: two routers, a prefill and two decode instances with the fake engine. The gap of a stream is its longest
time between two pieces of its answer, from the kill on. Beside it: the same gap of the other router's streams in the
same run, which had no fault. Every answer is compared with the model's own, token by token, and the prompt tokens that
prefill computes are counted, so that what is computed again is known exactly.
"""

import asyncio
import statistics
import time

from benchmarks.support.answer_streams import AnswerStream, metric, percentile, prompt_of, wait_until
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

STREAMS = 64
PROMPT_TOKENS = 64
ANSWER_TOKENS = 120
STEP_S = 0.02
METRICS_PORT = 19_300
ASKED_GAP_S = 0.5
MODEL = FakeModel()
COMPUTED = "kaveri_prefill_tokens_total"
RUNNING_S = 120.0


async def one_kill(seed: int) -> tuple[list[float], list[float], int, float]:
    """Gaps in seconds of the streams that changed routers and of the others; wrong answers; tokens computed again."""
    config = StackConfig.of(
        engine="fake",
        router_count=2,
        prefill_count=1,
        decode_count=2,
        metrics_port=METRICS_PORT,
        restart=False,
        decode_flags=("--fake-step-s", str(STEP_S), "--max-batch", str(STREAMS)),
    )
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=RUNNING_S) as client:
        for number in range(len(stack.targets)):
            await AnswerStream(f"warm-{number}", prompt_of(PROMPT_TOKENS, number, seed)).read(client, ANSWER_TOKENS)
        before = metric(stack, COMPUTED, ["prefill-0"])
        streams = [
            AnswerStream(f"stream-{number}", prompt_of(PROMPT_TOKENS, 2 + number, seed)) for number in range(STREAMS)
        ]
        reading = [asyncio.create_task(stream.read(client, ANSWER_TOKENS)) for stream in streams]
        await wait_until(lambda: min(len(stream.token_ids) for stream in streams) >= ANSWER_TOKENS // 3, RUNNING_S)
        killed_s = time.monotonic()
        await stack.process("router-0").kill()
        await asyncio.gather(*reading)
        again = metric(stack, COMPUTED, ["prefill-0"]) - before - STREAMS * PROMPT_TOKENS
        wrong = sum(len(stream.token_ids) != ANSWER_TOKENS or not stream.is_exact(MODEL) for stream in streams)
        changed = [stream.pause_s(killed_s) for stream in streams if stream.reattaches]
        others = [stream.pause_s(killed_s) for stream in streams if not stream.reattaches]
        return changed, others, wrong, again


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "engine": "fake",
        "streams": STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "step_s": STEP_S,
    }
    changed: list[float] = []
    others: list[float] = []
    wrong, again = 0, 0.0
    for seed in range(options.choose(5, 1)):
        found = await one_kill(seed)
        changed += found[0]
        others += found[1]
        wrong += found[2]
        again += found[3]
    report.row("gap", [1e3 * gap_s for gap_s in changed], "ms", streams="of the killed router")
    report.row("gap", [1e3 * gap_s for gap_s in others], "ms", streams="of the other router")
    for name, gaps in (("killed", changed), ("other", others)):
        p99_s = percentile(gaps, 99)
        report.note(f"{name} router: gap p50 {1e3 * statistics.median(gaps):.0f} ms, p99 {1e3 * p99_s:.0f} ms")
        if name == "killed":
            report.ratio("asked for (0.5 s) / gap p99", ASKED_GAP_S / p99_s, 1.0)
    report.note(f"answers that were not the model's: {wrong}; prompt tokens computed again: {again:.0f}")
    report.ratio("answers exact, of all", 1 - wrong / (len(changed) + len(others)), 1.0)
    report.ratio(
        "prompt tokens computed once, of all", 1 - max(0.0, again) / (len(changed + others) * PROMPT_TOKENS), 1.0
    )


def measure(options: Options, report: Report) -> None:
    """Kills one of two routers under 64 streams, again and again."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.router_failover", measure, description=__doc__)
