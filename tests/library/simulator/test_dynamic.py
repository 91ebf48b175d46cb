"""Simulated instances that change their phases: nothing is lost, and what waits goes where it can be served."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kaveri.domain.view import BOTH_PHASES, InstanceLoad, Phase, PhaseOrder
from kaveri.errors import ConfigError, KaveriError
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.replication import ReplicationMode
from kaveri.policy.room_search import RoomSearch
from kaveri.simulator.decode import Answer
from kaveri.simulator.dynamic import SimulatedDynamic
from kaveri.simulator.engine import CountedEngine
from kaveri.simulator.failures import Death, FailureSpec
from kaveri.simulator.instance import SimulatedAttempt
from kaveri.simulator.report import rows
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, CopySpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec
from kaveri.workload.requests import PlannedRequest, RequestLengths, WorkloadClass, draw_lengths, plan_requests
from tests.library.simulator.test_simulate import LATENCY, poisson, run_whole, spec_of
from tests.support.conservation import check_conservation

SLO = FlipRules(policy=FlipPolicy.SLO, ttft_s=1.0, tpot_s=0.03)
PREFILL, DECODE = (Phase.PREFILL,), (Phase.DECODE,)
Grant = tuple[str, float, tuple[Phase, ...]]
"""A reservation that an instance grants: its name, the time, and the phases that it shows."""


def dynamic_of(dynamic_count: int = 4, **changes: Any) -> ClusterSpec:
    pool = PoolSpec(latency=LATENCY, total_blocks=9000, max_batch=256, max_model_len=2048)
    parts = {
        "prefill": PrefillSpec(engine=pool, prefill_policy=OrderingPolicy.SJF),
        "decode": DecodeSpec(engine=pool),
        "link": parse_link_speed("200Gbps,800KiB/token"),
        "overheads": Overheads(hop_s=0.002),
        "flips": SLO,
    }
    return spec_of(**{"prefill_count": 0, "decode_count": 0, "dynamic_count": dynamic_count, **parts, **changes})


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
    check_conservation(simulation)
    return simulation


def computed_at(simulation: Simulation) -> list[int]:
    """Count of prompts computed at each instance."""
    counts: list[int] = np.bincount(simulation.table.columns().placements.prefill, minlength=4).tolist()
    return counts


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[Grant]:
    found: list[Grant] = []
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


def test_the_same_seed_gives_the_same_flips_and_the_same_table() -> None:
    first, again = (run_whole(dynamic_of(seed=5), shifting(5)) for _ in range(2))
    assert first.flip_count == again.flip_count
    assert list(rows(first.table)) == list(rows(again.table))


def test_without_a_policy_the_first_split_stays() -> None:
    requests = shifting(1, seconds=16.0, load=0.3)
    dynamic = run_whole(dynamic_of(2, flips=FlipRules()), requests)
    fixed = run_whole(dynamic_of(0, prefill_count=1, decode_count=1), requests)
    assert dynamic.flip_count == 0
    for column in ("first_s", "last_s"):
        assert (getattr(dynamic.table.columns(), column) == getattr(fixed.table.columns(), column)).all()
    placed = run_whole(dynamic_of(flips=FlipRules()), requests).table.columns().placements
    assert (set(placed.prefill), set(placed.decode) - {-1}) == ({0, 1}, {2, 3})


@pytest.mark.parametrize("seed", range(6))
def test_every_request_is_answered_whatever_dies_between_flips(seed: int) -> None:
    rng = random.Random(seed)
    deaths = (Death(instance_id=f"dynamic-{rng.randrange(4)}", at_s=rng.uniform(0.0, 20.0)) for _ in range(4))
    failures = FailureSpec(deaths=tuple(deaths), repair_s=rng.choice((2.0, 6.0)))
    simulation = run_whole(dynamic_of(seed=seed, failures=failures), shifting(seed))
    assert simulation.flip_count > 0
    assert max(simulation.table.attempts) > 1, "no death took anything with it"


@pytest.mark.parametrize("victim", ["dynamic-0", "dynamic-1"])
def test_the_only_instance_left_answers_everything(victim: str) -> None:
    failures = FailureSpec(deaths=(Death(instance_id=victim, at_s=2.0),), repair_s=None)
    simulation = run_whole(dynamic_of(2, failures=failures), shifting(1, seconds=12.0, load=0.2))
    assert simulation.flip_count == 1


def test_an_instance_that_stops_to_prefill_returns_the_prompts_that_wait_there() -> None:
    requests = alike(40, 500)
    assert computed_at(run_ordered(requests)) == [20, 20, 0, 0]
    simulation = run_ordered(requests, (0.3, "dynamic-0", DECODE))
    at_first, at_second, *others = computed_at(simulation)
    chunks_computed = 0.3 / LATENCY.step_s([(0, 500)])
    assert chunks_computed < at_first <= chunks_computed + 3
    assert (at_second, others) == (40 - at_first, [0, 0])
    assert max(simulation.table.attempts) == 1, "a return uses up no attempt"


def test_an_instance_that_begins_to_prefill_gets_prompts_of_an_earlier_burst() -> None:
    requests = alike(40, 500)
    before = run_ordered(requests).table.columns()
    simulation = run_ordered(requests, (0.3, "dynamic-3", PREFILL))
    assert computed_at(simulation)[3] > 40 // 6
    assert simulation.table.columns().duration_s < 0.85 * before.duration_s


def test_requests_reserve_room_at_an_instance_only_while_it_decodes_and_nothing_else(granted: list[Grant]) -> None:
    simulation = run_whole(dynamic_of(seed=1), shifting(1))
    assert simulation.flip_count > 1
    assert {phases for _, _, phases in granted} == {DECODE}
    assert {"dynamic-0", "dynamic-1"} & {name for name, _, _ in granted}, "none came to one that had prefilled"


def test_a_phase_that_is_switched_off_is_shown_until_its_last_request_has_left() -> None:
    simulation = Simulation(dynamic_of(flips=FlipRules()), alike(40, 500))
    instance = simulation.decodes["dynamic-0"]
    assert isinstance(instance, SimulatedDynamic)
    seen: list[InstanceLoad] = []
    simulation.timeline.at(0.3, lambda order: instance.order(*order), (DECODE, PhaseOrder(1, 1)))
    simulation.timeline.at(0.31, lambda _: seen.append(instance.member.load))
    simulation.run()
    for load, phases, ending in ((seen[0], BOTH_PHASES, PREFILL), (instance.member.load, DECODE, ())):
        assert (load.phases, load.ending_phases, load.phase_order) == (phases, ending, PhaseOrder(1, 1))
    assert 0 < seen[0].queued_prefill_tokens <= 3 * 512


def test_prompts_and_reservations_that_arrive_after_the_order_go_elsewhere(granted: list[Grant]) -> None:
    requests = [PlannedRequest(n, 0.02 * n, RequestLengths(100, 20)) for n in range(50)]
    slow = Overheads(hop_s=0.05)
    orders = (0.5, "dynamic-0", DECODE), (0.6, "dynamic-3", PREFILL)
    placed = run_ordered(requests, *orders, overheads=slow).table.columns().placements
    # Two hops from a client to the instance.
    assert {int(at) for at in placed.prefill[:20]} == {0, 1}
    assert 0 not in placed.prefill[21:]
    assert {phases for _, _, phases in granted} == {DECODE}


def test_requests_in_line_at_an_instance_that_stops_to_decode_go_elsewhere(granted: list[Grant]) -> None:
    pool = PoolSpec(latency=LATENCY, total_blocks=110, max_model_len=1600)
    small = {"prefill": PrefillSpec(engine=pool), "decode": DecodeSpec(engine=pool), "overheads": Overheads()}
    run_ordered(alike(20, 700, 100), (3.0, "dynamic-3", PREFILL), **small)
    before, after = ({name for name, at_s, _ in granted if (at_s >= 3.0) is later} for later in (False, True))
    assert (before, after) == ({"dynamic-2", "dynamic-3"}, {"dynamic-2"})


def test_an_order_with_a_smaller_number_comes_too_late() -> None:
    late = run_ordered(alike(20, 500), (0.3, "dynamic-3", PREFILL), (0.2, "dynamic-3", DECODE))
    assert late.decodes["dynamic-3"].member.load.phases == DECODE
    assert computed_at(late)[3] == 0


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"prefill_count": 1}, "prefill", "beside instances of both phases there are no others"),
        ({"decode_count": 2}, "decode", "is 2"),
        ({"colocated_count": 2}, "dynamic", "beside colocated instances there are no others"),
        ({"dynamic_count": 1}, "dynamic", "at least 1 + 1"),
        ({"flips": replace(SLO, min_prefill=2, min_decode=3)}, "dynamic", "at least 2 + 3"),
        ({"decode": DecodeSpec(engine=PoolSpec(latency=LATENCY, max_batch=3))}, "colocated", "has two engines"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_its_name_and_limit(
    changes: dict[str, Any], name: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        dynamic_of(**changes)
    assert refused.value.field == name
    assert reason in refused.value.reason


def small(total_blocks: int = 110) -> dict[str, Any]:
    pool = PoolSpec(latency=LATENCY, total_blocks=total_blocks, chunk_tokens=64, max_batch=4, max_model_len=1600)
    return {"prefill": PrefillSpec(engine=pool), "decode": DecodeSpec(engine=pool)}


@pytest.mark.parametrize("at_ms", range(4000, 4200, 20))
def test_a_search_for_room_ends_when_an_instance_ceases_to_take_pushes_between_two_broadcasts(
    at_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Counter[object]()
    look = RoomSearch.look

    def counted(self: Any, seeker: Any, view: Any, now_s: float) -> object:
        looks[seeker.key, now_s] += 1
        assert looks[seeker.key, now_s] < 1000, "endless"
        return look(self, seeker, view, now_s)

    monkeypatch.setattr(RoomSearch, "look", counted)
    order = (at_ms / 1000, "dynamic-3", (Phase.PREFILL,))
    run_ordered(alike(40, 700, 200), order, **small(), overheads=Overheads(hop_s=0.02))


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_steps_are_applied_before_blocks_are_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = CountedEngine.open

    def checked(self: Any, sequence: Any, token_count: int) -> bool:
        assert self._run.steps <= 1 or not self._run.ended_steps(self._timeline.now_s)
        return opened(self, sequence, token_count)

    monkeypatch.setattr(CountedEngine, "open", checked)
    run_ordered(poisson(60, 40.0, seed), (2.0 + seed / 4, "dynamic-3", (Phase.PREFILL,)), **small())


@pytest.mark.parametrize("victim", ["dynamic-0", "dynamic-1"])
def test_the_work_is_shared_again_once_a_dead_instance_is_back(victim: str) -> None:
    failures = FailureSpec(deaths=(Death(instance_id=victim, at_s=2.0),), repair_s=4.0)
    run = run_whole(dynamic_of(2, failures=failures), shifting(1, load=0.25, seconds=30)).table.columns()
    later = run.due_s > 15
    places = np.concatenate((run.placements.prefill[later], run.placements.decode[later]))
    assert np.bincount(places, minlength=2).min() > 0


def with_copies(spec: ClusterSpec, **changes: Any) -> ClusterSpec:
    copies = CopySpec(replication=ReplicationMode.SPREAD, **changes)
    return replace(spec, decode=replace(spec.decode, copies=copies))


@pytest.mark.parametrize("seed", range(6))
def test_with_copies_running_answers_move_and_none_is_lost_or_drawn_twice(seed: int) -> None:
    simulation = run_whole(with_copies(dynamic_of()), shifting(seed))
    assert simulation.flip_count
    assert simulation.router.moved_count


def test_an_instance_that_begins_to_decode_takes_its_share_of_the_answers_that_run() -> None:
    """All come at once, while one of two instances decodes; then the other one begins to."""
    requests = plan_requests([RequestLengths(300, 400)] * 48, [0.0] * 48)

    def steps_of(copies: bool) -> float:
        spec = dynamic_of(3, flips=FlipRules(policy=FlipPolicy.NONE))
        simulation = Simulation(with_copies(spec) if copies else spec, requests)
        other = simulation.prefills["dynamic-1"]
        assert isinstance(other, SimulatedDynamic)
        simulation.timeline.at(2.0, lambda _: other.order(DECODE, PhaseOrder(1, 1)))
        run = simulation.run().columns()
        check_conservation(simulation)
        assert run.answered.all()
        assert bool(simulation.router.moved_count) is copies
        return float(run.last_s.max())

    assert steps_of(copies=True) < 0.9 * steps_of(copies=False)
