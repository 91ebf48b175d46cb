"""Finds the goodput of one instance per phase and configuration: DistServe's algorithm 1. Pure.

The phases are searched separately, as in its section 4.1 (arXiv 2401.09670). The goodput of each (TP, PP) that fits is
found by bisection over simulations of one instance, which end once the result is certain. The stability of the queue
bounds the rates (section 3.1).
"""

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kaveri.planner.decode_phase import (
    Verdict,
    alone_tpot_s,
    highest_rate_per_s,
    judge_decode,
    lane_pool,
    likely_rate_per_s,
)
from kaveri.planner.parallelism import Parallelism, kv_tokens
from kaveri.planner.plan_question import PlanQuestion
from kaveri.planner.prefill_phase import prefill_ends
from kaveri.planner.profiles import StepLatency, saturating_tokens
from kaveri.simulator.spec import PoolSpec
from kaveri.workload.goodput import GoodputSearch, Probe
from kaveri.workload.requests import PlannedRequest

RESOLUTION = 0.02
"""Relative difference of the highest feasible and the lowest infeasible rate at which the bisection ends."""
_MAX_RUNS = 18


class PlannedPhase(enum.StrEnum):
    """Phase that a planned instance serves."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PhaseOption:
    """A configuration of a prefill or decode instance, and its goodput."""

    phase: PlannedPhase
    parallelism: Parallelism
    step: StepLatency
    pool: PoolSpec
    """Engine settings of one simulated engine; a pipeline is simulated as PP engines."""
    alone: float
    """Share of requests that meet the SLO on an otherwise idle instance."""
    goodput_per_s: float
    """Highest requests per second of one instance within the SLO; 0 if it meets the SLO at no rate."""

    @property
    def per_gpu(self) -> float:
        """Goodput per GPU, which DistServe maximises."""
        return self.goodput_per_s / self.parallelism.gpus


def search_prefill(question: PlanQuestion, parallelism: Parallelism, step: StepLatency) -> PhaseOption:
    """Find a prefill instance's goodput: the highest rate at which enough requests meet the TTFT SLO."""
    pool, sample = phase_pool(question, parallelism, step), question.draw()
    stages, latency = parallelism.pp, step.latency

    def ttft_alone_s(request: PlannedRequest) -> float:
        alone = PlannedRequest(0, 0.0, request.lengths)
        return next(end_s for _, end_s in prefill_ends([alone], latency, stages, pool.chunk_tokens))

    alone = _share([ttft_alone_s(request) for request in sample], question.target.ttft_s)

    def holds(rate_per_s: float) -> bool:
        requests = question.draw(rate_per_s)
        verdict = Verdict(len(requests), question.target.attain)
        for request, end_s in prefill_ends(requests, latency, stages, pool.chunk_tokens):
            verdict.note(end_s - request.arrival_s <= question.target.ttft_s)
            if verdict.is_certain:
                break
        return verdict.holds

    # The least time a prompt can take: its share of the fullest steps.
    least_s = statistics.fmean(_least_prompt_s(step, request, pool.chunk_tokens) for request in sample)
    # From this rate on the queue grows without end: no rate above it meets any SLO for long.
    highest = stages / least_s if least_s > 0 else math.inf
    goodput = _goodput(holds, highest, highest, alone, question.target.attain)
    return PhaseOption(PlannedPhase.PREFILL, parallelism, step, pool, alone, goodput)


def search_decode(question: PlanQuestion, parallelism: Parallelism, step: StepLatency) -> PhaseOption:
    """Find the goodput of one decode instance: the highest rate at which enough requests meet the TPOT SLO."""
    pool, sample = phase_pool(question, parallelism, step), question.draw()
    lanes = parallelism.pp
    alone = _share([alone_tpot_s(step.latency, request) for request in sample], question.target.tpot_s)

    def holds(rate_per_s: float) -> bool:
        requests = question.draw(rate_per_s)
        return judge_decode(requests, pool, lanes, question.target.tpot_s, question.target.attain).holds

    mean_output_tokens = statistics.fmean(request.lengths.output_tokens for request in sample)
    mean_prompt_tokens = statistics.fmean(request.lengths.prompt_tokens for request in sample)
    highest = highest_rate_per_s(step.latency, lanes, question.limits.max_batch, mean_output_tokens)
    likely = likely_rate_per_s(
        pool, lanes, question.target.tpot_s, question.limits.max_batch, mean_prompt_tokens, mean_output_tokens
    )
    goodput = _goodput(holds, likely, highest, alone, question.target.attain)
    return PhaseOption(PlannedPhase.DECODE, parallelism, step, pool, alone, goodput)


def phase_pool(question: PlanQuestion, parallelism: Parallelism, step: StepLatency, tokens: int = 0) -> PoolSpec:
    """Return settings of one of an instance's PP simulated engines. tokens: its KV capacity; 0: as many as fit."""
    return lane_pool(
        step.latency,
        tokens or kv_tokens(question.model, question.hardware, parallelism),
        parallelism.pp,
        question.limits.chunk_tokens or saturating_tokens(step.latency),
        question.limits.max_batch,
        question.model.max_model_len,
    )


def _share(values: Sequence[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values)


def _least_prompt_s(step: StepLatency, request: PlannedRequest, chunk_tokens: int) -> float:
    prefill, tokens = step.latency.prefill, request.lengths.prompt_tokens
    return tokens / chunk_tokens * prefill.step_s + tokens * prefill.token_s + tokens**2 * prefill.token_squared_s


def _goodput(
    holds: Callable[[float], bool], likely_per_s: float, highest_per_s: float, alone: float, attain: float
) -> float:
    """Return the highest rate for which `holds` is True. likely_per_s: start of the search; overload takes longest."""
    if alone < attain:
        return 0.0
    # No instance can keep up with more.
    bound_per_s = highest_per_s * (1 + RESOLUTION)
    start_per_s = min(likely_per_s, highest_per_s)
    search = GoodputSearch(start_per_s if start_per_s < math.inf else 1.0, attain, _MAX_RUNS, RESOLUTION)
    if start_per_s == highest_per_s < math.inf:
        search.note(Probe(bound_per_s, 0.0))
    while (rate_per_s := search.next_rate()) is not None:
        if rate_per_s >= bound_per_s:
            search.note(Probe(bound_per_s, 0.0))
            continue
        search.note(Probe(rate_per_s, 1.0 if holds(rate_per_s) else 0.0))
    return search.held.rate_per_s if search.held is not None else 0.0
