import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.length import TokenRange
from kaveri.domain.view import (
    BOTH_PHASES,
    FIRST_ORDER,
    NO_ORDER,
    ClusterView,
    InstanceState,
    InstanceStatus,
    Phase,
    PhaseOrder,
    ViewedInstance,
    takes_pushes,
)
from kaveri.policy.demand import Demand
from kaveri.policy.placement import (
    DecodePlacementPolicy,
    HeavyThresholds,
    PlacementPolicy,
    blocks_there,
    choose_decode,
    choose_line,
    choose_prefill,
    largest_prompt,
    max_model_len,
    missing_phases,
)
from kaveri.policy.unconfirmed import UnconfirmedWork
from tests.library.policy.views import DECODE, LAYOUT, MODEL, OTHER_LAYOUT, PREFILL, view_of
from tests.library.policy.views import instance as status

NO_PHASE: tuple[Phase, ...] = ()
POWER_OF_TWO = DecodePlacementPolicy.POWER_OF_TWO


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    count = draw(st.integers(0, 6))
    return view_of(
        *(
            status(
                f"i{number}",
                draw(st.sampled_from([PREFILL, DECODE, NO_PHASE, BOTH_PHASES])),
                model=draw(st.sampled_from([MODEL, "other"])),
                state=draw(st.sampled_from(list(InstanceState))),
                queued_prefill_tokens=draw(st.integers(0, 3)),
                running_requests=draw(st.integers(0, 3)),
                waiting_requests=draw(st.integers(0, 3)),
                free_blocks=draw(st.integers(0, 8)),
                context_tokens=draw(st.integers(0, 3)),
                heavy_requests=draw(st.integers(0, 3)),
                light_requests=draw(st.integers(0, 3)),
            )
            for number in range(count)
        )
    )


@given(views(), st.sampled_from(list(PlacementPolicy)), st.integers(0, 2**32), st.integers(0, 100))
def test_prefill_goes_to_a_ready_instance_of_the_model_whenever_there_is_one(
    view: ClusterView, policy: PlacementPolicy, seed: int, turn: int
) -> None:
    chosen = choose_prefill(view, MODEL, UnconfirmedWork[str](), policy, random.Random(seed), turn)
    ready = view.ready(Phase.PREFILL, MODEL)
    assert (chosen in ready) if ready else (chosen is None)


@given(views(), st.integers(0, 8), st.integers(0, 2**32), st.sampled_from(DecodePlacementPolicy), st.booleans())
def test_decode_goes_to_a_ready_instance_with_room_whenever_there_is_one(
    view: ClusterView, needed_blocks: int, seed: int, policy: DecodePlacementPolicy, heavy: bool
) -> None:
    demand = Demand(needed_blocks, predicted=needed_blocks + seed % 3, heavy=heavy)
    chosen = choose_decode(view, MODEL, demand, UnconfirmedWork[str](), policy, random.Random(seed), turn=seed)
    fitting = [
        entry
        for entry in view.ready(Phase.DECODE, MODEL)
        if takes_pushes(entry) and entry.load.free_blocks >= needed_blocks
    ]
    assert (chosen in fitting) if fitting else (chosen is None)


@given(views(), st.sampled_from(list(PlacementPolicy)), st.integers(0, 2**32))
def test_whoever_is_chosen_while_no_phase_is_missing_can_see_the_request_to_its_end(
    view: ClusterView, policy: PlacementPolicy, seed: int
) -> None:
    if missing_phases(view, MODEL):
        return
    chosen = choose_prefill(view, MODEL, UnconfirmedWork[str](), policy, random.Random(seed))
    assert chosen is not None
    assert chosen.record.phases == BOTH_PHASES or view.ready(Phase.DECODE, MODEL)


def test_a_colocated_instance_needs_no_other_and_both_kinds_share_the_load() -> None:
    prefill, decode = status("p0", PREFILL), status("d0", DECODE)
    colocated = status("c0", BOTH_PHASES)
    assert missing_phases(view_of(), MODEL) == (Phase.PREFILL, Phase.DECODE)
    assert missing_phases(view_of(prefill), MODEL) == (Phase.DECODE,)
    assert missing_phases(view_of(prefill, decode), MODEL) == ()
    assert missing_phases(view_of(colocated), MODEL) == ()
    assert missing_phases(view_of(status("c0", BOTH_PHASES, state=InstanceState.DRAINING)), MODEL) != ()

    def chosen(*statuses: InstanceStatus) -> set[str]:
        nothing, rng = UnconfirmedWork[str](), random.Random(1)
        view, policy = view_of(*statuses), PlacementPolicy.RANDOM
        choices = [choose_prefill(view, MODEL, nothing, policy, rng) for _ in range(50)]
        return {choice.record.instance_id for choice in choices if choice is not None}

    assert chosen(prefill, decode, colocated) == {"p0", "c0"}
    # No instance can receive the KV that p0 computes.
    assert chosen(prefill, colocated) == {"c0"}


