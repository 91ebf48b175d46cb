"""The present instances of a cluster, as a cluster to simulate. Pure.

A view gives their number, their phases, and the tokens of KV that their pools hold. It does not give their GPUs, chunks
and batches: the degree of tensor parallelism is given, or read from the layout of their KV, and the rest is taken as
for a plan.
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
    """Instances that serve the same phases now, and accept requests."""

    count: int
    tp: int
    """GPUs of each instance."""
    pool_tokens: int
    """Tokens of KV in the smallest of their pools; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Prefill and decode instances, or instances of both phases; never both kinds."""

    prefill: RunningInstances | None = None
    decode: RunningInstances | None = None
    colocated: RunningInstances | None = None
    is_current: bool = True
    """False: the cluster's store cannot be reached, and instances that have died since are counted too."""

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
    """model: as the routers name it. tps: degrees of tensor parallelism, of prefill and of decode, or one for all;
    empty: as the instances' layouts say. Instances that drain are left out.

    Raises ConfigError for a cluster that answers no request, or has both kinds of instances, or instances of unlike
    tensor parallelism in one phase.
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
    """Return the share of requests that meet both SLOs on the running instances, simulated as a plan is.

    Raises ConfigError for a degree of tensor parallelism that the model cannot have.
    """
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
    """Parse "2", or "2,1" of prefill and decode. Empty: none. Raises ConfigError."""
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
    """tp: 0: as their layouts say. which: their phases, for errors."""
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
    """Return the option of the running instances. Figures of the search are NaN."""
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
