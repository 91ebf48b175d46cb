"""The running instances of a cluster, as input for a simulation. Pure.

The cluster view gives their number, phases, and KV capacity in tokens. The degree of tensor parallelism is given, or
read from their KV layouts; chunk and batch sizes, which it lacks, are those of a plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kaveri.domain.view import ClusterView, Phase, ViewedInstance
from kaveri.errors import ConfigError
from kaveri.planner.cluster_check import Attainment, PlannedCluster
from kaveri.planner.colocation import colocated_attainment, colocated_spec
from kaveri.planner.observed_workload import FLAG
from kaveri.planner.parallelism import Parallelism, require_possible
from kaveri.planner.placement_search import PhaseOption, PlannedPhase, phase_pool
from kaveri.planner.plan_question import PlanQuestion
from kaveri.planner.profiles import read_step_latencies
from kaveri.policy.replication import ReplicationMode

TP_FLAG = "--running-tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInstances:
    """Equal running instances that accept requests for the same phases."""

    count: int
    tp: int
    """GPUs of each instance."""
    pool_tokens: int
    """Smallest KV capacity among the instances, in tokens; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Running prefill and decode instances, or running colocated instances; never a mix."""

    prefill: RunningInstances | None = None
    decode: RunningInstances | None = None
    colocated: RunningInstances | None = None
    is_current: bool = True
    """False if the cluster's store cannot be reached, so that dead instances may be counted."""

    @property
    def gpus(self) -> int:
        return sum(some.count * some.tp for some in (self.prefill, self.decode, self.colocated) if some is not None)

    @property
    def counts(self) -> str:
        if self.colocated is not None:
            return f"{self.colocated.count} of both phases x TP {self.colocated.tp}"
        named = (("prefill", self.prefill), ("decode", self.decode))
        return " and ".join(f"{some.count} {name} x TP {some.tp}" for name, some in named if some is not None)


def running_cluster(view: ClusterView, model: str, tps: Sequence[int]) -> RunningCluster:
    """Return the instances of a model that accept requests; draining ones are left out. tps: degrees of tensor
    parallelism of prefill and decode, or one for both; empty: read from the instances' KV layouts.

    Raises ConfigError for a cluster that lacks a phase, mixes separate and colocated instances, or has different tensor
    parallelism within a phase.
    """
    prefill, decode = view.ready(Phase.PREFILL, model), view.ready(Phase.DECODE, model)
    for phase, some in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        if not some:
            raise ConfigError(FLAG, f"has no {phase} instance that takes requests for {model}")
    both = tuple(one for one in prefill if one in decode)
    if both and len(both) < max(len(prefill), len(decode)):
        reason = (
            f"has {len(prefill) - len(both)} prefill, {len(decode) - len(both)} decode instances and {len(both)} of"
            " both phases; such a mix is not simulated"
        )
        raise ConfigError(FLAG, reason)
    first, last = (tps[0], tps[-1]) if tps else (0, 0)
    if both:
        return RunningCluster(colocated=_instances(both, last, "of both phases"), is_current=view.store_connected)
    return RunningCluster(
        prefill=_instances(prefill, first, "of prefill"),
        decode=_instances(decode, last, "of decode"),
        is_current=view.store_connected,
    )


def running_attainment(question: PlanQuestion, running: RunningCluster) -> Attainment:
    """Simulate the running cluster, as a plan is, and return the share of requests that meet both SLOs. Raises
    ConfigError for a degree of tensor parallelism that the model cannot have."""
    if running.colocated is not None:
        return _colocated_attainment(question, running.colocated)
    assert running.prefill is not None
    assert running.decode is not None
    cluster = PlannedCluster(
        question=replace(question, replication=ReplicationMode.OFF),
        prefill=_option(question, running.prefill, PlannedPhase.PREFILL),
        prefill_count=running.prefill.count,
        decode=_option(question, running.decode, PlannedPhase.DECODE),
        decode_count=running.decode.count,
    )
    return cluster.attainment()


def parse_tps(text: str) -> tuple[int, ...]:
    """Parse degrees of tensor parallelism: "2", or "2,1" for prefill and decode; empty for none. Raises ConfigError."""
    if not text:
        return ()
    try:
        tps = tuple(int(part) for part in text.split(","))
    except ValueError:
        tps = ()
    if len(tps) not in (1, 2) or min(tps) < 1:
        raise ConfigError(TP_FLAG, f"is {text!r}; write TP, or TP,TP of prefill and decode, each at least 1")
    return tps


def _instances(some: Sequence[ViewedInstance], tp: int, which: str) -> RunningInstances:
    """tp: 0 to read it from the layouts. which: name of the instances, for errors."""
    layouts = [one.record.layout for one in some]
    pools = [
        one.load.total_blocks * layout.block_tokens
        for one, layout in zip(some, layouts, strict=True)
        if layout is not None
    ]
    ranks = {max(1, layout.tensor_ranks) for layout in layouts if layout is not None} or {1}
    if not tp and len(ranks) > 1:
        degrees = " and ".join(f"TP {one}" for one in sorted(ranks))
        raise ConfigError(FLAG, f"has instances {which} with {degrees}; only equal ones are simulated: give {TP_FLAG}")
    return RunningInstances(count=len(some), tp=tp or max(ranks), pool_tokens=min(pools, default=0))


def _option(question: PlanQuestion, some: RunningInstances, phase: PlannedPhase) -> PhaseOption:
    """Return the running instances as an option of a plan, with NaN for goodput."""
    model, parallelism = question.model, Parallelism(some.tp, 1)
    # A stage of a pipeline runs as an instance of its own (kaveri.planner.plan_file), without room for the whole model.
    require_possible(model, question.hardware, parallelism, some.tp, TP_FLAG, has_pool=some.pool_tokens > 0)
    step = read_step_latencies(question.profiles, model, question.hardware, [some.tp])[some.tp]
    pool = phase_pool(question, parallelism, step, some.pool_tokens)
    return PhaseOption(phase, parallelism, step, pool, math.nan, math.nan)


def _colocated_attainment(question: PlanQuestion, some: RunningInstances) -> Attainment:
    option = _option(question, some, PlannedPhase.DECODE)
    spec = colocated_spec(question, option.step, option.pool.total_blocks)
    return colocated_attainment(question, spec, some.count)
