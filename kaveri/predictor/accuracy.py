"""Quality of length predictions: accuracy against the majority class, within one bucket, calibration. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.predictor.buckets import bucket_of, merge_buckets

CALIBRATION_BINS = 10


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """Calibration of predictions whose most probable bucket has a probability in [low, high); the last includes 1."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean probability of the most probable buckets; 0 for an empty bin."""
    accuracy: float
    """Share of correct predictions; 0 for an empty bin."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    granularity: int
    bucket_count: int
    count: int
    """Number of prompts."""
    accuracy: float
    """Share of prompts whose answer falls into the most probable bucket."""
    majority: float
    """Accuracy of a baseline that always predicts the most frequent bucket."""
    within_one: float
    """Share whose answer falls into the most probable bucket or a neighbour."""
    calibration_error: float
    """Expected calibration error (Guo et al., arXiv 1706.04599, section 2): mean |accuracy - confidence| over bins."""
    bins: tuple[CalibrationBin, ...]


def measure_accuracy(
    probabilities: Sequence[Sequence[float]], output_tokens: Sequence[int], granularity: int, factor: int = 1
) -> Accuracy:
    """Compare predicted with real answer lengths. probabilities: per answer, of each bucket of `granularity` tokens.
    output_tokens: real lengths. factor: merge so many neighbouring buckets first. Raises ValueError if empty."""
    if not probabilities:
        raise ValueError("no predictions to measure")
    bucket_count = len(probabilities[0])
    rows = [merge_buckets(row, factor) for row in probabilities]
    truth = [bucket_of(tokens, granularity, bucket_count) // factor for tokens in output_tokens]
    named = [max(range(len(row)), key=row.__getitem__) for row in rows]
    pairs = list(zip(named, truth, strict=True))
    count = len(pairs)
    right = [guess == bucket for guess, bucket in pairs]
    bins = _calibration([row[guess] for row, guess in zip(rows, named, strict=True)], right)
    return Accuracy(
        granularity=granularity * factor,
        bucket_count=len(rows[0]),
        count=count,
        accuracy=sum(right) / count,
        majority=max(Counter(truth).values()) / count,
        within_one=sum(abs(guess - bucket) <= 1 for guess, bucket in pairs) / count,
        calibration_error=sum(entry.count * abs(entry.accuracy - entry.confidence) for entry in bins) / count,
        bins=bins,
    )


def _calibration(confidences: Sequence[float], right: Sequence[bool]) -> tuple[CalibrationBin, ...]:
    bins = []
    for place in range(CALIBRATION_BINS):
        inside = [
            (confidence, hit)
            for confidence, hit in zip(confidences, right, strict=True)
            if min(int(confidence * CALIBRATION_BINS), CALIBRATION_BINS - 1) == place
        ]
        bins.append(
            CalibrationBin(
                low=place / CALIBRATION_BINS,
                high=(place + 1) / CALIBRATION_BINS,
                count=len(inside),
                confidence=sum(confidence for confidence, _ in inside) / len(inside) if inside else 0.0,
                accuracy=sum(hit for _, hit in inside) / len(inside) if inside else 0.0,
            )
        )
    return tuple(bins)
