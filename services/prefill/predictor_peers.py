"""Asks predictor instances for lengths and refuses impossible answers."""

import math
from collections.abc import Sequence

from grpc import aio

from kaveri.domain.length import TokenRange
from kaveri.errors import KaveriError
from kaveri.rpc.channels import Channels
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceStub
from kaveri.wire.status import error_of

_LONGEST_ANSWER_TOKENS = 2**24
"""No model's context is as long."""
_PROBABILITY_SLACK = 0.01
"""Sums of float32 are not exact."""


class UnusableAnswer(KaveriError):
    """A predictor's answer is not a possible prediction."""


class PredictorPeers:
    """The predictors that one prefill instance asks."""

    def __init__(self, model: str) -> None:
        """model: the name of the model whose answers are asked about."""
        self._model = model
        self.channels = Channels()

    async def predict(self, address: str, prompts: Sequence[Sequence[int]], timeout_s: float) -> list[TokenRange]:
        """The predicted length of each prompt's whole answer. prompts: token ids of the served model.

        Raises the error that the predictor answers, Unavailable or DeadlineExceeded without an answer, UnusableAnswer.
        Cancellation ends the call at the predictor too.
        """
        message = predictor_pb2.PredictRequest(
            model=self._model, prompts=[predictor_pb2.PromptTokens(token_ids=prompt) for prompt in prompts]
        )
        with self.channels.calling(LengthPredictorServiceStub, address) as stub:
            try:
                response = await stub.Predict(message, timeout=timeout_s)
            except aio.AioRpcError as error:
                raise error_of(error, peer=address) from error
        return read_predictions(response, len(prompts))


def read_predictions(response: predictor_pb2.PredictResponse, prompt_count: int) -> list[TokenRange]:
    """The predicted ranges, in the order of the prompts. Raises UnusableAnswer, which says what is wrong."""
    if len(response.predictions) != prompt_count:
        raise UnusableAnswer(f"{len(response.predictions)} predictions for {prompt_count} prompts")
    return [_read(prediction, response.granularity) for prediction in response.predictions]


def _read(prediction: predictor_pb2.LengthPrediction, granularity: int) -> TokenRange:
    low, high, bucket = prediction.length.low, prediction.length.high, prediction.bucket
    if not low < high <= _LONGEST_ANSWER_TOKENS:
        raise UnusableAnswer(f"[{low}, {high}) is no range of tokens")
    if not granularity or low != granularity * bucket:
        raise UnusableAnswer(f"bucket {bucket} of {granularity} tokens does not begin at {low}")
    probabilities = prediction.probabilities
    if bucket >= len(probabilities):
        raise UnusableAnswer(f"bucket {bucket} of {len(probabilities)}")
    total = sum(probabilities)
    if not (math.isfinite(total) and min(probabilities) >= 0 and abs(total - 1) <= _PROBABILITY_SLACK):
        raise UnusableAnswer(f"probabilities that sum to {total:g}")
    return TokenRange(low, high)
