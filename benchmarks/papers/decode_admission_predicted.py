"""Decode admission on a tight KV pool with the predictor that is bundled with kaveri-tiny.

As benchmarks.papers.decode_admission, but with real answers: kaveri-tiny on the transformers engine answers prompts of
the kinds that its predictor was trained on, and the predictor service runs beside the first chunk, as by default. One
prefill and one decode instance.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence

from benchmarks.papers.decode_admission import (
    GAP_S,
    GREEDY,
    RESERVING,
    AdmissionSetting,
    Served,
    add_rows,
    admission_flags,
    figures_of,
    free_port,
    jct_ratio,
)
from benchmarks.support.bursts import send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.models import KAVERI_TINY, bundled_predictor
from kaveri.workload.prompts import RequestPrompt
from kaveri.workload.requests import PlannedRequest, RequestLengths
from training.predictor.make_prompts import make_prompts

MOST_ANSWER_TOKENS = 512
MAX_MODEL_LEN = 2048
POOL_BLOCKS = 640
"""10 240 tokens."""
BLOCK_BYTES = 5 * 2 * 16 * 2 * 32 * 2
"""kaveri-tiny's: layers, K and V, tokens, KV heads, elements of a head, bytes of bfloat16."""
PROMPT_SEED = 20_261
"""Differs from the seed of the training prompts, but some prompts may be the same."""


def plan(count: int, repeat: int) -> list[PlannedRequest]:
    """A burst of `count` prompts."""
    prompts = make_prompts(2 * count, PROMPT_SEED + repeat)
    random.Random(repeat).shuffle(prompts)
    return [
        PlannedRequest(number, number * GAP_S, RequestLengths(0, MOST_ANSWER_TOKENS), RequestPrompt("prompt", text))
        for number, text in enumerate(prompts[:count])
    ]


async def served(
    setting: AdmissionSetting, predictor: str, bursts: Sequence[Sequence[PlannedRequest]], blocks: int, report: Report
) -> tuple[list[Served], list[int]]:
    """The bursts on one stack, and the lengths of all answers; a few requests before are not counted."""
    metrics_port = free_port()
    taken: list[Served] = []
    lengths: list[int] = []
    async with (
        timed_stack(
            report,
            setting.policy,
            engine="transformers",
            latency_model="",
            model=KAVERI_TINY,
            predictor=predictor,
            prefill_count=1,
            decode_count=1,
            max_model_len=MAX_MODEL_LEN,
            decode_flags=admission_flags(setting.policy, blocks * BLOCK_BYTES, metrics_port),
        ) as stack,
        AsyncClient(stack.target) as client,
    ):
        await send(client, plan(4, 0), 0, report, natural_length=True)
        for requests in bursts:
            run, figures = await figures_of(client, requests, metrics_port, report)
            taken.append(figures)
            lengths += [record.received_tokens for record in run.records]
    return taken, lengths


async def measure_async(options: Options, report: Report) -> None:
    predictor = bundled_predictor(KAVERI_TINY)
    if predictor is None:
        report.note("there is no predictor bundled with kaveri-tiny; nothing was measured")
        return
    count, blocks = options.choose(256, 32), options.choose(POOL_BLOCKS, POOL_BLOCKS // 4)
    bursts = [plan(count, repeat) for repeat in range(1, 1 + options.choose(3, 1))]
    found: dict[AdmissionSetting, list[Served]] = {}
    for policy in (GREEDY.policy, *RESERVING):
        setting = AdmissionSetting(policy)
        found[setting], lengths = await served(setting, predictor, bursts, blocks, report)
        add_rows(report, policy, found[setting])
    report.workload = {
        "model": KAVERI_TINY,
        "requests": count,
        "most_answer_tokens": MOST_ANSWER_TOKENS,
        "answer_tokens_mean": round(statistics.fmean(lengths), 1),
        "answer_tokens_median": statistics.median(lengths),
        "pool_tokens": 16 * blocks,
    }
    for setting, taken in found.items():
        if setting != GREEDY:
            jct_ratio(report, setting.policy, taken, found[GREEDY])


def measure(options: Options, report: Report) -> None:
    """Each policy on a stack of its own, with the same bursts."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.decode_admission_predicted", measure, description=__doc__)
