"""Invalid responses of predictors are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from kaveri.domain.length import TokenRange
from kaveri.v1 import predictor_pb2
from services.prefill.predictors import UnusableAnswer, read_predictions

Predicted = Callable[..., predictor_pb2.LengthPrediction]


def response(*predictions: predictor_pb2.LengthPrediction, granularity: int = 100) -> predictor_pb2.PredictResponse:
    return predictor_pb2.PredictResponse(predictions=predictions, granularity=granularity)


def test_sound_answers_become_ranges_in_their_order(predicted: Predicted) -> None:
    found = read_predictions(response(predicted(3), predicted(0)), 2)
    assert found == [TokenRange(300, 400), TokenRange(0, 100)]


def with_(message: predictor_pb2.LengthPrediction, **changes: Any) -> predictor_pb2.LengthPrediction:
    for name, value in changes.items():
        if name == "probabilities":
            del message.probabilities[:]
            message.probabilities.extend(value)
        elif name == "length":
            message.length.low, message.length.high = value
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_predictions_is_garbage(predicted: Predicted, count: int) -> None:
    with pytest.raises(UnusableAnswer, match="for 2 prompts"):
        read_predictions(response(*(predicted(1) for _ in range(count))), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": (300, 300)},
        {"length": (400, 300)},
        {"length": (300, 4_000_000_000)},
        {"length": (250, 400)},
        {"bucket": 2},
        {"bucket": 8, "length": (800, 900)},
        {"probabilities": []},
        {"probabilities": [float("nan")] * 8},
        {"probabilities": [float("inf"), *[0.0] * 7]},
        {"probabilities": [2.0, -1.0, *[0.0] * 6]},
        {"probabilities": [0.5] * 8},
    ],
    ids=" ".join,
)
def test_a_prediction_that_cannot_be_is_garbage(predicted: Predicted, changes: dict[str, Any]) -> None:
    with pytest.raises(UnusableAnswer):
        read_predictions(response(with_(predicted(3), **changes)), 1)


def test_an_answer_without_a_granularity_is_garbage(predicted: Predicted) -> None:
    with pytest.raises(UnusableAnswer):
        read_predictions(response(predicted(0), granularity=0), 1)
