"""Goodput of instances that change their phase, beside every fixed split and colocated instances, in simulation.

Four instances of OPT-13B, each on two A100. Goodput is the highest load at which at least 90 % of the requests meet
both a TTFT of 1 s and a TPOT of 30 ms. Bisection finds it for each seed, on a grid of loads; it assumes that what meets
the limits at one load meets them at all lower ones. Near its limit a cluster does not always: attainment may dip at one
load of the grid. Load 1 is a nominal rate of each workload. Lengths are drawn from the workloads of TetriInfer, light
or heavy (L, H) in prefill and decode (P, D).

Changing streams alternate between long prompts (HPLD) and long answers (LPHD) every 40 s. Steady streams have one of
five workloads. All arrivals are Poisson. The best split has the highest mean goodput over the seeds; an operator would
have to know it in advance. At 0.7 of the best split's steady goodput no change is needed: flips per minute are counted
there. The flip rules' thresholds were not tuned on these seeds.

Simulated: the decisions of the services (ordering, placement, admission, reservation, retries, flips) on loads as old
as heartbeats and broadcasts make them; steps with the times of a model fitted to A100s; layer-wise KV pushes over
200 Gbit/s; fixed overheads of messages and steps; both phases of a flipped instance until its old one has ended.

Not simulated: engines, processes and their CPU time, noise of step times and networks, contention between pushes on one
link, wrong length predictions (the cluster knows all lengths), failures, and KV copies: running answers end where they
are. benchmarks/serving/dynamic.py measures real services.
"""

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, TypeVar

from benchmarks.support.harness import Options, Report, run
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.latency.model import LatencyModel, load_latency_model
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.ordering import OrderingPolicy
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths, plan_requests
from kaveri.workload.summary import Slo
from tests.support.conservation import check_conservation

ValueT = TypeVar("ValueT")
LATENCY_MODEL = "opt-13b-a100-tp2"
INSTANCES = 4
SPLITS = ("1P3D", "2P2D", "3P1D")
COLOCATED, DYNAMIC = "colocated", "dynamic"
SLO = Slo(ttft_s=1.0, tpot_s=0.03)
RULES = FlipRules(policy=FlipPolicy.SLO, ttft_s=1.0, tpot_s=0.03)
SHARE = 0.9
"""Of the requests: so many must meet SLO."""
NOMINAL_RATES = {
    WorkloadClass.HPLD: 23.4,
    WorkloadClass.LPHD: 28.7,
    WorkloadClass.HPHD: 10.9,
    WorkloadClass.MIXED: 21.6,
    WorkloadClass.LPLD: 72.5,
}
"""Requests per second at a load of 1."""
CHANGING = (WorkloadClass.HPLD, WorkloadClass.LPHD)
PERIOD_S = 40.0
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1024, 384
STRIDE = 0.2
"""Steps by which the load rises until it is not met. Small ones: overloaded splits simulate slowly."""
CALM = 0.7
"""Share of the best split's goodput at which flips are counted."""
T_95 = {2: 12.706, 3: 4.303, 10: 2.262}
"""Two-sided 95 % quantiles of the t distribution, by the number of seeds (degrees of freedom plus 1)."""


