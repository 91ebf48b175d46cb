import pytest

from kaveri.domain.length import TokenRange
from kaveri.predictor.accuracy import measure_accuracy
from kaveri.predictor.buckets import bucket_of, merge_buckets, range_of

# Four buckets of 100 tokens; the last is open.
PREDICTED = [
    [0.75, 0.25, 0.0, 0.0],  # names 0
    [0.25, 0.35, 0.30, 0.10],  # names 1, at 200: bucket 0 with 0.6
    [0.05, 0.40, 0.30, 0.25],  # names 1, at 200: bucket 1 with 0.55
    [0.0, 0.0, 0.05, 0.95],  # names 3
]
ANSWERS = [99, 100, 250, 7000]  # buckets 0, 1, 2 and 3; at 200: 0, 0, 1 and 1


def test_accuracy_baseline_and_neighbours() -> None:
    measured = measure_accuracy(PREDICTED, ANSWERS, 100)
    assert (measured.granularity, measured.bucket_count, measured.count) == (100, 4, 4)
    assert measured.accuracy == 0.75
    assert measured.majority == 0.25
    assert measured.within_one == 1.0


def test_wider_buckets_add_up_their_neighbours() -> None:
    measured = measure_accuracy(PREDICTED, ANSWERS, 100, factor=2)
    assert (measured.granularity, measured.bucket_count) == (200, 2)
    # The third names bucket 1 of 100 tokens, but more of its probability lies in [200, 400).
    assert measured.accuracy == 1.0
    assert measured.majority == 0.5
    assert measured.calibration_error == pytest.approx((0.0 + 0.4 + 0.45 + 0.0) / 4)


def test_calibration_by_hand() -> None:
    measured = measure_accuracy(PREDICTED, ANSWERS, 100)
    filled = {
        (entry.low, entry.count, round(entry.confidence, 9), entry.accuracy) for entry in measured.bins if entry.count
    }
    assert filled == {(0.3, 1, 0.35, 1.0), (0.4, 1, 0.4, 0.0), (0.7, 1, 0.75, 1.0), (0.9, 1, 0.95, 1.0)}
    assert measured.calibration_error == pytest.approx((0.65 + 0.4 + 0.25 + 0.05) / 4)


def test_a_wrong_guess_two_buckets_off_is_not_within_one() -> None:
    measured = measure_accuracy([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [250, 150], 100)
    assert (measured.accuracy, measured.within_one, measured.majority) == (0.0, 0.5, 0.5)
    assert measured.bins[9].count == 2, "a probability of 1 belongs to the last bin"


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="no predictions"):
        measure_accuracy([], [], 100)


def test_the_last_bucket_is_open_and_its_range_ends_after_the_longest_answer() -> None:
    assert [bucket_of(tokens, 100, 3) for tokens in (0, 99, 100, 200, 299, 300, 9999)] == [0, 0, 1, 2, 2, 2, 2]
    assert range_of(1, 100, 3, 642) == TokenRange(100, 200)
    assert range_of(2, 100, 3, 642) == TokenRange(200, 643)
    assert range_of(2, 100, 3, 250) == TokenRange(200, 300)
    with pytest.raises(IndexError):
        range_of(3, 100, 3, 250)


def test_an_odd_number_of_buckets_merges_into_a_narrower_last_one() -> None:
    assert merge_buckets([0.5, 0.25, 0.25], 2) == [0.75, 0.25]
