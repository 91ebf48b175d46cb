"""Which instance changes its phase, and when."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.view import BOTH_PHASES, ClusterView, InstanceState, InstanceStatus, Phase, PhaseOrder, accepts
from kaveri.errors import ConfigError
from kaveri.policy.flipping import (
    FlipPolicy,
    FlipRules,
    FlipState,
    OrderedPhases,
    StepModel,
    check_order,
    first_prefill_count,
    observe,
)
from tests.library.policy.test_flipping import able
from tests.library.policy.views import DECODE, MODEL, PREFILL, instance, view_of

P, D = Phase.PREFILL, Phase.DECODE
SLO = FlipRules(
    policy=FlipPolicy.SLO,
    ttft_s=1.0,
    tpot_s=0.1,
    backlog_share=0.5,
    calm_share=0.1,
    step_share=0.8,
    step_most_share=1.0,
)
IDLE = FlipRules(policy=FlipPolicy.IDLE)
LATE_S = 1.1
Decision = tuple[str, tuple[Phase, ...]]


def prefill(instance_id: str, queued_s: float = 0.0, **load: Any) -> InstanceStatus:
    """A prefill instance with seconds of work in its queue."""
    return able(
        instance_id, P, **{"queued_prefill_tokens": round(1000 * queued_s), "prefill_tokens_per_s": 1000.0, **load}
    )


def decode(instance_id: str, step_s: float = 0.02, **load: Any) -> InstanceStatus:
    return able(instance_id, D, **{"step_s": step_s, "context_tokens": 1000, "running_requests": 10, **load})


def late(status: InstanceStatus) -> InstanceStatus:
    return replace(status, heartbeat_age_s=LATE_S)


def two_of_each(queued_s: float, step_s: float) -> ClusterView:
    return view_of(prefill("a", queued_s), prefill("b", queued_s), decode("c", step_s), decode("d", step_s))


def decided(
    view: ClusterView,
    rules: FlipRules = SLO,
    under_way: Mapping[str, OrderedPhases] | None = None,
    now_s: float = 0.0,
    state: FlipState | None = None,
) -> tuple[Decision | None, FlipState]:
    orders, after = observe(view, MODEL, rules, under_way or {}, now_s, state or FlipState())
    assert len(orders) <= 1
    return (orders[0].instance_id, orders[0].phases) if orders else None, after


def decision(view: ClusterView, rules: FlipRules = SLO, **known: Any) -> Decision | None:
    return decided(view, rules, **known)[0]


NEEDS_PREFILL, NEEDS_DECODE = two_of_each(0.51, 0.02), two_of_each(0.0, 0.09)


def test_without_a_policy_nothing_is_decided() -> None:
    for view in (NEEDS_PREFILL, NEEDS_DECODE, view_of(prefill("a"))):
        assert decided(view, FlipRules()) == (None, FlipState())


@pytest.mark.parametrize(
    ("queued_s", "step_s", "flips"),
    [(0.51, 0.02, True), (0.49, 0.02, False), (0.51, 0.0499, True), (0.51, 0.0501, False)],
)
def test_an_instance_flips_to_prefill_when_the_backlog_passes_its_share_of_the_target_and_one_less_can_decode(
    queued_s: float, step_s: float, flips: bool
) -> None:
    assert decision(two_of_each(queued_s, step_s)) == (("c", PREFILL) if flips else None)


@pytest.mark.parametrize(
    ("queued_s", "step_s", "flips"), [(0.09, 0.081, True), (0.09, 0.079, False), (0.11, 0.081, False)]
)
def test_an_instance_flips_to_decode_when_steps_are_long_and_prefill_has_one_to_spare(
    queued_s: float, step_s: float, flips: bool
) -> None:
    assert decision(two_of_each(queued_s, step_s)) == (("a", DECODE) if flips else None)


@pytest.mark.parametrize(
    ("queued_s", "step_s", "flips"), [(0.49, 0.101, True), (0.49, 0.099, False), (0.51, 0.101, False)]
)
def test_an_instance_flips_to_decode_when_steps_miss_the_target_and_the_backlog_does_not(
    queued_s: float, step_s: float, flips: bool
) -> None:
    assert decision(two_of_each(queued_s, step_s)) == (("a", DECODE) if flips else None)


def test_prefill_has_none_to_spare_until_its_backlog_was_short_for_a_while() -> None:
    _, busy = decided(two_of_each(0.4, 0.09), now_s=5.0)
    assert decision(NEEDS_DECODE, state=busy, now_s=5.1) is None
    assert decision(NEEDS_DECODE, state=busy, now_s=7.0) == ("a", DECODE)


def test_the_instance_that_flips_is_the_one_with_the_least_context_or_the_shortest_queue() -> None:
    decodes = (decode("c", context_tokens=2000), decode("d", context_tokens=900), decode("e", context_tokens=1500))
    assert decision(view_of(prefill("a", 0.6), *decodes)) == ("d", PREFILL)
    assert decision(view_of(prefill("a", 0.05), prefill("b", 0.01), decode("c", 0.09))) == ("b", DECODE)


def test_requests_that_wait_for_the_batch_count_as_longer_steps_and_empty_instances_as_shorter_ones() -> None:
    prefills = prefill("a"), prefill("b")
    assert decision(view_of(*prefills, decode("c", 0.05))) is None
    assert decision(view_of(*prefills, decode("c", 0.05, waiting_requests=10))) == ("a", DECODE)
    assert decision(view_of(*prefills, decode("c", 0.09))) == ("a", DECODE)
    assert decision(view_of(*prefills, decode("c", 0.09), able("d", D))) is None


def test_prefill_gets_none_before_its_speed_is_known() -> None:
    unknown = prefill("a", 9.0, prefill_tokens_per_s=0.0)
    assert decision(view_of(unknown, decode("c"), decode("d"))) is None


def test_each_phase_keeps_its_least_number_of_instances() -> None:
    assert decision(NEEDS_PREFILL, replace(SLO, min_decode=2)) is None
    assert decision(NEEDS_DECODE, replace(SLO, min_prefill=2)) is None
    assert decision(view_of(prefill("a", 0.6), decode("c"))) is None


def test_after_a_flip_the_next_one_waits_for_the_cooldown() -> None:
    first, state = decided(NEEDS_PREFILL, now_s=10.0)
    assert first == ("c", PREFILL)
    second, state = decided(NEEDS_PREFILL, state=state, now_s=10.9)
    assert second is None
    assert decision(NEEDS_PREFILL, state=state, now_s=11.0) == ("c", PREFILL)


@pytest.mark.parametrize(
    ("queued_s", "step_s", "flips"),
    [(0.99, 0.06, False), (1.01, 0.06, True), (1.01, 0.099, True), (1.01, 0.101, False)],
)
def test_steps_may_miss_their_target_once_every_new_prompt_misses_its_own(
    queued_s: float, step_s: float, flips: bool
) -> None:
    # One less decode instance takes twice as long.
    assert decision(two_of_each(queued_s, step_s)) == (("c", PREFILL) if flips else None)


def test_nothing_is_decided_while_the_loads_do_not_show_an_order() -> None:
    sent = {"c": OrderedPhases(1, PhaseOrder(1, 1), PREFILL)}
    three = view_of(prefill("a", 0.9), prefill("b", 0.9), decode("c"), decode("d"), decode("e"))
    assert decision(three, under_way=sent) is None
    assert decision(NEEDS_PREFILL, under_way={"c": replace(sent["c"], incarnation=2)}) == ("c", PREFILL)
    shown = prefill("c", 0.6, phase_order=PhaseOrder(1, 1))
    busy = view_of(prefill("a", 0.6), prefill("b", 0.6), shown, decode("d"), decode("e"))
    assert decision(busy, under_way=sent) == ("d", PREFILL)


def test_nothing_is_decided_without_the_store_or_while_most_heartbeats_are_late() -> None:
    assert decision(replace(NEEDS_PREFILL, store_connected=False)) is None
    busy, quiet = prefill("a", 0.6), prefill("b", 0.6)
    assert decision(view_of(busy, late(quiet), late(decode("c")), late(decode("d")))) is None
    assert decision(view_of(busy, late(quiet), decode("c"), decode("d"))) == ("c", PREFILL)


def test_an_instance_whose_heartbeats_are_late_gets_no_order() -> None:
    lightest = late(decode("b", context_tokens=0))
    assert decision(view_of(prefill("a", 0.6), lightest, decode("c"), decode("d"))) == ("c", PREFILL)
    assert decision(view_of(late(prefill("a")), prefill("b"), prefill("e"), decode("c", 0.09))) == ("b", DECODE)


def test_instances_of_one_phase_and_of_other_models_get_no_order() -> None:
    others = instance("a", DECODE), able("b", D, model="other"), instance("r", ())
    assert decision(view_of(prefill("p", 0.6), decode("c"), decode("d"), *others)) == ("c", PREFILL)
    assert decision(view_of(*others)) is None


@pytest.mark.parametrize("rules", [SLO, IDLE])
def test_when_the_last_instance_of_a_phase_is_gone_another_takes_its_place_at_once(rules: FlipRules) -> None:
    just_ordered = FlipState(observed_s=4.9, ordered_s=4.9)
    busy, quiet = decode("c", running_requests=9), decode("d", running_requests=3)
    drains = prefill("a", state=InstanceState.DRAINING)
    for view in (view_of(busy, quiet), view_of(busy, quiet, drains), view_of(busy, quiet, late(prefill("a")))):
        assert decision(view, rules, state=just_ordered, now_s=5.0) == ("d", PREFILL)
    busy, quiet = prefill("a", waiting_requests=5), prefill("b", waiting_requests=2)
    view = view_of(busy, quiet)
    assert decision(view, rules, state=just_ordered, now_s=5.0) == ("b", DECODE)
    sent = {"b": OrderedPhases(1, PhaseOrder(1, 1), DECODE)}
    assert decision(view, rules, under_way=sent, state=just_ordered, now_s=5.0) is None


def test_the_only_instance_left_serves_both_phases() -> None:
    assert decision(view_of(decode("c"))) == ("c", BOTH_PHASES)
    assert decision(view_of(prefill("a"), decode("c", state=InstanceState.DRAINING))) == ("a", BOTH_PHASES)
    assert decision(view_of(able("a", P, D))) is None


def test_an_instance_that_was_idle_for_a_minute_flips_while_the_other_phase_has_work() -> None:
    view = view_of(prefill("a"), prefill("b", running_requests=8), decode("c"), decode("d"))
    _, state = decided(view, IDLE)
    for now_s, found in ((59.9, None), (60.0, ("a", DECODE))):
        assert decision(view, IDLE, state=state, now_s=now_s) == found
    nothing_there = view_of(prefill("a"), prefill("b"), able("c", D), able("d", D))
    assert decision(nothing_there, IDLE, state=state, now_s=99.0) is None
    assert decision(view, replace(IDLE, min_prefill=2), state=state, now_s=99.0) is None


def test_an_instance_that_works_in_between_begins_its_idle_minute_anew() -> None:
    idle, busy = prefill("a"), prefill("a", running_requests=8)
    others = prefill("b", running_requests=8), decode("c"), decode("d")
    state = FlipState()
    for now_s, one in ((0.0, idle), (30.0, busy), (40.0, idle), (99.0, idle)):
        found, state = decided(view_of(one, *others), IDLE, state=state, now_s=now_s)
        assert found is None, now_s
    assert decision(view_of(idle, *others), IDLE, state=state, now_s=100.0) == ("a", DECODE)


def test_a_new_leader_repeats_no_order_that_the_loads_show() -> None:
    before = view_of(prefill("a", 0.6), decode("c"), decode("d"))
    assert decision(before) == ("c", PREFILL)
    shown = able("c", P, D, ending_phases=(D,), phase_order=PhaseOrder(1, 1), step_s=0.02, running_requests=1)
    assert decision(view_of(prefill("a", 0.6), shown, decode("d"))) is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"min_prefill": 0}, "min_prefill"),
        ({"min_decode": 0}, "min_decode"),
        ({"ttft_s": 0.0}, "slo_ttft_s"),
        ({"tpot_s": math.inf}, "slo_tpot_s"),
        ({"calm_share": 0.6}, "calm_share"),
        ({"backlog_share": 1.5}, "backlog_share"),
        ({"backlog_share": math.nan}, "backlog_share"),
        ({"step_most_share": 1.2}, "step_most_share"),
        ({"idle_s": math.nan}, "idle_s"),
        ({"idle_share": -1.0}, "idle_share"),
        ({"step_share": 0.0}, "step_share"),
        ({"step_share": math.nan}, "step_share"),
        ({"late_step_share": 0.9}, "late_step_share"),
        ({"cooldown_s": 0.0}, "cooldown_s"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_with_their_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(SLO, **changes)
    assert refused.value.field == name


def line(base_s: float, slope_s: float, *contexts: int) -> StepModel:
    model = StepModel()
    for context_tokens in contexts:
        model = model.with_step(context_tokens, base_s + slope_s * context_tokens)
    return model


def test_the_time_of_a_step_follows_the_line_through_those_that_were_measured() -> None:
    model = line(0.03, 1e-5, 500, 1000, 4000)
    assert model.scaled(1000, 0.04, 2.0) == pytest.approx(0.05)
    assert model.scaled(1000, 0.04, 0.5) == pytest.approx(0.035)
    later = model.faded(600.0)
    assert later.scaled(1000, 0.04, 2.0) == pytest.approx(0.05)
    for context_tokens in (500, 4000):
        later = later.with_step(context_tokens, 0.01 + 2e-5 * context_tokens)
    assert later.scaled(1000, 0.03, 2.0) == pytest.approx(0.05), "old steps fade"


def test_the_time_of_a_step_is_in_proportion_while_all_those_measured_are_alike() -> None:
    for model in (StepModel(), line(0.03, 1e-5, 1000), line(0.03, 1e-5, 1000, 1001, 999)):
        assert model.scaled(1000, 0.04, 2.0) == pytest.approx(0.08)


@given(
    measured=st.lists(st.tuples(st.integers(0, 100_000), st.floats(1e-3, 1.0)), max_size=6),
    context_tokens=st.integers(0, 100_000),
    step_s=st.floats(1e-3, 1.0),
    share=st.floats(1.0, 4.0),
)
def test_a_larger_batch_takes_no_less_time_and_no_more_than_in_proportion(
    measured: list[tuple[int, float]], context_tokens: int, step_s: float, share: float
) -> None:
    model = StepModel()
    for one in measured:
        model = model.with_step(*one)
    assert step_s <= model.scaled(context_tokens, step_s, share) <= step_s * share * (1 + 1e-9)


def test_a_flip_is_judged_by_the_measured_line_and_a_heartbeat_is_measured_once() -> None:
    assert decision(two_of_each(0.51, 0.06)) is None
    knows = FlipState(steps=line(0.05, 1e-5, 200, 500, 1000, 4000))
    assert decision(two_of_each(0.51, 0.06), state=knows) == ("c", PREFILL)
    _, once = decided(two_of_each(0.0, 0.06))
    _, again = decided(two_of_each(0.0, 0.06), state=once)
    assert again.steps == once.steps
    assert once.steps.weight == 2


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[InstanceStatus], dict[str, OrderedPhases]]:
    found, under_way = [], {}
    for name in "abcdefg"[: draw(st.integers(1, 7))]:
        phases = draw(st.sampled_from((PREFILL, DECODE, BOTH_PHASES)))
        load = {
            "phases": phases,
            "ending_phases": draw(st.sampled_from((PREFILL, DECODE))) if phases == BOTH_PHASES else (),
            "phase_order": PhaseOrder(1, draw(st.integers(1, 2))),
            "state": draw(st.sampled_from((InstanceState.READY,) * 5 + (InstanceState.DRAINING,))),
            "waiting_requests": draw(st.integers(0, 3)),
            "running_requests": draw(st.integers(0, 20)),
            "queued_prefill_tokens": draw(st.integers(0, 900)),
            "prefill_tokens_per_s": draw(st.sampled_from((0.0, 500.0, 1000.0))),
            "step_s": draw(st.sampled_from((0.0, 0.02, 0.05, 0.09, 0.2))),
            "context_tokens": draw(st.integers(0, 20_000)),
        }
        fixed = phases != BOTH_PHASES and draw(st.integers(0, 5)) == 0
        one = instance(name, phases if fixed else BOTH_PHASES, incarnation=draw(st.integers(1, 2)), **load)
        found.append(late(one) if draw(st.integers(0, 4)) == 0 else one)
        if load["state"] is InstanceState.READY and draw(st.integers(0, 2)) == 0:
            number, ordered = PhaseOrder(1, draw(st.integers(1, 3))), draw(st.sampled_from((PREFILL, DECODE)))
            under_way[name] = OrderedPhases(draw(st.integers(1, 2)), number, ordered)
    return found, under_way


def will_accept(one: InstanceStatus, phase: Phase, under_way: Mapping[str, OrderedPhases]) -> bool:
    sent = under_way.get(one.record.instance_id)
    if sent is None or sent.incarnation != one.record.incarnation or sent.order <= one.load.phase_order:
        return accepts(one, phase)
    return phase in sent.phases


@given(drawn=instances(), rules=st.sampled_from((SLO, IDLE)), least=st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_orders_are_such_that_they_can_be_carried_out_and_leave_enough_of_each_phase(
    drawn: tuple[list[InstanceStatus], dict[str, OrderedPhases]], rules: FlipRules, least: tuple[int, int]
) -> None:
    statuses, under_way = drawn
    view = view_of(*statuses)
    rules = replace(rules, min_prefill=least[0], min_decode=least[1])
    idle = FlipState(idle_since_s=dict.fromkeys(view.instances, -100.0))
    orders, _ = observe(view, MODEL, rules, under_way, 0.0, idle)
    assert len(orders) <= 1
    for order in orders:
        chosen = view.instances[order.instance_id]
        assert chosen.record.phases == BOTH_PHASES
        assert chosen.record.incarnation == order.incarnation
        assert chosen.heartbeat_age_s < LATE_S
        assert chosen.load.state is InstanceState.READY
        heard = [one for one in statuses if one.heartbeat_age_s < LATE_S]
        taking = {phase: [one for one in heard if will_accept(one, phase, under_way)] for phase in Phase}
        if taking[P] and taking[D]:
            for phase, count in zip(Phase, least, strict=True):
                after = [one for one in taking[phase] if one is not chosen or phase in order.phases]
                assert len(after) >= min(count, len(taking[phase]))
        if order.phases != BOTH_PHASES:
            check_order(view, order.instance_id, order.phases, under_way)


def test_a_draining_instance_does_not_count_as_serving_what_it_was_ordered() -> None:
    drains = able("d", D, state=InstanceState.DRAINING)
    sent = {"d": OrderedPhases(1, PhaseOrder(1, 1), PREFILL)}
    assert decision(view_of(drains, decode("e")), under_way=sent) == ("e", BOTH_PHASES)
    assert decision(view_of(drains), under_way=sent) is None


def test_instances_of_both_phases_by_their_command_keep_them_and_take_no_pushes() -> None:
    both = able("a", P, D, queued_prefill_tokens=900, prefill_tokens_per_s=1000.0, running_requests=9)
    assert decision(view_of(both, both)) is None
    assert decision(view_of(both, decode("b"))) is None


def test_an_instance_that_was_the_last_one_serves_one_phase_again_once_others_are_back() -> None:
    last = able("a", P, D, phase_order=PhaseOrder(1, 1))
    assert decision(view_of(last)) is None
    assert decision(view_of(last, prefill("b"))) == ("a", DECODE)
    assert decision(view_of(last, decode("b"))) == ("a", PREFILL)


def test_fixed_instances_serve_their_phase_and_get_no_order() -> None:
    fixed = instance("p", PREFILL), instance("q", DECODE)
    assert decision(view_of(*fixed, decode("z"))) is None
    assert decision(view_of(instance("q", DECODE), decode("z"))) == ("z", PREFILL)
    assert decision(view_of(*fixed[:1])) is None


def test_measured_steps_fade_with_time_whether_or_not_anything_is_decided() -> None:
    _, state = decided(NEEDS_DECODE)
    away = replace(view_of(prefill("a")), store_connected=False)
    weight = state.steps.weight
    for tenth in range(1, 101):
        _, state = decided(away, state=state, now_s=tenth / 10)
    assert state.steps.weight == pytest.approx(weight * math.exp(-10 / 30))


def test_an_instance_that_restarted_was_not_idle_before() -> None:
    view = view_of(prefill("a"), prefill("b", running_requests=8), decode("c"), decode("d"))
    _, state = decided(view, IDLE)
    assert decision(view, IDLE, state=state, now_s=60.0) == ("a", DECODE)
    again = replace(prefill("a"), record=replace(prefill("a").record, incarnation=2))
    view = view_of(again, prefill("b", running_requests=8), decode("c"), decode("d"))
    assert decision(view, IDLE, state=state, now_s=60.0) is None


@pytest.mark.parametrize(
    ("instances", "minima", "prefills"),
    [(4, (1, 1), 2), (5, (1, 1), 3), (4, (3, 1), 3), (4, (1, 3), 1), (2, (1, 1), 1), (5, (1, 3), 2)],
)
def test_half_of_the_instances_start_with_each_phase_within_the_minima(
    instances: int, minima: tuple[int, int], prefills: int
) -> None:
    rules = FlipRules(min_prefill=minima[0], min_decode=minima[1])
    assert first_prefill_count(instances, rules) == prefills
