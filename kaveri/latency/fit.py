"""Fits the latency model of DistServe's appendix A (arXiv 2401.09670) to measured steps. Pure.

The form is that of kaveri/latency/model.py: linear in its coefficients, all of them at least 0. The fit minimises the
relative error, so short steps weigh the same as long ones.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kaveri.latency.model import DecodeLatency, PrefillLatency
from kaveri.latency.profile import DecodePoint, FitError, PrefillPoint

FOLDS = 5
"""Folds of the cross-validation that estimates the error."""
COEFFICIENTS = 3
"""Coefficients per phase; a fit and its error need more points than this."""

Floats = npt.NDArray[np.float64]


def fit_prefill(points: Sequence[PrefillPoint]) -> tuple[PrefillLatency, FitError]:
    """Fit the coefficients of prefill steps, with cross-validated error. Needs COEFFICIENTS + 2 points or more."""
    rows = [(1.0, point.tokens, point.squared_tokens) for point in points]
    (step_s, token_s, token_squared_s), error = _fit(rows, [point.times.median_s for point in points])
    return PrefillLatency(step_s=step_s, token_s=token_s, token_squared_s=token_squared_s), error


def fit_decode(points: Sequence[DecodePoint]) -> tuple[DecodeLatency, FitError]:
    """Fit coefficients of decode steps, the same for all batch sizes, with cross-validated error."""
    rows = [(1.0, point.batch * point.context_tokens, point.batch) for point in points]
    (step_s, context_token_s, request_s), error = _fit(rows, [point.times.median_s for point in points])
    fitted = DecodeLatency(min_batch=1, step_s=step_s, context_token_s=context_token_s, request_s=request_s)
    return fitted, error


def predict_prefill_s(fitted: PrefillLatency, point: PrefillPoint) -> float:
    return fitted.step_s + point.tokens * fitted.token_s + point.squared_tokens * fitted.token_squared_s


def predict_decode_s(fitted: DecodeLatency, point: DecodePoint) -> float:
    context_tokens = point.batch * point.context_tokens
    return fitted.step_s + context_tokens * fitted.context_token_s + point.batch * fitted.request_s


def nonnegative_least_squares(rows: Floats, targets: Floats) -> Floats:
    """Minimize |rows @ x - targets| over x >= 0. rows: [points, columns]. targets: [points]. Returns x: [columns].

    It equals the plain least-squares solution on the columns where it is positive (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23). With few columns, this tries all subsets of them.
    """
    columns = rows.shape[1]
    # Columns differ by many orders of magnitude: tokens and their squares.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best: Floats = np.zeros(columns)
    least = float(np.linalg.norm(targets))
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            found = np.linalg.lstsq(scaled[:, chosen], targets, rcond=None)[0]
            residual = float(np.linalg.norm(scaled[:, chosen] @ found - targets))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(columns), residual
                best[list(chosen)] = found
    solution: Floats = best / scale
    return solution


def _fit(rows: Sequence[tuple[float, ...]], measured_s: Sequence[float]) -> tuple[list[float], FitError]:
    assert len(rows) >= COEFFICIENTS + 2, f"{len(rows)} points are too few"
    features, targets = np.array(rows, np.float64), np.array(measured_s, np.float64)
    relative, ones = features / targets[:, None], np.ones(len(targets))
    # Interleaved, so each fold has points of all sizes.
    fold = np.arange(len(targets)) % min(FOLDS, len(targets))
    errors = np.zeros(len(targets))
    for left_out in np.unique(fold):
        seen = fold != left_out
        coefficients = nonnegative_least_squares(relative[seen], ones[seen])
        errors[~seen] = np.abs(relative[~seen] @ coefficients - 1.0)
    fitted: list[float] = nonnegative_least_squares(relative, ones).tolist()
    return fitted, FitError(mean=float(errors.mean()), largest=float(errors.max()))