@given(st.integers(0, 2**32))
def test_power_of_two_takes_the_better_decode_instance_of_its_two(seed: int) -> None:
    view = view_of(
        status("a", DECODE, running_requests=2, context_tokens=1, free_blocks=9),
        status("b", DECODE, running_requests=1, waiting_requests=1, context_tokens=0, free_blocks=1),
    )
    chosen = choose_decode(view, MODEL, Demand(1), UnconfirmedWork[str](), POWER_OF_TWO, random.Random(seed))
    assert chosen is view.instances["b"], "equal in requests; fewer tokens of context decide"


def test_least_loaded_takes_the_least_and_round_robin_takes_turns() -> None:
    view = view_of(*(status(f"p{number}", queued_prefill_tokens=5 - number) for number in range(3)))
    nothing = UnconfirmedWork[str]()
    rng = random.Random(0)
    least = choose_prefill(view, MODEL, nothing, PlacementPolicy.LEAST_LOADED, rng)
    assert least is view.instances["p2"]
    turns = [choose_prefill(view, MODEL, nothing, PlacementPolicy.ROUND_ROBIN, rng, turn) for turn in range(4)]
    assert [entry.record.instance_id for entry in turns if entry] == ["p0", "p1", "p2", "p0"]


@pytest.mark.parametrize("policy", list(PlacementPolicy))
def test_an_instance_to_avoid_is_taken_only_when_nothing_else_is_left(policy: PlacementPolicy) -> None:
    one, other = status("p0"), status("p1", queued_prefill_tokens=10_000)
    nothing = UnconfirmedWork[str]()
    for seed in range(20):
        rng = random.Random(seed)
        assert choose_prefill(view_of(one, other), MODEL, nothing, policy, rng, seed, avoid=["p0"]) is other, seed
        assert choose_prefill(view_of(one), MODEL, nothing, policy, rng, seed, avoid=["p0"]) is one, seed


def test_work_just_sent_counts_before_a_heartbeat_shows_it() -> None:
    one, other = status("p0", queued_prefill_tokens=100), status("p1", queued_prefill_tokens=150)
    view = view_of(one, other)
    sent = UnconfirmedWork[str]()
    rng = random.Random(0)
    assert choose_prefill(view, MODEL, sent, PlacementPolicy.LEAST_LOADED, rng) is one
    sent.add("request", one, 60)
    assert choose_prefill(view, MODEL, sent, PlacementPolicy.LEAST_LOADED, rng) is other
    sent.remove("request", "p0")
    assert choose_prefill(view, MODEL, sent, PlacementPolicy.LEAST_LOADED, rng) is one
    assert len(sent) == 0


def test_blocks_just_placed_count_as_taken_and_as_requests() -> None:
    one, other = (status("d0", DECODE, free_blocks=10), status("d1", DECODE, free_blocks=10, running_requests=1))
    placed = UnconfirmedWork[str]()
    placed.add("first", one, 4)
    placed.add("second", one, 3)
    rng = random.Random(0)
    assert choose_decode(view_of(one, other), MODEL, Demand(3), placed, POWER_OF_TWO, rng) is other, (
        "two placed against one running"
    )
    assert choose_decode(view_of(one), MODEL, Demand(3), placed, POWER_OF_TWO, rng) is one
    assert choose_decode(view_of(one), MODEL, Demand(4), placed, POWER_OF_TWO, rng) is None


def test_sent_work_is_confirmed_by_the_second_heartbeat_and_by_a_new_life() -> None:
    sent = UnconfirmedWork[str]()
    sent.add("request", status("p0", sequence_number=10), 7)
    assert sent.at(status("p0", sequence_number=11)).amount == 7, "this heartbeat may have crossed the request"
    sent.add("later", status("p0", sequence_number=11), 5)
    assert sent.at(status("p0", sequence_number=12)).amount == 5, "it was sent one heartbeat later"
    assert sent.at(status("p0", sequence_number=13)).amount == 0
    assert len(sent) == 0
    sent.add("request", status("p0", sequence_number=10), 7)
    assert sent.at(status("p0", incarnation=2, sequence_number=1)).amount == 0


