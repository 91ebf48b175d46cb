"""Chooses and calls length predictors: those in the cluster, or the one in the settings. Refuses invalid responses."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.length import TokenRange
from kaveri.errors import KaveriError
from kaveri.policy.prediction import PredictorHealth, PredictorStatus, choose_predictor
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceStub
from kaveri.wire.status import error_of

_LONGEST_ANSWER_TOKENS = 2**24
"""Longer than any model's context."""
_PROBABILITY_SLACK = 0.01
"""Sums of float32 are not exact."""


class UnusableAnswer(KaveriError):
    """A predictor's response is not a valid length prediction."""


class Predictors:
    """Chooses and calls length predictors; keeps their health, in which callers record outcomes. Not thread-safe."""

    def __init__(self, store: ClusterStore, model: str, address: str, rng: random.Random) -> None:
        """model: its name in the cluster. address: the predictor to ask, "host:port"; empty: any that is ready."""
        self._store = store
        self._model = model
        self._address = address
        self._rng = rng
        self._channels = Channels()
        self._health: dict[str, PredictorHealth] = {}

    async def close(self) -> None:
        """Close all channels to predictors, which ends pending calls."""
        await self._channels.close()

    def choose(self, now_s: float) -> tuple[PredictorStatus, PredictorHealth] | None:
        """Choose a predictor to ask; None if there is none, or all pause after failures. now_s: time.monotonic()."""
        known = self._known()
        present = {status.name for status in known}
        for name in [name for name in self._health if name not in present]:
            if self._health.pop(name).left():
                get_logger().warning("predictor_left", predictor=name)
        self._channels.retain({status.address: status.incarnation for status in known})
        candidates = []
        for status in known:
            health = self._health.setdefault(status.name, PredictorHealth())
            health.reborn(status.incarnation)
            if health.may_be_asked(now_s):
                candidates.append(replace(status, waiting_prompts=status.waiting_prompts + health.outstanding_prompts))
        chosen = choose_predictor(candidates, self._rng)
        return (chosen, self._health[chosen.name]) if chosen is not None else None

    async def predict(
        self, predictor: PredictorStatus, prompts: Sequence[Sequence[int]], timeout_s: float
    ) -> list[TokenRange]:
        """Ask a predictor for the length of each prompt's whole answer. prompts: token ids of the served model. Raises
        the error that the predictor returns, Unavailable or DeadlineExceeded without a response, UnusableAnswer if
        invalid. Cancellation ends the call at the predictor too."""
        message = predictor_pb2.PredictRequest(
            model=self._model, prompts=[predictor_pb2.PromptTokens(token_ids=prompt) for prompt in prompts]
        )
        with self._channels.calling(LengthPredictorServiceStub, predictor.address) as stub:
            try:
                response = await stub.Predict(message, timeout=timeout_s)
            except aio.AioRpcError as error:
                raise error_of(error, peer=predictor.address) from error
        return read_predictions(response, len(prompts))

    def _known(self) -> list[PredictorStatus]:
        if self._address:
            return [PredictorStatus(self._address, 0, self._address, 0)]
        return [
            PredictorStatus(
                status.record.instance_id,
                status.record.incarnation,
                status.record.address,
                status.load.waiting_requests,
            )
            for status in self._store.view().ready_predictors(self._model)
        ]


def read_predictions(response: predictor_pb2.PredictResponse, prompt_count: int) -> list[TokenRange]:
    """Return the predicted ranges in the order of the prompts. Raises UnusableAnswer if the response is invalid."""
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
