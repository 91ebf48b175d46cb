"""Steady rate of pipelines: seconds between the ends of microbatches while they never run out. Pure."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.planner.pipeline_schedule import shared_ends

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
