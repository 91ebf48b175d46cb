"""How long pipelines of equal stages take for microbatches that end early: DéjàVu's makespans. Pure.

A microbatch passes all stages once for its prompts and once for each further token. A stage takes what comes first. As
many microbatches as stages are under way; when one ends, the next one begins: the paper's modified FasterTransformer
(arXiv 2403.01876, section 5.2.1, appendix B).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Requests that go through a pipeline together."""

    ready_s: float
    """When its first pass may begin."""
    tokens: int
    """Of the longest answer among them, at least 1; the prompt pass draws the first."""


def shared_ends(batches: Sequence[Microbatch], depth: int, prompt_s: float, token_s: float) -> list[float]:
    """When each ends in one pipeline of both phases. prompt_s, token_s: of one stage."""
    return _ends(batches, depth, [prompt_s] * len(batches), token_s, [one.tokens for one in batches])


def prompt_ends(batches: Sequence[Microbatch], depth: int, prompt_s: float) -> list[float]:
    """When the prompts of each are computed in a pipeline that does nothing else."""
    return _ends(batches, depth, [prompt_s] * len(batches), 0.0, [1] * len(batches))


def token_ends(batches: Sequence[Microbatch], depth: int, token_s: float) -> list[float]:
    """When each ends in a pipeline for tokens. The first token was drawn with the prompts."""
    return _ends(batches, depth, [token_s] * len(batches), token_s, [one.tokens - 1 for one in batches])


def _ends(
    batches: Sequence[Microbatch], depth: int, first_s: Sequence[float], more_s: float, passes: Sequence[int]
) -> list[float]:
    ends = [one.ready_s for one in batches]
    waiting = [number for number in range(len(batches)) if passes[number] > 0][::-1]
    ready: list[tuple[float, int, int]] = []
    free_s = [0.0] * depth

    def inject(at_s: float) -> None:
        if waiting:
            number = waiting.pop()
            heapq.heappush(ready, (max(at_s, batches[number].ready_s), number, 0))

    for _ in range(depth):
        inject(0.0)
    while ready:
        end_s, number, passed = heapq.heappop(ready)
        stage_s = first_s[number] if passed == 0 else more_s
        for stage in range(depth):
            end_s = free_s[stage] = max(end_s, free_s[stage]) + stage_s
        if passed + 1 < passes[number]:
            heapq.heappush(ready, (end_s, number, passed + 1))
        else:
            ends[number] = end_s
            inject(end_s)
    return ends
