"""Simulates one decode instance alone, fed by prefill that takes no time. Pure.

DistServe's simu_decode (arXiv 2401.09670, algorithm 1). A pipeline of PP stages processes PP batches at a time. If they
are equal, each samples a token per duration of a whole step; so the pipeline is simulated as PP lanes: engines that
take whole steps, each with its share of the KV pool. Delays between unequal batches are left out.
"""

import contextlib
import math
from collections.abc import Sequence

from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.simulator.instance import SimulatedRequest
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PoolSpec, PrefillSpec
from kaveri.workload.requests import PlannedRequest


class Verdict:
    """Decides whether enough requests of a simulation meet an SLO, before all have ended if possible."""

    def __init__(self, count: int, target: float) -> None:
        """count: requests of the simulation. target: the share that must meet the SLO."""
        self._needed = math.ceil(target * count - 1e-9)
        self._count = count
        self._met = self._missed = 0

    def note(self, met: bool) -> None:
        """Count a request that has met its SLO, or can no longer meet it."""
        if met:
            self._met += 1
        else:
            self._missed += 1

    @property
    def is_certain(self) -> bool:
        """True if the remaining requests cannot change the verdict."""
        return self.holds or self._missed > self._count - self._needed

    @property
    def holds(self) -> bool:
        """True if enough requests have met their SLO."""
        return self._met >= self._needed

    @property
    def attainment(self) -> float:
        """Upper bound on the share of requests that meet the SLO; exact once all are counted."""
        return 1 - self._missed / self._count


NO_TIME = LatencyModel(
    name="no time",
    source="the planner: prompts that take no time",
    prefill=PrefillLatency(step_s=0.0, token_s=0.0, token_squared_s=0.0),
    decode=(DecodeLatency(min_batch=1, step_s=0.0, context_token_s=0.0, request_s=0.0),),
)
BLOCK_TOKENS = 16
_ROOMY_BLOCKS = 1 << 40
_ROUNDING = 1 + 1e-6


class _Certain(Exception):
    """Stops a simulation early, once it is certain whether enough requests meet the SLO."""


def lane_pool(
    latency: LatencyModel, kv_tokens: int, lanes: int, chunk_tokens: int, max_batch: int, max_model_len: int
) -> PoolSpec:
    """Return the settings of one lane: one of `lanes` equal engines that simulate an instance of kv_tokens tokens."""
    return PoolSpec(
        latency=latency,
        # A lane can always hold one request.
        total_blocks=max(kv_tokens // lanes // BLOCK_TOKENS, -(-max_model_len // BLOCK_TOKENS)),
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=chunk_tokens,
        max_batch=max(1, max_batch // lanes),
        max_model_len=max_model_len,
    )


def judge_decode(
    requests: Sequence[PlannedRequest], pool: PoolSpec, lanes: int, tpot_s: float, target: float
) -> Verdict:
    """Simulate `lanes` decode engines until it is certain if a share `target` of requests has a TPOT up to tpot_s."""
    prefill = PrefillSpec(
        engine=PoolSpec(
            latency=NO_TIME, total_blocks=_ROOMY_BLOCKS, chunk_tokens=1 << 30, max_model_len=pool.max_model_len
        ),
        max_queue=len(requests),
    )
    cluster = ClusterSpec(prefill_count=1, decode_count=lanes, prefill=prefill, decode=DecodeSpec(engine=pool))
    simulation = Simulation(cluster, requests)
    table, late, verdict = simulation.table, set[int](), Verdict(len(requests), target)

    def note_end(request: SimulatedRequest) -> None:
        if request.number not in late:
            # NaN, without a second token, exceeds no limit.
            note(not table.tpot_s(request.number) > tpot_s)

    def look(number: int) -> None:
        if not table.ends[number]:
            late.add(number)
            note(False)

    def note(met: bool) -> None:
        verdict.note(met)
        if verdict.is_certain:
            raise _Certain

    simulation.router.on_end = note_end
    # Overload is detected long before the requests end: a request that has not ended when its SLO allows no more time
    # has missed it. The prompts take no time, so that time counts from the arrival.
    for request in requests:
        allowed_s = tpot_s * (request.lengths.output_tokens - 1)
        simulation.timeline.at(request.arrival_s + allowed_s * _ROUNDING, look, request.number)
    with contextlib.suppress(_Certain):
        simulation.run()
    return verdict


def alone_tpot_s(latency: LatencyModel, request: PlannedRequest) -> float:
    """Return the mean seconds of a request's decode steps on an otherwise idle instance."""
    lengths = request.lengths
    steps = lengths.output_tokens - 1
    if steps < 1:
        return 0.0
    fit = latency.decode_fit(1)
    mean_context = lengths.prompt_tokens + 1 + (steps - 1) / 2
    return fit.step_s + fit.request_s + mean_context * fit.context_token_s


def likely_rate_per_s(
    pool: PoolSpec, lanes: int, tpot_s: float, max_batch: int, mean_prompt_tokens: float, mean_output_tokens: float
) -> float:
    """Estimate a decode instance's goodput, as start of the search: with mean requests, in a batch that fills the KV
    pool or takes tpot_s per step. Infinite if nothing is decoded."""
    steps = mean_output_tokens - 1
    if steps <= 0:
        return math.inf
    context = mean_prompt_tokens + mean_output_tokens / 2
    batch = max(1.0, min(max_batch // lanes, pool.total_blocks * pool.block_tokens / context))
    fit = pool.latency.decode_fit(int(batch))
    request_s = fit.request_s + context * fit.context_token_s
    batch = max(1.0, min(batch, (tpot_s - fit.step_s) / request_s if request_s > 0 else math.inf))
    return lanes * batch / (steps * (fit.step_s + batch * request_s))


def highest_rate_per_s(latency: LatencyModel, lanes: int, max_batch: int, mean_output_tokens: float) -> float:
    """Return a bound on the requests per second of `lanes` decode engines: full batches, without attention."""
    steps = mean_output_tokens - 1
    if steps <= 0:
        return math.inf
    batch = max(1, max_batch // lanes)
    fit = latency.decode_fit(batch)
    return lanes * batch / (steps * (fit.step_s + batch * fit.request_s))
