"""The fit finds the coefficients that made the times, never a negative one, and knows how wrong it is."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.latency.fit import fit_decode, fit_prefill, nonnegative_least_squares, predict_decode_s, predict_prefill_s
from kaveri.latency.model import bundled_latency_models, load_latency_model
from kaveri.latency.profile import DecodePoint, PrefillPoint
from kaveri.profiling.plan import StepLimits, StepPlan, plan_steps
from tests.library.profiling.profile_double import OPT_13B, times

LIMITS = StepLimits(max_chunk_tokens=2048, max_batch=64, max_model_len=2048, total_blocks=6000, block_tokens=16)


def prefill_points(plan: StepPlan) -> list[PrefillPoint]:
    return [PrefillPoint(prompts=prompts, times=times(1.0)) for prompts in plan.prefill]


def decode_points(plan: StepPlan) -> list[DecodePoint]:
    return [DecodePoint(batch=batch, context_tokens=context, times=times(1.0)) for batch, context in plan.decode]


@pytest.mark.parametrize("name", bundled_latency_models())
@pytest.mark.parametrize("quick", [False, True])
def test_coefficients_that_made_the_times_are_found_again(name: str, quick: bool) -> None:
    model = load_latency_model(name)
    plan = plan_steps(LIMITS, quick)
    prefill, error = fit_prefill(
        [replace(point, times=times(predict_prefill_s(model.prefill, point))) for point in prefill_points(plan)]
    )
    assert prefill.step_s == pytest.approx(model.prefill.step_s, rel=1e-6)
    assert prefill.token_s == pytest.approx(model.prefill.token_s, rel=1e-6)
    assert prefill.token_squared_s == pytest.approx(model.prefill.token_squared_s, rel=1e-6, abs=1e-15)
    assert error.largest < 1e-6
    decode, error = fit_decode(
        [replace(point, times=times(predict_decode_s(model.decode[0], point))) for point in decode_points(plan)]
    )
    assert decode.min_batch == 1
    assert decode.step_s == pytest.approx(model.decode[0].step_s, rel=1e-6)
    assert decode.context_token_s == pytest.approx(model.decode[0].context_token_s, rel=1e-6)
    assert decode.request_s == pytest.approx(model.decode[0].request_s, rel=1e-6, abs=1e-12)
    assert error.largest < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_noise_in_the_times_is_not_in_the_predictions(seed: int) -> None:
    rng = random.Random(seed)
    points = prefill_points(plan_steps(LIMITS, quick=False))
    true_s = [predict_prefill_s(OPT_13B.prefill, point) for point in points]
    noisy = [
        replace(point, times=times(seconds * rng.uniform(0.9, 1.1)))
        for point, seconds in zip(points, true_s, strict=True)
    ]
    fitted, error = fit_prefill(noisy)
    for point, seconds in zip(points, true_s, strict=True):
        assert predict_prefill_s(fitted, point) == pytest.approx(seconds, rel=0.08), f"seed {seed}, {point.prompts}"
    assert 0.02 < error.mean < 0.1


def test_the_error_is_of_points_that_the_fit_has_not_seen() -> None:
    points = [
        replace(point, times=times(predict_prefill_s(OPT_13B.prefill, point)))
        for point in prefill_points(plan_steps(LIMITS, quick=True))
    ]
    points[3] = replace(points[3], times=times(points[3].times.median_s / 3))
    _, error = fit_prefill(points)
    assert error.largest == pytest.approx(2.0, rel=0.01)


def test_times_of_another_form_have_a_large_error() -> None:
    points = [
        replace(point, times=times(0.01 if point.tokens < 100 else 1.0))
        for point in prefill_points(plan_steps(LIMITS, quick=True))
    ]
    assert fit_prefill(points)[1].mean > 0.3


def test_a_term_that_would_be_negative_is_left_out() -> None:
    points = [
        replace(point, times=times(0.01 + 0.001 * point.batch - 1e-8 * point.batch * point.context_tokens))
        for point in decode_points(plan_steps(LIMITS, quick=True))
    ]
    fitted, _ = fit_decode(points)
    assert fitted.context_token_s == 0
    assert fitted.step_s > 0
    assert fitted.request_s > 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(3, 12))
def test_least_squares_meet_the_conditions_of_an_optimum(seed: int, columns: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows, targets = rng.normal(size=(count, columns)) * [1, 1e3, 1e-3][:columns], rng.normal(size=count)
    found = nonnegative_least_squares(rows, targets)
    assert (found >= 0).all()
    # Karush, Kuhn and Tucker: no step that is allowed leads downhill.
    downhill = rows.T @ (targets - rows @ found) / np.linalg.norm(rows, axis=0)
    assert (downhill < 1e-9).all()
    assert np.abs(downhill[found > 0]).max(initial=0.0) < 1e-9
