import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.policy.retry import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LONGEST_RETRY_AFTER_S,
    RetryLimits,
    RetryState,
    Setback,
    after_setback,
)

LIMITS = RetryLimits(max_attempts=3, unavailable_after_s=10.0)

SETBACKS = tuple(setback for setback in Setback if setback is not Setback.REFUSED)
"""Failures of prefill instances."""


def record(number: int = 0, incarnation: int = 1) -> InstanceRecord:
    return InstanceRecord(f"prefill-{number}", incarnation, Role.ENGINE, "h:1", "tiny", phases=(Phase.PREFILL,))


def view_of(*records: InstanceRecord) -> ClusterView:
    return ClusterView({entry.instance_id: InstanceStatus(entry, InstanceLoad()) for entry in records})


def after(state: RetryState, setback: Setback, now_s: float = 0.0, jitter: float = 0.0, **more: float) -> RetryState:
    following = after_setback(state, LIMITS, setback, record(), now_s, jitter, **{"retry_after_s": 0.01, **more})
    assert following is not None
    return following


jitters = st.floats(0, 1, exclude_max=True)


@given(st.lists(st.tuples(st.sampled_from(SETBACKS), jitters, st.floats(0, 3)), max_size=60), st.integers(1, 8))
def test_a_request_ends_by_lost_placements_or_by_time_out_of_reach_and_by_nothing_else(
    steps: list[tuple[Setback, float, float]], max_attempts: int
) -> None:
    limits = replace(LIMITS, max_attempts=max_attempts)
    state, now_s, lost, unreached = RetryState(), 100.0, 0, list[float]()
    for setback, jitter, passed_s in steps:
        now_s += passed_s
        lost += setback is Setback.LOST
        unreached = [*unreached, now_s] if setback is Setback.UNREACHED else []
        out_of_reach = len(unreached) >= max_attempts and now_s - unreached[0] >= limits.unavailable_after_s
        following = after_setback(state, limits, setback, record(), now_s, jitter)
        if following is None:
            assert lost == max_attempts or out_of_reach
            return
        assert lost < max_attempts
        assert not out_of_reach
        state = following
        assert state.lost_attempts == lost


@given(st.lists(st.tuples(st.sampled_from(SETBACKS), st.integers(0, 3), jitters), max_size=20), st.floats(1e-3, 3))
def test_who_has_failed_rests_for_a_bounded_time_and_others_never_do(
    steps: list[tuple[Setback, int, float]], retry_after_s: float
) -> None:
    limits = RetryLimits(1000, 1000.0)
    view = view_of(*(record(number) for number in range(5)))
    state = RetryState()
    for step, (setback, number, jitter) in enumerate(steps):
        now_s = float(step)
        following = after_setback(state, limits, setback, record(number), now_s, jitter, retry_after_s)
        assert following is not None
        state = following
        until_s = state.resting(view, now_s)[f"prefill-{number}"]
        if setback is Setback.FULL:
            least_s = max(FIRST_PAUSE_S, retry_after_s)
            assert least_s <= until_s - now_s + 1e-9
            assert until_s - now_s <= 1.5 * max(least_s, 0.5) + 1e-9
        else:
            assert until_s - now_s + 1e-9 >= FIRST_PAUSE_S / 2
            assert until_s - now_s <= LONGEST_PAUSE_S + 1e-9
        assert not state.resting(view, until_s).get(f"prefill-{number}"), "its rest is over"
        assert state.failed(view) == {f"prefill-{failed}" for _, failed, _ in steps[: step + 1]}


def test_an_instance_that_refuses_a_request_again_and_again_is_asked_less_often() -> None:
    """As with a view of its phases that is old for as long as the store is away."""
    state, pauses = RetryState(), []
    for _ in range(7):
        state = after(state, Setback.FULL, retry_after_s=FIRST_PAUSE_S)
        pauses.append(state.resting(view_of(record()), 0.0)["prefill-0"])
    assert pauses == sorted(pauses)
    assert pauses[0] <= 1.5 * FIRST_PAUSE_S
    assert 0.5 <= pauses[-1] <= 0.75
    # What the instance asks for is enough where that is longer.
    assert after(state, Setback.FULL, retry_after_s=2.0).resting(view_of(record()), 0.0)["prefill-0"] >= 2.0


