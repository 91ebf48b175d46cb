"""Simulated instances that change their phases: nothing is lost, and what waits goes where it can be served."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kaveri.domain.view import Phase, PhaseOrder
from kaveri.errors import ConfigError
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.ordering import OrderingPolicy
from kaveri.simulator.decode import Answer
from kaveri.simulator.dynamic import SimulatedDynamic
from kaveri.simulator.failures import Death, FailureSpec
from kaveri.simulator.instance import SimulatedAttempt
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths, plan_requests
from tests.library.simulator.test_simulate import LATENCY, run_whole, spec_of

SLO = FlipRules(policy=FlipPolicy.SLO, ttft_s=1.0, tpot_s=0.03)
PREFILL, DECODE = (Phase.PREFILL,), (Phase.DECODE,)


def dynamic_of(count: int = 4, **changes: Any) -> ClusterSpec:
    pool = PoolSpec(latency=LATENCY, total_blocks=9000, max_batch=256, max_model_len=2048)
    parts = {
        "prefill": PrefillSpec(engine=pool, prefill_policy=OrderingPolicy.SJF),
        "decode": DecodeSpec(engine=pool),
        "link": parse_link_speed("200Gbps,800KiB/token"),
        "overheads": Overheads(hop_s=0.002),
        "flips": SLO,
    }
    return spec_of(**{"prefill_count": 0, "decode_count": 0, "dynamic_count": count, **parts, **changes})


def shifting(seed: int, seconds: float = 24.0, period_s: float = 8.0, load: float = 1.1) -> list[PlannedRequest]:
    """Requests with long prompts and those with long answers in turns, at `load` times what four instances serve."""
    rng, now_s = random.Random(seed), 0.0
    times: list[float] = []
    lengths: list[RequestLengths] = []
    while now_s < seconds:
        kind, rate = ((WorkloadClass.HPLD, 23.4), (WorkloadClass.LPHD, 28.7))[int(now_s / period_s) % 2]
        now_s += rng.expovariate(load * rate)
        times.append(now_s)
        lengths += draw_lengths(kind, 1, rng, 1024, 384)
    return plan_requests(lengths, times)


def alike(count: int, prompt_tokens: int, output_tokens: int = 1) -> list[PlannedRequest]:
    return [PlannedRequest(n, 0.0, RequestLengths(prompt_tokens, output_tokens)) for n in range(count)]


def run_ordered(
    requests: list[PlannedRequest], *orders: tuple[float, str, tuple[Phase, ...]], **changes: Any
) -> Simulation:
    """Run four instances, of which the first two begin with prefill, under these orders and no others."""
    simulation = Simulation(dynamic_of(**{"flips": FlipRules(), **changes}), requests)
    for number, (at_s, instance_id, phases) in enumerate(orders, 1):
        order = PhaseOrder(1, number)
        simulation.timeline.at(
            at_s, lambda given: given[0](*given[1:]), (simulation.decodes[instance_id].order, phases, order)
        )  # type: ignore[attr-defined]
    assert simulation.run().columns().answered.all()
    simulation.check_conservation()
    return simulation


def computed_at(simulation: Simulation) -> list[int]:
    """Count of prompts computed at each instance."""
    return np.bincount(simulation.table.columns().placements.prefill, minlength=4).tolist()
