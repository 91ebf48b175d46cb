"""Simulates one prefill instance alone, with pipeline stages. Pure.

DistServe's simu_prefill (arXiv 2401.09670, algorithm 1): computed prompts leave at once, so blocks never run short.
Steps are formed by the engines' own form_step, first come, first served.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from kaveri.engine.stepwise.sequence import SequencePhase, form_step
from kaveri.latency.model import LatencyModel
from kaveri.simulator.sequence import CountedSequence
from kaveri.workload.requests import PlannedRequest


def prefill_ends(
    requests: Sequence[PlannedRequest], latency: LatencyModel, stages: int, chunk_tokens: int
) -> Iterator[tuple[PlannedRequest, float]]:
    """Yield each request with the time of its first token in seconds, ascending.

    stages: pipeline stages, each with an equal share of a step's duration. A stage begins a step when its previous step
    and the previous stage's part of this step have ended.
    """
    waiting: deque[CountedSequence] = deque()
    free_s = [0.0] * stages
    arriving = 0
    while waiting or arriving < len(requests):
        now_s = free_s[0] if waiting else max(free_s[0], requests[arriving].arrival_s)
        while arriving < len(requests) and requests[arriving].arrival_s <= now_s:
            request = requests[arriving]
            tokens = request.lengths.prompt_tokens
            waiting.append(CountedSequence(request.number, request, tokens, 1, SequencePhase.PREFILLING))
            arriving += 1
        planned = form_step((), cast(Any, waiting), chunk_tokens)
        step_s = latency.step_s([(one.sequence.computed, one.token_count) for one in planned])
        end_s = now_s
        for stage in range(stages):
            end_s = free_s[stage] = max(end_s, free_s[stage]) + step_s / stages
        for one in planned:
            sequence = cast(CountedSequence, one.sequence)
            sequence.computed += one.token_count
            if not sequence.pending:
                waiting.popleft()
                yield sequence.owner, end_s
