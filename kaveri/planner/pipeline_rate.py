"""Schedule and throughput of pipelines of equal stages whose microbatches differ in length (DéjàVu's baseline). Pure.

A microbatch passes all stages once for its prompts and once for each further token. A stage is first come, first
served. There are as many concurrent microbatches as stages; when one ends, the next begins: the paper's modified
FasterTransformer (arXiv 2403.01876, section 5.2.1, appendix B). The load never runs out.
"""

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BATCHES = 20
"""Number of batch means in the interval's estimate (Law, Simulation Modeling and Analysis, section 9.5.3)."""
_T_95 = 2.093
"""Student's t for BATCHES - 1 degrees of freedom."""
_WARM_UP_SHARE = 8
"""Divisor: this fraction of the microbatches is left out as warm-up, but at least twice the depth."""


@dataclass(frozen=True, slots=True)
class Period:
    """Mean seconds per microbatch of one pipeline, with the 95 % interval."""

    mean_s: float
    low_s: float
    high_s: float


def shared_period(tokens: Sequence[int], depth: int, prompt_s: float, token_s: float) -> Period:
    """Return the period of one pipeline for prompts and tokens, without warm-up and drain; it needs many more
    microbatches than stages. tokens: longest answer of each. prompt_s, token_s: seconds of a pass in one stage."""
    ends = shared_ends(tokens, depth, prompt_s, token_s)
    first, last = max(len(ends) // _WARM_UP_SHARE, 2 * depth), len(ends) - depth
    each = (last - first) // BATCHES
    assert each > 0, f"{len(ends)} microbatches are too few for {depth} stages"
    marks = [ends[first + each * number] for number in range(BATCHES + 1)]
    return _period([(end_s - begin_s) / each for begin_s, end_s in itertools.pairwise(marks)])


def apart_period(tokens: Sequence[int], prompt_s: float, token_s: float) -> Period:
    """Return the period of separate prompt and token pipelines: the slower one's (appendix D: I_dis = max(I_p, I_t)).

    In a full pipeline the first stage never rests, so a microbatch takes the time of its passes in one stage. The
    prompt pipeline samples the first token. prompt_s, token_s: seconds of a pass in one stage of its pipeline.
    """
    each = len(tokens) // BATCHES
    found = _period(
        [token_s * (statistics.fmean(tokens[each * number : each * (number + 1)]) - 1) for number in range(BATCHES)]
    )
    return Period(max(prompt_s, found.mean_s), max(prompt_s, found.low_s), max(prompt_s, found.high_s))


def _period(means: Sequence[float]) -> Period:
    mean = statistics.fmean(means)
    half = _T_95 * statistics.stdev(means) / math.sqrt(len(means))
    return Period(mean, mean - half, mean + half)


def shared_ends(tokens: Sequence[int], depth: int, prompt_s: float, token_s: float) -> list[float]:
    """Return the ascending end times of microbatches in one pipeline for prompts and tokens.

    tokens: longest answer of each microbatch, at least 1; the prompt pass samples the first token. prompt_s, token_s:
    seconds of a pass in one stage.
    """
    waiting = list(tokens)[::-1]
    # Earliest begin of the next pass, a number that keeps the order, passes after this one, and time of a stage.
    ready = [(0.0, number, waiting.pop() - 1, prompt_s) for number in range(min(depth, len(waiting)))]
    number = len(ready)
    free_s = [0.0] * depth
    ends: list[float] = []
    while ready:
        end_s, _, left, stage_s = ready[0]
        for stage, free in enumerate(free_s):
            end_s = free_s[stage] = (end_s if end_s > free else free) + stage_s
        number += 1
        if left:
            heapq.heapreplace(ready, (end_s, number, left - 1, token_s))
            continue
        ends.append(end_s)
        if waiting:
            heapq.heapreplace(ready, (end_s, number, waiting.pop() - 1, prompt_s))
        else:
            heapq.heappop(ready)
    return ends
