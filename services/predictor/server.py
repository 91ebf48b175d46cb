"""Serves LengthPredictorService over gRPC: validates requests and converts between messages and domain values."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc import aio

from kaveri.domain.view import InstanceLoad
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, ModelNotFound, Unavailable
from kaveri.predictor.bundle import cut_prompt
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceServicer
from kaveri.wire.messages import length_to_proto
from kaveri.wire.status import abort
from services.predictor.batcher import LengthModel, PredictionBatcher
from services.predictor.metrics import PredictorMetrics

SERVICE_NAME = predictor_pb2.DESCRIPTOR.services_by_name["LengthPredictorService"].full_name

_LONGEST_CALL_S = 30.0
"""Max duration of a call, even with a later deadline: later predictions are useless."""


class PredictorServer(LengthPredictorServiceServicer):
    """Validates calls and passes prompts to a batcher. Also reports load to, and is drained by, the service host."""

    def __init__(
        self,
        model: LengthModel,
        model_name: str,
        batcher: PredictionBatcher,
        max_call_prompts: int,
        metrics: PredictorMetrics,
    ) -> None:
        """model_name: served name of the model whose answers are predicted."""
        self._model = model
        self._model_name = model_name
        self._batcher = batcher
        self._max_call_prompts = max_call_prompts
        self._metrics = metrics
        self._draining = False

    async def run(self) -> None:
        await self._batcher.run()

    def load(self) -> InstanceLoad:
        """Return the current load, counted in prompts."""
        return InstanceLoad(
            waiting_requests=self._batcher.waiting_count, running_requests=self._batcher.computing_count
        )

    def drain(self) -> None:
        self._draining = True

    def undrain(self) -> None:
        self._draining = False

    async def wait_idle(self) -> None:
        await self._batcher.wait_idle()

    def fail_all(self, reason: str) -> None:
        """Do nothing: the end of the gRPC server cancels the remaining calls."""

    async def Predict(  # noqa: N802
        self, request: predictor_pb2.PredictRequest, context: aio.ServicerContext[Any, Any]
    ) -> predictor_pb2.PredictResponse:
        try:
            return await self._predict(request, context.time_remaining())
        except KaveriError as error:
            await abort(context, error)

    async def _predict(
        self, request: predictor_pb2.PredictRequest, remaining_s: float | None
    ) -> predictor_pb2.PredictResponse:
        if self._draining:
            raise Unavailable("the predictor is draining", retry_after_s=1.0)
        if request.model != self._model_name:
            raise ModelNotFound(request.model, (self._model_name,))
        prompts = [tuple(prompt.token_ids) for prompt in request.prompts]
        self._check(prompts)
        limit = self._model.max_prompt_tokens
        truncated = [len(prompt) > limit for prompt in prompts]
        self._metrics.truncated.inc(sum(truncated))
        try:
            # gRPC also cancels this coroutine after the deadline, but later.
            async with asyncio.timeout(min(_LONGEST_CALL_S if remaining_s is None else remaining_s, _LONGEST_CALL_S)):
                # Truncate before queueing, so the unread tail is not kept in memory.
                rows = await self._batcher.predict([cut_prompt(prompt, limit) for prompt in prompts])
        except TimeoutError as error:
            raise DeadlineExceeded("the prediction") from error
        return predictor_pb2.PredictResponse(
            predictions=[self._prediction(row, cut) for row, cut in zip(rows, truncated, strict=True)],
            granularity=self._model.granularity,
            version=self._model.version,
        )

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if not 0 < len(prompts) <= self._max_call_prompts:
            raise InvalidArgument("prompts", f"{len(prompts)} prompts", f"1 to {self._max_call_prompts} prompts")
        vocab_size = self._model.vocab_size
        for place, prompt in enumerate(prompts):
            field = f"prompts[{place}].token_ids"
            if not prompt:
                raise InvalidArgument(field, "empty", "at least one token")
            if max(prompt) >= vocab_size:
                raise InvalidArgument(field, max(prompt), f"ids below {vocab_size}")

    def _prediction(self, probabilities: Sequence[float], truncated: bool) -> predictor_pb2.LengthPrediction:
        bucket = max(range(len(probabilities)), key=probabilities.__getitem__)
        return predictor_pb2.LengthPrediction(
            length=length_to_proto(self._model.range_of(bucket)),
            bucket=bucket,
            probabilities=probabilities,
            truncated=truncated,
        )
