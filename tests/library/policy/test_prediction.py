import random

from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.length import TokenRange
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, NoCapacity, Unavailable
from kaveri.policy.prediction import (
    PredictionMode,
    PredictionOutcome,
    PredictorHealth,
    PredictorStatus,
    answer_within_s,
    choose_predictor,
    failure_outcome,
    is_slip,
    usable_length,
)


def statuses(*waiting: int) -> list[PredictorStatus]:
    return [PredictorStatus(f"p{number}", 1, f"h:{number}", count) for number, count in enumerate(waiting)]


def test_of_two_predictors_the_one_with_fewer_prompts_is_asked() -> None:
    rng = random.Random(0)
    assert {choose_predictor(statuses(5, 4), rng) for _ in range(50)} == {statuses(5, 4)[1]}
    assert choose_predictor([], rng) is None


def test_the_busiest_of_many_is_never_asked() -> None:
    rng = random.Random(0)
    chosen = {choose_predictor(statuses(1, 2, 3, 4), rng) for _ in range(200)}
    assert {status.name for status in chosen if status is not None} == {"p0", "p1", "p2"}


def test_a_predictor_rests_longer_after_each_failure_and_is_then_asked_one_thing_at_a_time() -> None:
    health = PredictorHealth()
    now_s, rests = 10.0, []
    for _ in range(8):
        assert health.may_be_asked(now_s)
        health.failed(now_s, now_s, slip=False)
        rest_s = 0.0
        while not health.may_be_asked(now_s + rest_s):
            rest_s += 0.05
        rests.append(round(rest_s, 2))
        now_s += rest_s
    assert rests == sorted(rests)
    assert 0 < rests[0] < rests[-1] <= 2.05
    health.outstanding_prompts = 1
    assert not health.may_be_asked(now_s)
    health.succeeded()
    assert health.may_be_asked(now_s)


def test_that_it_stopped_and_that_it_works_again_is_news_once() -> None:
    health = PredictorHealth()
    assert health.succeeded()
    assert not health.succeeded()
    assert health.failed(1.0, 1.1, slip=False)
    assert not health.failed(2.0, 2.1, slip=False)
    assert not health.left()
    assert health.succeeded()


def test_a_slip_now_and_then_is_no_news_three_in_a_row_are() -> None:
    health = PredictorHealth()
    for start in (1.0, 2.0, 3.0):
        assert not health.failed(start, start, slip=True)
        assert health.may_be_asked(start)
        health.succeeded()
    assert [health.failed(start, start, slip=True) for start in (4.0, 5.0, 6.0, 7.0)] == [False, False, True, False]
    assert not health.may_be_asked(7.01)


def test_calls_that_fail_together_are_one_failure() -> None:
    health = PredictorHealth()
    for asked_s in (1.0, 1.01, 1.02):
        health.failed(asked_s, 1.05, slip=False)
    assert health.may_be_asked(1.05 + 0.11)


def test_a_new_life_need_not_rest_for_the_former_one() -> None:
    health = PredictorHealth()
    health.reborn(1)
    health.failed(1.0, 1.0, slip=False)
    health.reborn(1)
    assert not health.may_be_asked(1.01)
    health.reborn(2)
    assert health.may_be_asked(1.01)


@given(st.integers(0, 400), st.integers(1, 100), st.integers(0, 600), st.integers(1, 600), st.integers(0, 600))
def test_a_usable_length_is_within_what_may_be_generated_and_not_outlived(
    low: int, width: int, generated: int, most: int, least: int
) -> None:
    least = min(least, most)
    predicted = TokenRange(low, low + width)
    usable = usable_length(predicted, generated, most, least)
    if usable is None:
        # The answer has not ended, so it will have at least one more token.
        assert generated + 1 >= min(max(predicted.high, least + 1), most + 1)
    else:
        assert usable.high <= most + 1
        assert usable.high - 1 > generated
        assert usable.low == min(max(low, least), most)
        assert usable.high == min(max(predicted.high, usable.low + 1), most + 1)


@given(st.sampled_from(PredictionMode), st.floats(0.001, 10.0))
def test_only_where_predictions_come_first_the_budget_is_the_time_of_a_predictor(
    mode: PredictionMode, budget_s: float
) -> None:
    assert (answer_within_s(mode, budget_s) == budget_s) == (mode.comes_first or budget_s == 2.0)


ERRORS = [DeadlineExceeded(), InvalidArgument("prompts", 1, "fewer"), NoCapacity("predictor", 0.1), Unavailable("gone")]


@given(st.sampled_from(PredictionMode), st.sampled_from(ERRORS))
def test_a_late_answer_is_a_slip_and_counts_as_late_only_where_it_comes_first(
    mode: PredictionMode, error: KaveriError
) -> None:
    if isinstance(error, DeadlineExceeded):
        assert is_slip(mode, error) == mode.comes_first
        assert failure_outcome(mode, error) is (
            PredictionOutcome.LATE if mode.comes_first else PredictionOutcome.FAILED
        )
    else:
        assert is_slip(mode, error) == (not isinstance(error, Unavailable))
        assert failure_outcome(mode, error) is PredictionOutcome.FAILED


@given(st.lists(st.sampled_from(["good", "slip", "failure"]), max_size=30), st.floats(0.0, 5.0))
def test_a_predictor_rests_two_seconds_at_most_and_never_after_a_good_answer(answers: list[str], wait_s: float) -> None:
    health = PredictorHealth()
    now_s = 10.0
    for answer in answers:
        now_s += wait_s
        if answer == "good":
            health.succeeded()
            assert health.may_be_asked(now_s)
        else:
            health.failed(now_s, now_s, slip=answer == "slip")
            assert answer == "slip" or not health.may_be_asked(now_s)
    assert health.may_be_asked(now_s + 2.0)
