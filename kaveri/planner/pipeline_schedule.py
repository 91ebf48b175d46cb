"""Schedule of a pipeline of equal stages whose microbatches end early: DéjàVu's baseline. Pure.

A microbatch passes all stages once for its prompts and once for each further token. A stage is first come, first
served. As many microbatches as stages are under way; when one ends, the next one begins: the paper's modified
FasterTransformer (arXiv 2403.01876, section 5.2.1, appendix B).
"""

import heapq
from collections.abc import Sequence


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