def test_decode_instances_with_another_kv_layout_are_left_out() -> None:
    fitting, other = status("d0", DECODE, layout=LAYOUT, free_blocks=1), status("d1", DECODE, free_blocks=9)
    demand, sent = Demand(1, layout=LAYOUT), UnconfirmedWork[str]()
    assert choose_decode(view_of(fitting, other), MODEL, demand, sent, POWER_OF_TWO, random.Random(1)) is fitting


def test_room_is_counted_in_the_blocks_of_each_decode_instance() -> None:
    large_blocks = replace(LAYOUT, block_tokens=128)
    small = status("d0", DECODE, layout=LAYOUT, free_blocks=12)
    large = status("d1", DECODE, layout=large_blocks, free_blocks=2)
    opaque = status("d2", DECODE, layout=replace(large_blocks, order="opaque"), free_blocks=99)
    view = view_of(small, large, opaque)

    def choice(token_count: int, seed: int = 1) -> ViewedInstance | None:
        demand = Demand(token_count, layout=LAYOUT)
        return choose_decode(view, MODEL, demand, UnconfirmedWork[str](), POWER_OF_TWO, random.Random(seed))

    assert choice(193) is large, "13 blocks of 16, 2 of 128"
    assert choice(257) is None
    assert [blocks_there(entry, 129) for entry in (small, large, status("d3"))] == [9, 2, 129]
    assert {choice(192, seed) is small for seed in range(20)} == {True, False}


def decode_choice(
    view: ClusterView,
    policy: DecodePlacementPolicy,
    seed: int = 0,
    heavy: bool = False,
    predicted: int = 0,
    turn: int = 0,
) -> str:
    demand = Demand(1, predicted, heavy)
    chosen = choose_decode(view, MODEL, demand, UnconfirmedWork[str](), policy, random.Random(seed), turn)
    assert chosen is not None
    return chosen.record.instance_id


def test_heavy_light_takes_the_lower_ratio_whatever_the_number_of_requests() -> None:
    few_but_heavy = status("d0", DECODE, free_blocks=9, heavy_requests=2, running_requests=2)
    many_and_light = status("d1", DECODE, free_blocks=9, heavy_requests=1, light_requests=20, running_requests=21)
    view = view_of(few_but_heavy, many_and_light)
    for seed in range(20):
        assert decode_choice(view, DecodePlacementPolicy.HEAVY_LIGHT, seed, heavy=True) == "d1", seed
        assert decode_choice(view, DecodePlacementPolicy.HEAVY_LIGHT, seed, heavy=False) == "d0", seed
        assert decode_choice(view, DecodePlacementPolicy.POWER_OF_TWO, seed) == "d0", seed


def test_heavy_light_breaks_ties_by_load_so_that_an_idle_instance_is_used() -> None:
    view = view_of(
        status("d0", DECODE, free_blocks=9), status("d1", DECODE, free_blocks=9, light_requests=5, running_requests=5)
    )
    for heavy in (False, True):
        policy = DecodePlacementPolicy.HEAVY_LIGHT
        assert {decode_choice(view, policy, seed, heavy=heavy) for seed in range(20)} == {"d0"}


@given(st.integers(0, 2**32), st.sampled_from((2, 4, 8)))
def test_heavy_light_spreads_a_burst_of_both_kinds_evenly(seed: int, instances: int) -> None:
    rng = random.Random(seed)
    kinds = [True, False] * (16 * instances)
    rng.shuffle(kinds)
    view = view_of(*(status(f"d{number}", DECODE, free_blocks=1000) for number in range(instances)))
    sent = UnconfirmedWork[int]()
    for number, heavy in enumerate(kinds):
        chosen = choose_decode(view, MODEL, Demand(1, heavy=heavy), sent, DecodePlacementPolicy.HEAVY_LIGHT, rng)
        assert chosen is not None
        sent.add(number, chosen, 1, heavy)
    for entry in view.instances.values():
        assert abs(sent.at(entry).heavy_count - 16) <= 10
        assert abs(sent.at(entry).count - 32) <= 16


