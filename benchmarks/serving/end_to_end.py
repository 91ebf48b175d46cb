"""What disaggregation costs on one machine: a stack of 1 prefill + 1 decode against the same engine alone.

Ours is `kaveri up`'s stack (router, prefill, decode, Redis: each its own process) asked through the SDK over gRPC.
Theirs is one StepwiseEngine in one process that prefills and decodes by itself, with no services, no RPC and no KV
transfer. Both keep as many requests in flight as the concurrency says and answer past the end-of-sequence token. The
stack has two engine processes, so it may use both cores for computing; the engine alone uses one.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.engine.contract import EngineEvent, EngineKey, EngineRequest, EngineStopped, FirstToken, StepTokens
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.transformers.loading import load_runner
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

CONCURRENCIES = (1, 8, 32)
PROMPT_TOKENS = (64, 256)
ANSWER_TOKENS = 64
CHUNK_TOKENS = 512
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 1024
PHASES = ("router_s", "prefill_queue_s", "prefill_s", "kv_transfer_s", "kv_tail_s", "decode_queue_s", "decode_s")
_DEADLINE_S = 120.0


@dataclass(frozen=True)
class EndToEndRound:
    """The figures of one closed-loop round."""

    tokens_per_s: float
    ttft_s: list[float]
    phases_s: dict[str, float]
    """Mean of each phase; empty for the engine alone."""


def make_prompts(count: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Random token ids; only their number matters."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(count)]


class EngineAlone:
    """The engine without services. Answers are kept on the engine: adopt() instead of a push."""

    def __init__(self, model: str, loop: asyncio.AbstractEventLoop) -> None:
        torch.set_num_threads(1)
        runner = load_runner(model, "auto", "cpu", MAX_MODEL_LEN, BLOCK_TOKENS)
        self.vocab_size = runner.vocab_size
        self._engine = StepwiseEngine(runner, total_blocks=2048, chunk_tokens=CHUNK_TOKENS, max_batch=64)
        self._loop = loop
        self._numbers = itertools.count()
        self._first_at_s: dict[EngineKey, float] = {}
        self._ended: dict[EngineKey, asyncio.Future[None]] = {}
        self._engine.start(self._listen)

    def close(self) -> None:
        """Ends the engine's threads."""
        self._engine.close()

    async def ask(self, prompt: tuple[int, ...], params: SamplingParams) -> float:
        """Seconds to the first token, once the whole answer is there."""
        key = EngineKey(f"request {next(self._numbers)}", 1)
        ended = self._ended[key] = self._loop.create_future()
        began_s = time.perf_counter()
        self._engine.prefill(EngineRequest(key, prompt, 0, params))
        async with asyncio.timeout(_DEADLINE_S):
            await ended
        return self._first_at_s.pop(key) - began_s

    def _listen(self, events: Sequence[EngineEvent]) -> None:
        ended = []
        for event in events:
            if isinstance(event, FirstToken):
                self._first_at_s[event.key] = time.perf_counter()
                self._engine.adopt(event.key)
                self._engine.admit(event.key)
            elif isinstance(event, StepTokens):
                ended += [step.key for step in event.steps if step.finish is not None]
            elif isinstance(event, EngineStopped):
                raise RuntimeError(event.reason)
        if ended:
            self._loop.call_soon_threadsafe(self._end, ended)

    def _end(self, keys: list[EngineKey]) -> None:
        for key in keys:
            self._ended.pop(key).set_result(None)


async def closed_loop(concurrency: int, prompts: Sequence[tuple[int, ...]], ask: Any) -> tuple[float, list[Any]]:
    """Seconds for all prompts with `concurrency` in flight at a time, and what `ask` returned for each."""
    waiting = iter(prompts)
    results: list[Any] = []

    async def worker() -> None:
        for prompt in waiting:
            result = await ask(prompt)
            results.append(result)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return time.perf_counter() - began_s, results


async def stack_round(client: AsyncClient, concurrency: int, prompts: Sequence[tuple[int, ...]]) -> EndToEndRound:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)

    async def ask(prompt: tuple[int, ...]) -> Any:
        return await client.generate(prompt_token_ids=prompt, params=params, timeout_s=_DEADLINE_S)

    seconds, answers = await closed_loop(concurrency, prompts, ask)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    phases = {name: statistics.mean(getattr(answer.timing.server, name) for answer in answers) for name in PHASES}
    return EndToEndRound(tokens / seconds, [answer.timing.ttft_s for answer in answers], phases)


async def alone_round(engine: EngineAlone, concurrency: int, prompts: Sequence[tuple[int, ...]]) -> EndToEndRound:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, seed=0)
    seconds, ttft_s = await closed_loop(concurrency, prompts, lambda prompt: engine.ask(prompt, params))
    return EndToEndRound(len(prompts) * ANSWER_TOKENS / seconds, ttft_s, {})


async def measure_async(options: Options, report: Report) -> None:
    repeats = options.choose(3, 1)
    report.workload = {
        "model": options.model,
        "dtype": "auto",
        "prompt_tokens": list(PROMPT_TOKENS),
        "answer_tokens": ANSWER_TOKENS,
        "loop": "closed",
        "threads_per_engine": 1,
    }
    config = StackConfig.of(model=options.model, prefill_count=1, decode_count=1, max_model_len=MAX_MODEL_LEN)
    engine = EngineAlone(options.model, asyncio.get_running_loop())
    rounds: dict[tuple[str, int], list[EndToEndRound]] = {}
    try:
        async with LocalStack(config) as stack, AsyncClient(stack.target) as client:
            for concurrency in CONCURRENCIES:
                count = options.choose(max(12, 4 * concurrency), max(4, 2 * concurrency))
                # One uncounted turn each, then turn by turn, so that drift of the machine hits both.
                for repeat in range(-1, repeats):
                    prompts = make_prompts(count, engine.vocab_size, seed=100 * concurrency + repeat)
                    ours = await stack_round(client, concurrency, prompts)
                    theirs = await alone_round(engine, concurrency, prompts)
                    if repeat >= 0:
                        rounds.setdefault(("stack", concurrency), []).append(ours)
                        rounds.setdefault(("engine alone", concurrency), []).append(theirs)
    finally:
        engine.close()
    for concurrency in CONCURRENCIES:
        for system in ("stack", "engine alone"):
            taken = rounds[system, concurrency]
            labels = {"system": system, "concurrency": concurrency}
            report.row("output tokens/s", [each.tokens_per_s for each in taken], "tokens/s", **labels)
            report.row("TTFT p50", [1e3 * statistics.median(each.ttft_s) for each in taken], "ms", **labels)
            report.row("TTFT max", [1e3 * max(each.ttft_s) for each in taken], "ms", **labels)
        for name in PHASES:
            values = [1e3 * each.phases_s[name] for each in rounds["stack", concurrency]]
            report.row(f"mean {name.removesuffix('_s')}", values, "ms", system="stack", concurrency=concurrency)
        pairs = list(zip(rounds["stack", concurrency], rounds["engine alone", concurrency], strict=True))
        speed = statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
        first = statistics.median(statistics.median(o.ttft_s) / statistics.median(t.ttft_s) for o, t in pairs)
        report.ratio(f"tokens/s, stack / engine alone, concurrency {concurrency}", speed)
        report.ratio(f"TTFT p50, stack / engine alone, concurrency {concurrency}", first)


def measure(options: Options, report: Report) -> None:
    """Both systems, turn by turn, at each concurrency."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.end_to_end", measure, description=__doc__)