def test_an_instance_that_asks_for_another_placement_at_once_is_neither_avoided_nor_at_fault() -> None:
    state = after(RetryState(), Setback.FULL, retry_after_s=0.0)
    assert not state.resting(view_of(record()), 0.0)
    assert not state.failed(view_of(record()))


@pytest.mark.parametrize("setback", SETBACKS)
def test_a_new_life_of_an_instance_need_not_rest(setback: Setback) -> None:
    state = after(RetryState(), setback)
    assert state.resting(view_of(record()), 0.0)
    assert state.failed(view_of(record())) == {"prefill-0"}
    for view in (view_of(record(incarnation=2)), view_of()):
        assert not state.resting(view, 0.0)
        assert not state.failed(view)


def test_pauses_double_up_to_the_longest_and_a_full_queue_does_not_lengthen_them() -> None:
    limits = RetryLimits(1000, 1000.0)
    state, pauses = RetryState(), []
    for _ in range(10):
        full = after_setback(state, limits, Setback.FULL, record(), 0.0, 0.5, 3.0)
        assert full is not None
        following = after_setback(full, limits, Setback.UNREACHED, record(), 0.0, 0.999999)
        assert following is not None
        state = following
        pauses.append(state.resting(view_of(record()), 0.0)["prefill-0"])
    expected = [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**doublings) for doublings in range(10)]
    assert pauses == pytest.approx(expected, rel=1e-4)


def test_only_a_lost_placement_makes_the_request_itself_pause() -> None:
    state = after(RetryState(), Setback.FULL, 5.0, retry_after_s=2.0)
    assert state.pause_until_s <= 5.0
    state = after(state, Setback.UNREACHED, 6.0)
    assert state.pause_until_s <= 6.0
    state = after(state, Setback.LOST, 7.0)
    assert 7.0 + FIRST_PAUSE_S / 2 <= state.pause_until_s <= 7.0 + LONGEST_PAUSE_S


def test_an_instance_that_had_done_its_part_need_not_rest() -> None:
    state = after_setback(RetryState(), LIMITS, Setback.LOST, None, 0.0, 0.5)
    assert state is not None
    assert state.lost_attempts == 1
    assert not state.failed(view_of(record()))


@pytest.mark.parametrize("odd_s", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_an_odd_delay_is_taken_for_the_longest(odd_s: float) -> None:
    state = after(RetryState(), Setback.FULL, retry_after_s=odd_s)
    assert state.resting(view_of(record()), 0.0) == {"prefill-0": LONGEST_RETRY_AFTER_S}


def test_out_of_reach_ends_a_request_only_after_both_the_time_and_the_tries() -> None:
    limits = RetryLimits(max_attempts=3, unavailable_after_s=0.0)
    state: RetryState | None = RetryState()
    for tries in (1, 2, 3):
        assert state is not None
        state = after_setback(state, limits, Setback.UNREACHED, record(), 1.0, 0.0)
        assert (state is None) == (tries == 3), tries
    limits = RetryLimits(max_attempts=1, unavailable_after_s=5.0)
    state = RetryState()
    for now_s in (0.0, 2.5, 4.999, 5.0):
        assert state is not None
        state = after_setback(state, limits, Setback.UNREACHED, record(), now_s, 0.0)
        assert (state is None) == (now_s == 5.0), now_s


@pytest.mark.parametrize("setback", SETBACKS)
def test_requests_that_failed_together_do_not_come_back_together(setback: Setback) -> None:
    rng = random.Random(1)
    states = [after(RetryState(), setback, jitter=rng.random(), retry_after_s=0.02) for _ in range(100)]
    ends = [state.resting(view_of(record()), 0.0)["prefill-0"] for state in states]
    assert max(ends) - min(ends) > 0.4 * FIRST_PAUSE_S
    if setback is Setback.LOST:
        assert len({state.pause_until_s for state in states}) > 50
