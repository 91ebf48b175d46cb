"""Plans the number and configuration of instances that serve a workload within its SLOs. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kaveri.errors import ConfigError
from kaveri.planner.cluster_check import Attainment, PlannedCluster
from kaveri.planner.colocation import ColocatedPlan, cheapest_colocated
from kaveri.planner.node_unit import NodeUnit, cheapest_unit
from kaveri.planner.parallelism import Parallelism, possible_parallelisms, require_possible
from kaveri.planner.placement_search import RESOLUTION, PhaseOption, search_decode, search_prefill
from kaveri.planner.plan_question import PlanQuestion
from kaveri.planner.profiles import read_step_latencies

EQUAL_SHARE = 2 * RESOLUTION
"""Relative difference below which goodputs count as equal: each is known to within RESOLUTION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """A cluster with the attainment predicted by its simulation."""

    cluster: PlannedCluster
    attainment: Attainment


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster with the fewest GPUs that meets the SLOs, and the alternatives tried."""

    question: PlanQuestion
    cluster: PlannedCluster
    prefill_options: tuple[PhaseOption, ...]
    decode_options: tuple[PhaseOption, ...]
    """All configurations tried, in descending order of goodput per GPU."""
    attainment: Attainment
    frontier: tuple[SimulatedCluster, ...]
    """Simulated clusters with a higher attainment than all cheaper ones, cheapest first."""
    without_prefill: Attainment
    """Attainment when one prefill instance dies for good."""
    without_decode: Attainment
    colocated: ColocatedPlan | None
    """Colocated instances that serve the rate with fewer GPUs; None if there are none."""

    @property
    def is_estimate(self) -> bool:
        """True if a latency model of the cluster was derived from another instead of measured."""
        return self.cluster.prefill.step.is_estimate or self.cluster.decode.step.is_estimate

    @property
    def binds(self) -> str:
        """Name of the SLO, TTFT or TPOT, that more requests miss; empty if none misses any."""
        if not self.attainment.missed_ttft and not self.attainment.missed_tpot:
            return ""
        return "TTFT" if self.attainment.missed_ttft >= self.attainment.missed_tpot else "TPOT"


def plan(question: PlanQuestion) -> ClusterPlan:
    """Find the fewest GPUs that serve the rate. DistServe's algorithm 1 or 2 gives the instances; more are added until
    the simulated cluster's attainment interval lies at or above the required share. Raises ConfigError if no number of
    GPUs suffices, or more than the question allows."""
    prefill_options, decode_options = search(question)
    rate = question.demand.rate_per_s
    unit: NodeUnit | None = None
    if question.limits.same_node:
        unit = cheapest_unit(prefill_options, decode_options, rate, question.hardware)
        prefill, prefill_count = unit.prefill, unit.prefill_count * unit.count(rate)
        decode, decode_count = unit.decode, unit.decode_count * unit.count(rate)
    else:
        prefill, decode = cheapest(prefill_options, rate), cheapest(decode_options, rate)
        prefill_count, decode_count = instances(prefill, rate), instances(decode, rate)
    cluster = PlannedCluster(
        question=question, prefill=prefill, prefill_count=prefill_count, decode=decode, decode_count=decode_count
    )
    tried: list[SimulatedCluster] = []
    while True:
        _require_affordable(question, cluster)
        attainment = cluster.attainment()
        tried.append(SimulatedCluster(cluster=cluster, attainment=attainment))
        if attainment.low >= question.target.attain:
            break
        # Each phase alone meets its SLO as often as required; both together do so less often.
        cluster = _larger(cluster, unit)[0 if attainment.missed_ttft >= attainment.missed_tpot else -1]
    # The benefit of one more step.
    tried += [
        SimulatedCluster(cluster=larger, attainment=larger.attainment())
        for larger in _larger(cluster, unit)
        if larger.gpus <= question.gpus
    ]
    asked_apart = question.limits.prefill is not None or question.limits.decode is not None
    return ClusterPlan(
        question=question,
        cluster=cluster,
        prefill_options=prefill_options,
        decode_options=decode_options,
        attainment=attainment,
        frontier=frontier(tried),
        without_prefill=cluster.attainment(cluster.lanes_of("prefill")),
        without_decode=cluster.attainment(cluster.lanes_of("decode")),
        colocated=None if asked_apart else cheapest_colocated(question, cluster.gpus - 1),
    )


def frontier(tried: Sequence[SimulatedCluster]) -> tuple[SimulatedCluster, ...]:
    """Return the clusters whose attainment, at the lower end of its interval, exceeds that of all cheaper ones."""
    found: list[SimulatedCluster] = []
    for one in sorted(tried, key=lambda one: (one.cluster.gpus, -one.attainment.low)):
        if not found or one.attainment.low > found[-1].attainment.low:
            found.append(one)
    return tuple(found)


def search(question: PlanQuestion) -> tuple[tuple[PhaseOption, ...], tuple[PhaseOption, ...]]:
    """Return prefill and decode configurations, best goodput per GPU first (DistServe's algorithm 1). Raises
    ConfigError when no configuration meets an SLO, even without other load."""
    model, hardware = question.model, question.hardware
    asked = question.limits.prefill, question.limits.decode
    for flag, one in zip(("--prefill-tp-pp", "--decode-tp-pp"), asked, strict=True):
        if one is not None:
            require_possible(model, hardware, one, question.gpus, flag)
    possible = possible_parallelisms(model, hardware, question.gpus - 1)
    candidates = [possible if one is None else (one,) for one in asked]
    if not all(candidates):
        reason = f"is {question.gpus}; {model.name} fits on no {question.gpus - 1} GPUs of {hardware.name}"
        raise ConfigError("--gpus", reason)
    degrees = sorted({one.tp for some in candidates for one in some})
    steps = read_step_latencies(question.profiles, model, hardware, degrees)
    prefill = search_each(question, candidates[0], lambda one: search_prefill(question, one, steps[one.tp]))
    _require_possible_slo(prefill, "--slo-ttft-s", question.target.ttft_s, question.target.attain)
    decode = search_each(question, candidates[1], lambda one: search_decode(question, one, steps[one.tp]))
    _require_possible_slo(decode, "--slo-tpot-s", question.target.tpot_s, question.target.attain)
    return prefill, decode


def best_per_gpu(options: Sequence[PhaseOption]) -> PhaseOption:
    """Return the configuration with the highest goodput per GPU (algorithm 1); of equals, the one with fewest GPUs."""
    best = max(option.per_gpu for option in options)
    equal = [option for option in options if option.per_gpu >= best * (1 - EQUAL_SHARE)]
    return min(equal, key=lambda option: (option.parallelism.gpus, -option.per_gpu))


def cheapest(options: Sequence[PhaseOption], rate_per_s: float) -> PhaseOption:
    """Return the configuration that needs the fewest GPUs at that rate: best_per_gpu() at high rates. At low rates,
    a small instance can be cheaper than a more efficient large one that is mostly idle."""
    able = [option for option in options if option.goodput_per_s > 0]
    least = min(instances(option, rate_per_s) * option.parallelism.gpus for option in able)
    return best_per_gpu([one for one in able if instances(one, rate_per_s) * one.parallelism.gpus == least])


def instances(option: PhaseOption, rate_per_s: float) -> int:
    """Return the number of instances of this configuration that the rate requires."""
    return math.ceil(rate_per_s / option.goodput_per_s - 1e-9)


def search_each(
    question: PlanQuestion, candidates: Sequence[Parallelism], search_one: Callable[[Parallelism], PhaseOption]
) -> tuple[PhaseOption, ...]:
    """Find the goodputs of configurations that may need the fewest GPUs, sorted by goodput per GPU.

    candidates: in ascending order of GPUs. With `same_node` all are tried, because both phases must fit together.
    """
    rate, fewest, options = question.demand.rate_per_s, math.inf, []
    for one in candidates:
        if one.gpus > fewest and not question.limits.same_node:
            # One instance of it is larger than a cluster of others that carries the rate.
            break
        option = search_one(one)
        options.append(option)
        if option.goodput_per_s > 0:
            fewest = min(fewest, instances(option, rate) * one.gpus)
    return tuple(sorted(options, key=lambda option: (-option.per_gpu, option.parallelism.gpus)))


def _require_possible_slo(options: Sequence[PhaseOption], flag: str, slo_s: float, attain: float) -> None:
    if any(option.goodput_per_s > 0 for option in options):
        return
    best = max(options, key=lambda option: option.alone)
    if best.alone < attain:
        reason = (
            f"is {slo_s:g}; at any rate, with as many instances as you like, at most {best.alone:.0%} of requests meet"
            f" it ({best.parallelism}, nothing else to do), and {attain:.0%} must"
        )
    else:
        reason = (
            f"is {slo_s:g}; alone {best.alone:.0%} of requests meet it ({best.parallelism}), at no rate {attain:.0%}"
        )
    raise ConfigError(flag, reason)


def _require_affordable(question: PlanQuestion, cluster: PlannedCluster) -> None:
    if cluster.gpus > question.gpus:
        prefill, decode = cluster.prefill.parallelism, cluster.decode.parallelism
        reason = (
            f"is {question.gpus}; {question.demand.rate_per_s:g} requests/s need at least {cluster.gpus}: "
            f"{cluster.prefill_count} x prefill ({prefill}) and {cluster.decode_count} x decode ({decode})"
        )
        raise ConfigError("--gpus", reason)


def _larger(cluster: PlannedCluster, unit: NodeUnit | None) -> tuple[PlannedCluster, ...]:
    if unit is None:
        return (
            replace(cluster, prefill_count=cluster.prefill_count + 1),
            replace(cluster, decode_count=cluster.decode_count + 1),
        )
    more = replace(
        cluster,
        prefill_count=cluster.prefill_count + unit.prefill_count,
        decode_count=cluster.decode_count + unit.decode_count,
    )
    return (more,)
