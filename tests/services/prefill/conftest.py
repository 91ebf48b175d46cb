"""Predictor with scripted responses, over real gRPC, in the view of the test's cluster."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from grpc import aio

from kaveri.cluster.memory_store import MemoryStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, Role
from kaveri.errors import ModelNotFound
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import (
    LengthPredictorServiceServicer,
    add_LengthPredictorServiceServicer_to_server,
)
from kaveri.wire.status import abort
from tests.support.scripted_ports import add_port

Answer = Callable[[predictor_pb2.PredictRequest], Awaitable[predictor_pb2.PredictResponse]]


def prediction(bucket: int, granularity: int = 100, bucket_count: int = 8) -> predictor_pb2.LengthPrediction:
    return predictor_pb2.LengthPrediction(
        length=predictor_pb2.PredictedLength(low=granularity * bucket, high=granularity * (bucket + 1)),
        bucket=bucket,
        probabilities=[float(number == bucket) for number in range(bucket_count)],
    )


class ScriptedPredictor(LengthPredictorServiceServicer):
    """Predictor; `answer` handles each call."""

    def __init__(self, name: str, store: MemoryStore, model: str) -> None:
        self.name = name
        self._store = store
        self._model = model
        self._server: aio.Server | None = None
        self._record: InstanceRecord | None = None
        self.calls: list[predictor_pb2.PredictRequest] = []
        self.cancelled = 0
        self.held = asyncio.Event()
        self.answer: Answer = self.bucket(3)
        self.address = ""

    @property
    def prompts(self) -> list[list[int]]:
        return [list(prompt.token_ids) for call in self.calls for prompt in call.prompts]

    def bucket(self, number: int) -> Answer:
        async def answer(request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
            predictions = [prediction(number) for _ in request.prompts]
            return predictor_pb2.PredictResponse(predictions=predictions, granularity=100, version="v1")

        return answer

    def hold(self, then: Answer) -> Answer:
        """Wait for `held`, then answer."""

        async def answer(request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
            await self.held.wait()
            return await then(request)

        return answer

    def always(self, response: predictor_pb2.PredictResponse) -> Answer:
        async def answer(request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
            return response

        return answer

    async def Predict(self, request: Any, context: aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        self.calls.append(request)
        if request.model != self._model:
            await abort(context, ModelNotFound(request.model, (self._model,)))
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def start(self, *, registered: bool = True) -> None:
        """Serve on the same port as before, and join the cluster's view in a new incarnation."""
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        add_LengthPredictorServiceServicer_to_server(self, self._server)
        port = add_port(self._server, self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        if registered:
            self._record = InstanceRecord(
                self.name, secrets.randbits(63), Role.PREDICTOR, self.address, "fake", lease_ttl_s=3600.0
            )
            await self._store.heartbeat(self._record, InstanceLoad(sequence_number=1))

    async def die(self) -> None:
        """Break the connections, but keep the lease."""
        assert self._server is not None
        await self._server.stop(0)

    async def leave(self) -> None:
        assert self._record is not None
        await self._store.deregister(self._record)


@pytest.fixture
async def new_predictor(cluster: Any) -> AsyncIterator[Callable[..., Awaitable[ScriptedPredictor]]]:
    predictors: list[ScriptedPredictor] = []

    async def start(name: str = "predictor-0", model: str = "fake", *, registered: bool = True) -> ScriptedPredictor:
        predictor = ScriptedPredictor(name, await cluster.store(), model)
        predictors.append(predictor)
        await predictor.start(registered=registered)
        return predictor

    yield start
    for predictor in predictors:
        predictor.held.set()
        await predictor.die()


@pytest.fixture
def predicted() -> Callable[..., predictor_pb2.LengthPrediction]:
    return prediction
