"""Compares a running cluster with a plan for its recent workload. Pure."""

import enum
from dataclasses import asdict, dataclass
from typing import Any

from kaveri.planner.cluster_check import Attainment
from kaveri.planner.observed_workload import ObservedWorkload
from kaveri.planner.plan import ClusterPlan
from kaveri.planner.plan_file import interval_text, to_json
from kaveri.planner.plan_question import PlanQuestion
from kaveri.planner.running_cluster import RunningCluster


class Advice(enum.StrEnum):
    """Advice to keep or change the running cluster."""

    KEEP = "keep"
    CHANGE = "change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """A plan for the observed workload, next to the running cluster; both simulated in the same way."""

    observed: ObservedWorkload
    running: RunningCluster
    attainment: Attainment
    """Attainment of the running cluster."""
    plan: ClusterPlan

    @property
    def fewest_gpus(self) -> int:
        """Fewest GPUs found to serve the workload, on separate or colocated instances."""
        colocated = self.plan.colocated
        return self.plan.cluster.gpus if colocated is None else colocated.gpus

    @property
    def advice(self) -> Advice:
        """CHANGE if the cluster certainly misses the SLOs or fewer GPUs suffice; else KEEP, so noise changes
        nothing."""
        misses = self.attainment.high < self.plan.question.target.attain
        return Advice.CHANGE if misses or self.fewest_gpus < self.running.gpus else Advice.KEEP

    @property
    def reason(self) -> str:
        """Explanation of the advice, with its figures."""
        attain, fewest = self.plan.question.target.attain, self.fewest_gpus
        judged = verdict(self.attainment, attain)
        enough = f"{fewest} GPU is enough" if fewest == 1 else f"{fewest} GPUs are enough"
        if self.plan.colocated is not None:
            enough += ", with both phases on the same instances"
        if self.attainment.high < attain:
            return f"{judged}; {enough}, and {self.running.gpus} run"
        if fewest < self.running.gpus:
            saved = self.plan.question.price_per_hour(self.running.gpus - fewest)
            return f"{enough}, and {self.running.gpus} run: {saved:.2f} USD an hour less"
        return judged if self.attainment.low < attain else f"{judged}, and no fewer GPUs were found to"


def verdict(attainment: Attainment, attain: float) -> str:
    """Describe in words whether the running cluster's attainment meets `attain`, the required share."""
    if attainment.high < attain:
        return f"what runs misses {attain:.0%}"
    if attainment.low < attain:
        return f"the interval of what runs has {attain:.0%} in it: neither met nor missed for certain"
    return f"what runs meets {attain:.0%}"


def replan_lines(found: Replan) -> list[str]:
    """Describe observations, running cluster and advice in lines of text, to follow those of the plan."""
    found_now = observed_lines(found.plan.question, found.observed, found.running, found.attainment)
    return [*found_now, f"{found.advice}: {found.reason}"]


def observed_lines(
    question: PlanQuestion, observed: ObservedWorkload, running: RunningCluster, attainment: Attainment
) -> list[str]:
    """Describe the observed workload and the running cluster in lines of text. attainment: of that cluster."""
    so_far = f" (up to {observed.longest_running_tokens} tokens so far)" if observed.running_count else ""
    routers = f"{observed.router_count} router{'' if observed.router_count == 1 else 's'}"
    cut_short = f" ({observed.cut_short_share:.0%}; planned as whole answers)" if observed.cut_short_count else ""
    lines = [
        f"workload: {observed.arrival_count} requests in {observed.period_s:.0f} s at {routers},"
        f" {observed.rate_per_s:.3g} requests/s, burstiness {observed.burstiness:.3g}",
        "not in the rate: refused requests, and those of routers that have gone",
        f"lengths of {len(observed.lengths)} answers; left out:"
        f" {observed.cut_short_count} that were cut short{cut_short},"
        f" {observed.running_count} that still run{so_far},"
        f" {observed.too_long_count} too long for {question.model.name}",
        f"what runs: {running.counts}, {running.gpus} GPUs, {question.price_per_hour(running.gpus):.2f} USD an hour:"
        f" {interval_text(attainment)}",
    ]
    if not running.is_current:
        lines.append("the cluster's store cannot be reached: instances that have died since are counted too")
    return lines


def replan_json(found: Replan) -> dict[str, Any]:
    """Return the plan's JSON, with the advice, the running cluster and the observed workload."""
    observed = found.observed
    return {
        **to_json(found.plan),
        "advice": found.advice.value,
        "reason": found.reason,
        "running": {
            **asdict(found.running),
            "gpus": found.running.gpus,
            "price_per_hour": found.plan.question.price_per_hour(found.running.gpus),
            "attainment": asdict(found.attainment),
        },
        "observed": {
            "routers": observed.router_count,
            "period_s": observed.period_s,
            "arrivals": observed.arrival_count,
            "rate_per_s": observed.rate_per_s,
            "burstiness": observed.burstiness,
            "longest_gap_s": observed.longest_gap_s,
            "answers": len(observed.lengths),
            "cut_short": observed.cut_short_count,
            "running": observed.running_count,
            "longest_running_tokens": observed.longest_running_tokens,
            "too_long": observed.too_long_count,
        },
    }
