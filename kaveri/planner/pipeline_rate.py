"""Schedule and steady rate of pipelines of equal stages whose microbatches end early: DéjàVu's baseline. Pure.

A microbatch passes all stages once for its prompts and once for each further token. A stage is first come, first
served. As many microbatches as stages are under way; when one ends, the next one begins: the paper's modified
FasterTransformer (arXiv 2403.01876, section 5.2.1, appendix B). The rate is that of microbatches that never run out.
"""

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BATCHES = 20
"""Number of batch means; the interval is that of their mean (Law, Simulation Modeling and Analysis, section 9.5.3)."""
_T_95 = 2.093
"""Student's t of BATCHES - 1 degrees of freedom."""
_WARM_UP_SHARE = 8
"""1 / this of the ends is left out at the start, at least twice the depth."""


@dataclass(frozen=True, slots=True)
class Period:
    """Seconds per microbatch of one pipeline, with the 95 % interval."""

    mean_s: float
    low_s: float
    high_s: float


def shared_period(tokens: Sequence[int], depth: int, prompt_s: float, token_s: float) -> Period:
    """Period of one pipeline for both phases; see shared_ends().

    Warm-up is left out, and the drain: ends after the last microbatch began. So there must be many more microbatches
    than stages.
    """
    ends = shared_ends(tokens, depth, prompt_s, token_s)
    first, last = max(len(ends) // _WARM_UP_SHARE, 2 * depth), len(ends) - depth
    each = (last - first) // BATCHES
    assert each > 0, f"{len(ends)} microbatches are too few for {depth} stages"
    marks = [ends[first + each * number] for number in range(BATCHES + 1)]
    return _period([(end_s - begin_s) / each for begin_s, end_s in itertools.pairwise(marks)])


def apart_period(tokens: Sequence[int], prompt_s: float, token_s: float) -> Period:
    """Period of a prompt pipeline and a token pipeline: the slower one's, as in appendix D's I_dis = max(I_p, I_t).

    Passes of a full pipeline take one time, so its first stage never rests: a microbatch takes the time of its passes
    in a stage. The first token is the prompt pipeline's. prompt_s, token_s: of one stage of the respective pipeline.
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
    """Return the end of each microbatch, in the order of the ends, in one pipeline of both phases.

    tokens: of the longest answer of each microbatch, at least 1; the prompt pass draws the first. prompt_s, token_s: of
    one stage.
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
