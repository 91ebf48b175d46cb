"""Simulates a planned cluster with several seeds, and with the loss of one instance. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.planner.placement_search import PhaseOption
from kaveri.planner.plan_question import SEEDS, PlanQuestion, SloTarget
from kaveri.policy.replication import ReplicationMode
from kaveri.simulator.failures import Death, FailureSpec
from kaveri.simulator.simulate import simulate
from kaveri.simulator.spec import ClusterSpec, CopySpec, DecodeSpec, PrefillSpec
from kaveri.workload.run_columns import RunColumns
from kaveri.workload.summary import Slo

_T_95 = 2.776
"""Student's t for a 95 % interval of the mean of SEEDS values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Share of requests that meet both SLOs (TTFT and TPOT): mean and 95 % interval over several seeds."""

    mean: float
    low: float
    high: float
    """Upper end of the mean's 95 % interval."""
    missed_ttft: float
    missed_tpot: float
    """Shares of requests that miss each SLO; a request may miss both. Unanswered requests miss TTFT."""
    slo_scale: float | None
    """Factor on both SLOs at which the required share meets them: below 1 there is slack. None: no factor does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """A planned set of prefill and decode instances that can be simulated."""

    question: PlanQuestion
    prefill: PhaseOption
    prefill_count: int
    decode: PhaseOption
    decode_count: int

    @property
    def gpus(self) -> int:
        prefill, decode = self.prefill.parallelism, self.decode.parallelism
        return self.prefill_count * prefill.gpus + self.decode_count * decode.gpus

    def spec(self, seed: int, failures: FailureSpec) -> ClusterSpec:
        question, hardware = self.question, self.question.hardware
        is_in_node = question.limits.same_node or self.gpus <= hardware.gpus_per_node
        speed = hardware.link_in_node if is_in_node else hardware.link_between_nodes
        copies = CopySpec()
        if self.replicates:
            # Memory for as many blocks of copies as the pool has.
            copies = CopySpec(replication=question.replication, replica_blocks=self.decode.pool.total_blocks)
        return ClusterSpec(
            prefill_count=self.prefill_count * self.prefill.parallelism.pp,
            decode_count=self.decode_count * self.decode.parallelism.pp,
            prefill=PrefillSpec(engine=self.prefill.pool, layer_count=question.model.layers),
            decode=DecodeSpec(engine=self.decode.pool, copies=copies),
            link=LinkSpeed(speed, token_bytes=question.model.kv_token_bytes),
            overheads=question.simulations.overheads,
            failures=failures,
            seed=seed,
        )

    @property
    def replicates(self) -> bool:
        return self.question.replication is not ReplicationMode.OFF

    def attainment(self, died: Sequence[str] = ()) -> Attainment:
        """Simulate the cluster. died: instance ids that die for good after a third of the requests arrived."""
        question, runs = self.question, []
        for seed in question.simulations.cluster_seeds:
            requests = question.draw(seed=seed)
            at_s = requests[question.simulations.request_count // 3].arrival_s
            deaths = tuple(Death(instance_id=name, at_s=at_s) for name in died)
            runs.append(simulate(self.spec(seed, FailureSpec(deaths=deaths, repair_s=None)), requests).columns())
        return attainment_of(runs, question.target)

    def lanes_of(self, role: str) -> tuple[str, ...]:
        """Return ids of the simulated engines (one per pipeline stage) that form a role's first instance."""
        option = self.prefill if role == "prefill" else self.decode
        return tuple(f"{role}-{lane}" for lane in range(option.parallelism.pp))


def attainment_of(runs: Sequence[RunColumns], target: SloTarget) -> Attainment:
    """Return the share of requests that met both SLOs in `runs`: SEEDS simulations of one cluster."""
    shares, ttft, tpot, scales = [], [], [], []
    for run in runs:
        shares.append(float(target.slo.met(run).mean()))
        ttft.append(1 - float(Slo(ttft_s=target.ttft_s).met(run).mean()))
        tpot.append(1 - float(Slo(tpot_s=target.tpot_s).met(run)[run.answered].mean()) if run.answered.any() else 0.0)
        scales.append(_slo_scale(run, target))
    mean = statistics.fmean(shares)
    scale = statistics.fmean(scales)
    half = _T_95 * statistics.stdev(shares) / math.sqrt(SEEDS)
    return Attainment(
        mean=mean,
        low=max(0.0, mean - half),
        high=min(1.0, mean + half),
        missed_ttft=statistics.fmean(ttft),
        missed_tpot=statistics.fmean(tpot),
        slo_scale=scale if math.isfinite(scale) else None,
    )


def _slo_scale(run: RunColumns, target: SloTarget) -> float:
    # Answers of one token have no TPOT: fmax takes the other figure.
    worst = np.fmax(run.ttft_s() / target.ttft_s, run.tpot_s() / target.tpot_s)
    scales = np.sort(np.where(run.answered, worst, math.inf))
    return float(scales[math.ceil(target.attain * len(scales) - 1e-9) - 1])
