"""Simulated instances that change their phases: nothing is lost, and what waits goes where it can be served."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kaveri.domain.view import Phase, PhaseOrder
from kaveri.errors import ConfigError, KaveriError
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
    """Run four instances, of which the first two begin with prefill, under orders numbered as they are given."""
    simulation = Simulation(dynamic_of(**{"flips": FlipRules(), **changes}), requests)

    def carry_out(number: int) -> None:
        _, instance_id, phases = orders[number - 1]
        instance = simulation.decodes[instance_id]
        assert isinstance(instance, SimulatedDynamic)
        instance.order(phases, PhaseOrder(1, number))

    for number, (at_s, _, _) in enumerate(orders, 1):
        simulation.timeline.at(at_s, carry_out, number)
    assert simulation.run().columns().answered.all()
    simulation.check_conservation()
    return simulation


def computed_at(simulation: Simulation) -> list[int]:
    """Count of prompts computed at each instance."""
    counts: list[int] = np.bincount(simulation.table.columns().placements.prefill, minlength=4).tolist()
    return counts


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, tuple[Phase, ...]]]:
    """Reservations that instances grant: their name, the time, and the phases that they show."""
    found: list[tuple[str, float, tuple[Phase, ...]]] = []
    reserve = SimulatedDynamic.reserve

    def record(self: SimulatedDynamic, attempt: SimulatedAttempt, waits: bool, answer: Answer) -> None:
        def answered(result: CountedSequence | KaveriError) -> None:
            if isinstance(result, CountedSequence):
                found.append((self.record.instance_id, self._timeline.now_s, self.member.load.phases))
            answer(result)

        reserve(self, attempt, waits, answered)

    monkeypatch.setattr(SimulatedDynamic, "reserve", record)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_instances_change_their_phases_with_the_stream_and_no_request_is_lost(seed: int) -> None:
    simulation = run_whole(dynamic_of(seed=seed), shifting(seed))
    placed = simulation.table.columns().placements
    assert simulation.flip_count > 1
    assert set(placed.prefill) & set(placed.decode), "no instance served both phases in turn"


def test_the_same_seed_gives_the_same_flips_and_times() -> None:
    first, again = (run_whole(dynamic_of(seed=5), shifting(5)) for _ in range(2))
    assert first.flip_count == again.flip_count
    for column in ("first_s", "last_s", "tokens"):
        assert str(getattr(first.table.columns(), column)) == str(getattr(again.table.columns(), column))