def test_heavy_light_wants_room_for_the_predicted_answer_and_does_without_when_there_is_none() -> None:
    view = view_of(
        status("d0", DECODE, free_blocks=4, light_requests=1, running_requests=1),
        status("d1", DECODE, free_blocks=9, heavy_requests=3, running_requests=3),
    )
    policy = DecodePlacementPolicy.HEAVY_LIGHT
    assert {decode_choice(view, policy, seed, predicted=5) for seed in range(20)} == {"d1"}
    assert {decode_choice(view, policy, seed, predicted=4) for seed in range(20)} == {"d0"}
    assert {decode_choice(view, policy, seed, predicted=50) for seed in range(20)} == {"d0"}


def test_heavy_requests_just_placed_count_in_the_ratio() -> None:
    one, other = (status(name, DECODE, free_blocks=9, light_requests=4) for name in ("d0", "d1"))
    sent = UnconfirmedWork[str]()
    for target, heavy in ((one, True), (other, False)):
        sent.add(target.record.instance_id, target, 1, heavy)
    policy = DecodePlacementPolicy.HEAVY_LIGHT
    for seed in range(20):
        rng = random.Random(seed)
        assert choose_decode(view_of(one, other), MODEL, Demand(1, heavy=True), sent, policy, rng) is other, seed


def test_imbalance_sends_all_heavy_ones_to_the_first_and_spreads_the_light_ones() -> None:
    view = view_of(*(status(f"d{number}", DECODE, free_blocks=9) for number in range(3)))
    policy = DecodePlacementPolicy.IMBALANCE
    assert {decode_choice(view, policy, seed, heavy=True) for seed in range(30)} == {"d0"}
    assert {decode_choice(view, policy, seed) for seed in range(30)} == {"d0", "d1", "d2"}


def test_decode_placement_can_take_turns_the_least_loaded_or_any() -> None:
    view = view_of(*(status(f"d{number}", DECODE, free_blocks=9, running_requests=3 - number) for number in range(3)))
    turns = [decode_choice(view, DecodePlacementPolicy.ROUND_ROBIN, turn=turn) for turn in range(4)]
    assert turns == ["d0", "d1", "d2", "d0"]
    assert decode_choice(view, DecodePlacementPolicy.LEAST_LOADED) == "d2"
    assert {decode_choice(view, DecodePlacementPolicy.RANDOM, seed) for seed in range(30)} == {"d0", "d1", "d2"}


def test_a_request_is_heavy_by_its_prediction_and_by_its_prompt_where_there_is_none() -> None:
    thresholds = HeavyThresholds(output_tokens=128, prompt_tokens=512)
    assert thresholds.is_heavy(TokenRange(129, 130), 1)
    assert not thresholds.is_heavy(TokenRange(128, 900), 5000)
    assert thresholds.is_heavy(None, 513)
    assert not thresholds.is_heavy(None, 512)


def test_a_request_without_room_waits_where_few_wait_and_most_is_free_in_a_pool_that_is_large_enough() -> None:
    def decode(instance_id: str, free_blocks: int, total_blocks: int = 10, **load: object) -> InstanceStatus:
        return status(instance_id, DECODE, free_blocks=free_blocks, total_blocks=total_blocks, **load)

    sent: UnconfirmedWork[str] = UnconfirmedWork()
    view = view_of(
        decode("too-small", 6, total_blocks=7),
        decode("draining", 6, state=InstanceState.DRAINING),
        decode("sent-to", 5),
        decode("most-room", 4),
        decode("least-room", 2),
        decode("long-line", 7, waiting_requests=3),
    )
    sent.add("other", view.instances["sent-to"], 2)

    def chosen(*avoid: str) -> str | None:
        found = choose_line(view, MODEL, Demand(8), sent, avoid)
        return found.record.instance_id if found is not None else None

    assert chosen() == "most-room"
    assert chosen("most-room") == "least-room"
    # Requests sent there wait there, though no heartbeat shows them yet.
    assert chosen("most-room", "least-room") == "sent-to"
    assert chosen("most-room", "least-room", "sent-to") == "long-line"
    assert chosen("most-room", "sent-to", "least-room", "long-line") is None


