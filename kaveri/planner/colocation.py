"""Finds the fewest GPUs on which colocated instances (prefill and decode together) serve a rate. Pure.

DistServe names the cases in which disaggregation does not pay (arXiv 2401.09670, section 7): few GPUs, or throughput
before latency. Steps follow BaselineRule.BESIDE; requests are distributed round robin. Pipelines are not tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kaveri.latency.model import LatencyModel
from kaveri.planner.cluster_check import Attainment, attainment_of
from kaveri.planner.parallelism import Parallelism, kv_tokens, possible_parallelisms
from kaveri.planner.plan_question import SEEDS, PlanQuestion
from kaveri.planner.profiles import StepLatency, read_step_latencies, saturating_tokens
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import BaselineSpec, simulate_baseline
from kaveri.simulator.spec import Overheads
from kaveri.workload.run_columns import RunColumns

BLOCK_TOKENS = 16
_HOPELESS = 0.05
"""Shortfall of attainment in the first simulation from which an instance count is not simulated again."""
_HOPS = 4
"""Messages per request: to its router and instance, and a token back. Baseline simulations leave them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedPlan:
    """A plan of equal instances that each prefill and decode."""

    parallelism: Parallelism
    step: StepLatency
    spec: BaselineSpec
    count: int
    attainment: Attainment

    @property
    def gpus(self) -> int:
        return self.count * self.parallelism.gpus


def cheapest_colocated(question: PlanQuestion, most_gpus: int) -> ColocatedPlan | None:
    """Return the colocated plan with the fewest GPUs, up to most_gpus, whose attainment interval lies at or above the
    required share; None if there is none."""
    model, hardware = question.model, question.hardware
    possible = [one for one in possible_parallelisms(model, hardware, most_gpus) if one.pp == 1]
    steps = read_step_latencies(question.profiles, model, hardware, [one.tp for one in possible])
    sizes = [(one, count) for one in possible for count in range(1, most_gpus // one.gpus + 1)]
    for parallelism, count in sorted(sizes, key=lambda size: (size[0].gpus * size[1], size[0].tp)):
        step = steps[parallelism.tp]
        spec = colocated_spec(question, step, kv_tokens(model, hardware, parallelism) // BLOCK_TOKENS)
        runs = list(_runs(question, spec, count))
        if len(runs) < SEEDS:
            continue
        attainment = attainment_of(runs, question.target)
        if attainment.low >= question.target.attain:
            return ColocatedPlan(parallelism=parallelism, step=step, spec=spec, count=count, attainment=attainment)
    return None


def colocated_spec(question: PlanQuestion, step: StepLatency, total_blocks: int) -> BaselineSpec:
    """Return the settings of one colocated instance with total_blocks KV blocks of BLOCK_TOKENS tokens."""
    return BaselineSpec(
        rule=BaselineRule.BESIDE,
        latency=_with_overheads(step.latency, question.simulations.overheads),
        total_blocks=total_blocks,
        block_tokens=BLOCK_TOKENS,
        max_batch=question.limits.max_batch,
        step_tokens=question.limits.chunk_tokens or saturating_tokens(step.latency),
    )


def colocated_attainment(question: PlanQuestion, spec: BaselineSpec, count: int) -> Attainment:
    runs = [_run(question, spec, count, seed) for seed in question.simulations.cluster_seeds]
    return attainment_of(runs, question.target)


def _runs(question: PlanQuestion, spec: BaselineSpec, count: int) -> Iterator[RunColumns]:
    """Simulate once per seed; stop after a run that falls far short of the required share."""
    for seed in question.simulations.cluster_seeds:
        run = _run(question, spec, count, seed)
        yield run
        if float(question.target.slo.met(run).mean()) < question.target.attain - _HOPELESS:
            return


def _run(question: PlanQuestion, spec: BaselineSpec, count: int, seed: int) -> RunColumns:
    run = simulate_baseline(spec, question.draw(seed=seed), count).columns()
    hops_s = _HOPS * question.simulations.overheads.hop_s
    return replace(run, first_s=run.first_s + hops_s, last_s=run.last_s + hops_s)


def _with_overheads(latency: LatencyModel, overheads: Overheads) -> LatencyModel:
    prefill = replace(latency.prefill, step_s=latency.prefill.step_s + overheads.prefill_step_s)
    decode = tuple(replace(fit, step_s=fit.step_s + overheads.decode_step_s) for fit in latency.decode)
    return replace(latency, prefill=prefill, decode=decode)
