"""The SDK's one implementation: calls InferenceService and returns the SDK's own values and errors."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from grpc import aio

from kaveri.client.answer import Completion, ModelInfo
from kaveri.client.async_stream import AsyncStream
from kaveri.client.forks import check_not_forked, is_forked, note_connected
from kaveri.client.request import (
    MessageLike,
    build_request,
    check_name,
    check_request_id,
    check_target,
    check_timeout,
)
from kaveri.domain.sampling import SamplingParams
from kaveri.rpc.server import open_channel
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from kaveri.wire.status import error_of

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
"""Longer than any answer that a person waits for, but finite, so no request stays forever."""

ResponseT = TypeVar("ResponseT")


class AsyncClient:
    """Talks to one router, from one event loop.

    Raises only KaveriErrors. Expect InvalidArgument, ModelNotFound, RequestAlreadyExists, NoCapacity (with
    retry_after_s), Unavailable, DeadlineExceeded and RequestCancelled. Cancelling a task that waits here cancels its
    request everywhere.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """target: a router's "host:port". timeout_s: the default deadline of calls; None: no limit.

        Connects at the first call, and can only be used in that call's event loop from then on. Raises InvalidArgument.
        A process forked after a client has connected cannot use any client; calls raise RuntimeError.
        """
        check_timeout(timeout_s)
        self.target = check_target(target)
        self._timeout_s = timeout_s
        self._channel: aio.Channel | None = None
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        params: SamplingParams | None = None,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Returns the whole answer. Arguments as for stream()."""
        stream = self.stream(
            prompt,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            params=params,
            model=model,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        async with stream:
            return await stream.collect()

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        params: SamplingParams | None = None,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Sends the request and immediately returns the stream of its answer; AsyncStream says how it ends.

        prompt, prompt_token_ids, messages: exactly one of them. Text is tokenized unchanged; messages use the model's
        chat template.
        params: how to draw tokens and when to stop. None: SamplingParams().
        model: None for the router's only model.
        request_id: the caller's own id and idempotency key, at most 128 bytes. None: a random id.
        timeout_s: the request's deadline. None: the client's default.
        """
        started_s = time.monotonic()
        check_timeout(timeout_s)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        request = build_request(prompt, prompt_token_ids, messages, params, model, request_id)
        call = self._connect().Generate(request, timeout=self._deadline_s(timeout_s))
        return AsyncStream(call, request_id, self.target, started_s)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancels a request by its id, also one of another client; its stream ends with FinishReason.CANCELLED.

        False: the router has no such request in flight.
        """
        request = inference_pb2.CancelRequest(request_id=check_request_id(request_id))
        response = await self._answer(self._connect().Cancel(request, timeout=self._checked_deadline_s(timeout_s)))
        return response.found

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Returns all models of the cluster."""
        request = inference_pb2.ListModelsRequest()
        response = await self._answer(self._connect().ListModels(request, timeout=self._checked_deadline_s(timeout_s)))
        return [_model_info(model) for model in response.models]

    async def get_model(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Returns one model. Raises ModelNotFound."""
        request = inference_pb2.GetModelRequest(model=check_name("name", name))
        response = await self._answer(self._connect().GetModel(request, timeout=self._checked_deadline_s(timeout_s)))
        return _model_info(response.model)

    async def close(self) -> None:
        """Cancels requests in flight and disconnects. Idempotent. Does nothing in a forked child."""
        self._closed = True
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None and not is_forked():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _connect(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        if self._closed:
            raise RuntimeError("this AsyncClient is closed")
        check_not_forked()
        loop = asyncio.get_running_loop()
        if self._stub is None:
            # Not in the constructor: a channel belongs to the loop in which it is created.
            self._loop = loop
            self._channel = open_channel(self.target)
            note_connected()
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        elif self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one per loop")
        return self._stub

    async def _answer(self, call: Awaitable[ResponseT]) -> ResponseT:
        try:
            return await call
        except aio.AioRpcError as error:
            raise error_of(error, peer=self.target) from error

    def _checked_deadline_s(self, timeout_s: float | None) -> float | None:
        check_timeout(timeout_s)
        return self._deadline_s(timeout_s)

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return None if limit_s is None else float(limit_s)


def _model_info(message: inference_pb2.Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        ready=message.ready,
    )
