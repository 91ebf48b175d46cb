"""Runs the steps of a plan on a model runner, and measures their time. Calls the runner instead of an engine, because
an engine chooses its own steps, and because the timed engine applies a latency model at the same place. Excludes
forming the step and pushing its KV, which overlaps with the next step."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import ModelRunner, SequenceSlice
from kaveri.kv.tiers.pool import KvPool
from kaveri.latency.profile import DecodePoint, PrefillPoint, StepTimes
from kaveri.profiling.plan import StepPlan

_SEED = 20240118
_ROUND_S = 0.05
_ROUND_RUNS = 10
"""Maximum repetitions per round of a step shorter than _ROUND_S, to average out noise."""
_FILL_TOKENS = 512
"""Chunk size for computing the context that is copied; not measured."""
_PARAMS = ResolvedParams(max_tokens=1, seed=0)


@dataclass(slots=True)
class _Step:
    ranges: tuple[tuple[int, int], ...]
    """Chunk of each sequence, [start, stop)."""
    prefill: bool
    taken_s: list[float] = field(default_factory=list)

    def times(self) -> StepTimes:
        return StepTimes(
            median_s=statistics.median(self.taken_s),
            min_s=min(self.taken_s),
            max_s=max(self.taken_s),
            repeats=len(self.taken_s),
        )


def measure_steps(
    runner: ModelRunner,
    total_blocks: int,
    plan: StepPlan,
    rounds: int,
    on_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[PrefillPoint, ...], tuple[DecodePoint, ...]]:
    """Measure each step of the plan in `rounds` rounds, after one to warm up, so that slowdowns hardly change medians.
    Attaches `runner` to a new KV pool. on_step: called (rounds + 1) * steps times."""
    prefills = [_Step(prompts, prefill=True) for prompts in plan.prefill]
    decodes = [_Step(((context - 1, context),) * batch, prefill=False) for batch, context in plan.decode]
    bench = _Bench(runner, total_blocks, max(stop for step in (*prefills, *decodes) for _, stop in step.ranges))
    shuffle = random.Random(_SEED).shuffle
    for number in range(rounds + 1):
        shuffle(prefills)
        # Steps with the same context are adjacent: writing the context takes longer than the steps.
        for step in sorted((*prefills, *decodes), key=lambda step: step.ranges[0][1] if step.ranges[0][0] else 0):
            taken_s = [bench.run(step, clock)]
            while number > 0 and sum(taken_s) < _ROUND_S and len(taken_s) < _ROUND_RUNS:
                taken_s.append(bench.run(step, clock))
            if number > 0:
                step.taken_s += taken_s
            on_step()
    return (
        tuple(
            PrefillPoint(prompts=step.ranges, times=step.times())
            for step in sorted(prefills, key=lambda step: (step.ranges[0][0], _token_count(step), len(step.ranges)))
        ),
        tuple(
            DecodePoint(batch=len(step.ranges), context_tokens=step.ranges[0][1], times=step.times())
            for step in decodes
        ),
    )


def _token_count(step: _Step) -> int:
    return sum(stop - start for start, stop in step.ranges)


class _Bench:
    """A prompt with its KV, and a pool into which that KV is copied as the context of measured steps.

    Every sequence of a step is this prompt in blocks of its own: the KV is real, and caches are as cold as with
    different requests.
    """

    def __init__(self, runner: ModelRunner, total_blocks: int, prompt_tokens: int) -> None:
        self._runner = runner
        self._layout = runner.layout
        self._pool = KvPool(runner.layout, total_blocks)
        runner.attach(self._pool)
        random_ids = np.random.default_rng(_SEED).integers(0, runner.vocab_size, prompt_tokens)
        self._prompt: tuple[int, ...] = tuple(random_ids.tolist())
        self._laid = (0, 0)  # sequences, blocks of each
        block_ids = range(self._layout.block_count(prompt_tokens))
        for start in range(0, prompt_tokens, _FILL_TOKENS):
            self._compute(start, min(start + _FILL_TOKENS, prompt_tokens), block_ids)
        # [layer_count, blocks, block_bytes], uint8
        self._context = self._pool.memory[:, : len(block_ids)].copy()

    def run(self, step: _Step, clock: Callable[[], float]) -> float:
        """Run a step. Returns its duration in seconds, without the preparation."""
        each = self._layout.block_count(step.ranges[0][1])
        if step.ranges[0][0] > 0:
            self._lay(len(step.ranges), each)
        else:
            self._laid = (0, 0)
        # Sequences have the same length, except the last, which may be shorter.
        batch = [
            self._slice(start, stop, range(index * each, index * each + self._layout.block_count(stop)))
            for index, (start, stop) in enumerate(step.ranges)
        ]
        # With a listener, a GPU also copies the KV to the host, as on a prefill instance.
        listener = _ignore_layer if step.prefill else None
        began_s = clock()
        self._runner.run(batch, listener)
        return clock() - began_s

    def _lay(self, count: int, each: int) -> None:
        """Copy the prompt's first `each` blocks to each of `count` sequences."""
        if self._laid[0] >= count and self._laid[1] == each:
            return
        for index in range(count):
            block_ids = range(index * each, (index + 1) * each)
            self._pool.memory[:, block_ids.start : block_ids.stop] = self._context[:, :each]
            self._runner.landed(block_ids)
        self._laid = (count, each)

    def _compute(self, start: int, stop: int, block_ids: Sequence[int]) -> None:
        self._runner.run([self._slice(start, stop, block_ids)], _ignore_layer)

    def _slice(self, start: int, stop: int, block_ids: Sequence[int]) -> SequenceSlice:
        # Always sample a token, so the runner returns only after the computation.
        return SequenceSlice(self._prompt[start:stop], start, block_ids, True, 0, _PARAMS)


def _ignore_layer(layer: int) -> None:
    """Do nothing when the KV of a layer is computed."""