def test_the_largest_prompt_is_what_the_largest_pool_holds_with_one_token_more() -> None:
    def decode(
        instance_id: str, total_blocks: int, can: tuple[Phase, ...] = DECODE, **record: object
    ) -> InstanceStatus:
        entry = status(instance_id, can, layout=LAYOUT, total_blocks=total_blocks)
        return replace(entry, record=replace(entry.record, **record))  # type: ignore[arg-type]

    def largest(*statuses: InstanceStatus) -> int | None:
        return largest_prompt(view_of(*statuses), MODEL, LAYOUT)

    tokens = LAYOUT.block_tokens
    assert largest() is None
    assert largest(decode("d0", 3), decode("d1", 2)) == 3 * tokens - 1
    assert largest(decode("d0", 3, max_model_len=2 * tokens)) == 2 * tokens - 1
    assert largest(decode("d0", 2, max_model_len=3 * tokens)) == 2 * tokens - 1
    # An instance that does not report its size may be large enough.
    assert largest(decode("d0", 3), decode("d1", 0)) is None
    assert largest_prompt(view_of(decode("d0", 3, layout=None)), MODEL) is None
    # Instances of another model, phase or KV layout do not count.
    others = decode("d1", 9, model="other"), decode("d2", 9, layout=OTHER_LAYOUT)
    assert largest(decode("d0", 3), *others) == 3 * tokens - 1
    assert largest(decode("d0", 3), decode("c0", 9, BOTH_PHASES)) == 3 * tokens - 1, "it takes no pushes"
    assert largest_prompt(view_of(decode("d0", 3), decode("c0", 9, BOTH_PHASES)), MODEL) == 9 * tokens - 1


def test_a_prefill_instance_whose_queue_is_full_takes_no_request() -> None:
    sent: UnconfirmedWork[str] = UnconfirmedWork()
    target = status("p0", queue_room=2)

    def chosen(*statuses: InstanceStatus, **more: Any) -> InstanceStatus | None:
        rng = random.Random(0)
        return choose_prefill(view_of(*statuses), MODEL, sent, PlacementPolicy.LEAST_LOADED, rng, **more)

    assert chosen(status("p0", queue_room=0)) is None
    assert chosen(status("p0", queue_room=0), status("p1", queue_room=1, queued_prefill_tokens=99)) == status(
        "p1", queue_room=1, queued_prefill_tokens=99
    )
    # Requests sent since its heartbeat fill the queue too, however few tokens they have.
    for number in range(2):
        assert chosen(target) is target
        sent.add(f"r{number}", target, 0)
    assert chosen(target) is None
    sent.remove("r0", "p0")
    assert chosen(target) is target
    # An excluded instance is never taken, unlike one to avoid.
    assert chosen(target, exclude={"p0"}) is None
    assert chosen(target, avoid={"p0"}) is target
    assert chosen(target, status("p1"), avoid={"p1"}, exclude={"p0"}) == status("p1")


def test_an_instance_is_asked_for_the_phases_that_an_order_in_its_load_names() -> None:
    def ordered(*phases: Phase, order: PhaseOrder = FIRST_ORDER) -> InstanceStatus:
        return status("c0", BOTH_PHASES, phases=phases, phase_order=order, free_blocks=9)

    def ids(view: ClusterView) -> tuple[list[str], ...]:
        return tuple([entry.record.instance_id for entry in view.ready(phase, MODEL)] for phase in Phase)

    assert ids(view_of(status("c0", BOTH_PHASES))) == (["c0"], ["c0"])
    assert ids(view_of(ordered(Phase.DECODE, order=NO_ORDER))) == (["c0"], ["c0"]), "no order was given"
    assert ids(view_of(ordered(Phase.PREFILL))) == (["c0"], [])
    assert ids(view_of(ordered())) == ([], [])
    assert missing_phases(view_of(ordered(Phase.PREFILL)), MODEL) == (Phase.DECODE,)
    both = view_of(ordered(Phase.PREFILL), status("d0", DECODE))
    chosen = choose_prefill(both, MODEL, UnconfirmedWork[str](), PlacementPolicy.LEAST_LOADED, random.Random(0))
    assert chosen is both.instances["c0"], "the other one takes pushes"


def test_the_longest_request_is_that_of_the_instance_with_the_lowest_limit() -> None:
    def limited(name: str, phases: tuple[Phase, ...], limit: int, model: str = MODEL) -> InstanceStatus:
        entry = status(name, phases, model=model)
        return replace(entry, record=replace(entry.record, max_model_len=limit))

    served = [limited("prefill", PREFILL, 100), limited("decode", DECODE, 70), limited("both", BOTH_PHASES, 80)]
    view = view_of(*served, limited("router", (), 0), limited("other", DECODE, 10, model="other"))
    assert max_model_len(view, MODEL) == 70
    assert max_model_len(view, "unknown") == 0
