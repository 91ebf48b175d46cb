"""What the death of a router costs its clients: 64 streams over two routers, one of which is killed half way.

Real processes: two routers, a prefill and two decode instances with the fake engine. The gap of a stream is its longest
time between two pieces of its answer, from the kill on. Beside it: the same gap of the other router's streams in the
same run, which had no fault. Every answer is compared with the model's own, token by token, and the prompt tokens that
prefill computes are counted, so that what is computed again is known exactly.
"""

import asyncio
import re
import statistics
import time
import urllib.request
from dataclasses import dataclass, field

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
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
PREFILL_METRICS_PORT = METRICS_PORT + 2
"""Behind those of two routers."""
_COMPUTED = re.compile(r"^kaveri_prefill_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass
class Stream:
    """One answer, and when its pieces came."""

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    reattaches: int = 0

    async def read(self, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        async with client.stream(prompt_token_ids=self.prompt, params=params, timeout_s=120) as stream:
            async for chunk in stream:
                assert chunk.index == len(self.token_ids), "a token is missing, or came twice"
                self.token_ids += chunk.token_ids
                self.at_s.append(time.monotonic())
        assert chunk.timing is not None
        self.reattaches = chunk.timing.server.reattaches

    def gap_s(self, from_s: float) -> float:
        """The longest time between two pieces of which the second came after `from_s`."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max((later - sooner for sooner, later in pairs if later >= from_s), default=0.0)


def computed_tokens() -> float:
    """Prompt tokens that prefill has computed so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PREFILL_METRICS_PORT}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(found) for found in _COMPUTED.findall(text))


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
    async with LocalStack(config) as stack:
        async with AsyncClient(stack.targets, timeout_s=120) as client:
            warm = Stream(tuple(range(1, PROMPT_TOKENS)))
            for _ in stack.targets:
                await Stream(warm.prompt).read(client)
            before = computed_tokens()
            prompts = [
                tuple(1 + (seed + 7 * number + place) % 900 for place in range(PROMPT_TOKENS))
                for number in range(STREAMS)
            ]
            streams = [Stream(prompt) for prompt in prompts]
            reading = [asyncio.create_task(stream.read(client)) for stream in streams]
            while min(len(stream.token_ids) for stream in streams) < ANSWER_TOKENS // 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            killed_s = time.monotonic()
            await stack.process("router-0").kill()
            await asyncio.gather(*reading)
        wrong = sum(
            tuple(stream.token_ids) != tuple(MODEL.answer(stream.prompt, 0, ANSWER_TOKENS)) for stream in streams
        )
        again = computed_tokens() - before - STREAMS * PROMPT_TOKENS
        changed = [stream.gap_s(killed_s) for stream in streams if stream.reattaches]
        others = [stream.gap_s(killed_s) for stream in streams if not stream.reattaches]
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
        p99_s = statistics.quantiles(gaps, n=100)[98]
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