class _Stream(NamedTuple):
    """Poisson stream of requests; more than one workload: each for PERIOD_S in turn."""

    workloads: tuple[WorkloadClass, ...]
    seconds: float
    seed: int

    def requests(self, load: float) -> list[PlannedRequest]:
        rng, now_s = random.Random(self.seed), 0.0
        times: list[float] = []
        lengths: list[RequestLengths] = []
        while now_s < self.seconds:
            workload = self.workloads[int(now_s // PERIOD_S) % len(self.workloads)]
            now_s += rng.expovariate(load * NOMINAL_RATES[workload])
            times.append(now_s)
            lengths += draw_lengths(workload, 1, rng, MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS)
        return plan_requests(lengths, times)


class _Outcome(NamedTuple):
    """Outcome of one simulation."""

    attainment: float
    flips: int


class _Search(NamedTuple):
    """Search for the goodput of one cluster under one stream."""

    kind: str
    stream: _Stream
    grid: float


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    count, grid, changing_s = options.choose((10, 0.025, 160.0), (2, 0.1, 80.0))
    steady_s, calm_s = options.choose((60.0, 240.0), (30.0, 60.0))
    seeds = tuple(range(101, 101 + count))
    report.workload = {
        "cluster": f"{INSTANCES} instances, {LATENCY_MODEL}, SJF, reserve-dynamic, 200 Gbit/s, 800 KiB a token",
        "SLO": f"TTFT {SLO.ttft_s:g} s and TPOT {SLO.tpot_s:g} s, met by {SHARE:.0%}",
        "rules": f"{RULES.policy}, defaults",
        "nominal rates": {str(workload): rate for workload, rate in NOMINAL_RATES.items()},
        "grid of loads": grid,
        "streams": f"changing {changing_s:g} s, steady {steady_s:g} s, steady at {CALM:g} {calm_s:g} s",
        "seeds": list(seeds),
    }
    with ProcessPoolExecutor(2) as workers:
        _measure_changing(workers, report, seeds, grid, changing_s)
        _measure_steady(workers, report, seeds[:3], grid, steady_s, calm_s)


def _measure_changing(
    workers: ProcessPoolExecutor, report: Report, seeds: Sequence[int], grid: float, seconds: float
) -> None:
    kinds = (*SPLITS, COLOCATED, DYNAMIC)
    searches = [_Search(kind, _Stream(CHANGING, seconds, seed), grid) for kind in kinds for seed in seeds]
    found = iter(workers.map(_goodput, searches))
    loads = {kind: _take(found, len(seeds)) for kind in kinds}
    for kind in kinds:
        report.row("goodput, changing stream", loads[kind], "of nominal", cluster=kind)
    best = _best(loads)
    report.note(f"best split of the changing stream: {best}")
    for name, other, target in ((f"best split ({best})", best, 1.05), (COLOCATED, COLOCATED, 1.10)):
        ratios = [ours / theirs for ours, theirs in zip(loads[DYNAMIC], loads[other], strict=True)]
        report.row(f"goodput by seed, dynamic / {name}", ratios, "", stream="changing")
        mean, half = statistics.mean(ratios), _half_interval(ratios)
        short = "best split" if other in SPLITS else other
        report.ratio(f"goodput, dynamic / {short}, changing stream", mean, target=target)
        report.ratio(f"low end of its 95 % interval, {short}", mean - half)
        report.ratio(f"high end of its 95 % interval, {short}", mean + half)


def _measure_steady(
    workers: ProcessPoolExecutor, report: Report, seeds: Sequence[int], grid: float, seconds: float, calm_s: float
) -> None:
    kinds = (*SPLITS, DYNAMIC)
    searches = [
        _Search(kind, _Stream((workload,), seconds, seed), grid)
        for workload in NOMINAL_RATES
        for kind in kinds
        for seed in seeds
    ]
    found = iter(workers.map(_goodput, searches))
    loads = {workload: {kind: _take(found, len(seeds)) for kind in kinds} for workload in NOMINAL_RATES}
    calm = {workload: CALM * statistics.mean(of[_best(of)]) for workload, of in loads.items()}
    streams = [(_Stream((workload,), calm_s, seed), load) for workload, load in calm.items() for seed in seeds]
    outcomes = iter(workers.map(_calm_outcome, streams))
    for workload, of in loads.items():
        rate = NOMINAL_RATES[workload]
        for kind in kinds:
            report.row("goodput", [load * rate for load in of[kind]], "requests/s", workload=workload, cluster=kind)
        best = _best(of)
        report.note(f"best split of {workload}: {best}")
        ratio = statistics.mean(of[DYNAMIC]) / statistics.mean(of[best])
        report.ratio(f"goodput, dynamic / best split, {workload}", ratio, target=0.97)
        ended = _take(outcomes, len(seeds))
        minutes = calm_s / 60
        labels = {"workload": workload, "load": f"{CALM:g} of {best}"}
        report.row("attainment, dynamic", [one.attainment for one in ended], "share", **labels)
        report.row("flips, dynamic", [one.flips / minutes for one in ended], "a minute", **labels)
        # Without any flip the ratio is that of one in all streams.
        flips = max(1, sum(one.flips for one in ended)) / (minutes * len(ended))
        report.ratio(f"1 flip a minute / flips, {workload} at {CALM:g}", 1 / flips, target=1.0)


def _take(found: Iterator[ValueT], count: int) -> list[ValueT]:
    return [next(found) for _ in range(count)]


def _best(loads: dict[str, list[float]]) -> str:
    return max(SPLITS, key=lambda kind: statistics.mean(loads[kind]))


def _half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean."""
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def _goodput(search: _Search) -> float:
    """Highest load on the grid that is met; 0 if none is."""

    def is_met(steps: int) -> bool:
        load = steps * search.grid
        return _simulate(search.kind, search.stream.requests(load), search.stream.seed).attainment >= SHARE

    return _highest(is_met, round(STRIDE / search.grid)) * search.grid


def _highest(is_met: Callable[[int], bool], stride: int) -> int:
    met, missed = 0, stride
    while is_met(missed):
        met, missed = missed, missed + stride
    while missed - met > 1:
        middle = (met + missed) // 2
        if is_met(middle):
            met = middle
        else:
            missed = middle
    return met


def _calm_outcome(stream_and_load: tuple[_Stream, float]) -> _Outcome:
    stream, load = stream_and_load
    return _simulate(DYNAMIC, stream.requests(load), stream.seed)


def _simulate(kind: str, requests: Sequence[PlannedRequest], seed: int) -> _Outcome:
    simulation = Simulation(_cluster(kind, seed), requests)
    met = SLO.met(simulation.run().columns())
    check_conservation(simulation)
    return _Outcome(float(met.mean()), simulation.flip_count)


def _cluster(kind: str, seed: int) -> ClusterSpec:
    pool = PoolSpec(latency=_latency(), total_blocks=9000, max_batch=256, max_model_len=2048)
    prefills = int(kind[0]) if kind in SPLITS else 0
    return ClusterSpec(
        prefill_count=prefills,
        decode_count=INSTANCES - prefills if prefills else 0,
        colocated_count=INSTANCES if kind == COLOCATED else 0,
        dynamic_count=INSTANCES if kind == DYNAMIC else 0,
        flips=RULES,
        prefill=PrefillSpec(engine=pool, prefill_policy=OrderingPolicy.SJF),
        decode=DecodeSpec(engine=pool, decode_policy=AdmissionPolicy.RESERVE_DYNAMIC),
        link=parse_link_speed("200Gbps,800KiB/token"),
        overheads=Overheads(hop_s=0.002, prefill_step_s=0.0015, decode_step_s=0.00075),
        seed=seed,
    )


@functools.cache
def _latency() -> LatencyModel:
    return load_latency_model(LATENCY_MODEL)


if __name__ == "__main__":
    run("simulator.flips", measure, description=__doc__)
