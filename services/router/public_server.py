"""The router's port for clients with API keys: checks the key and its limits, and separates the requests of keys."""

import contextlib
from collections.abc import AsyncIterator

from kaveri.errors import InvalidArgument, KaveriError, Unauthenticated
from kaveri.rpc.public_port import authorization_of
from kaveri.security.api_keys import ApiKey
from kaveri.security.callers import Caller, Callers
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES
from kaveri.wire.status import abort, status_of
from services.router import metrics
from services.router.relay import ServicerContext
from services.router.server import GenerateProgress, InferenceServicer, new_request_id


class PublicServicer(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService for clients with API keys. Request ids get the key's name as prefix, so that no key can name
    another one's requests. Cancel and Beat are exempt from the key's limits."""

    def __init__(self, inner: InferenceServicer, callers: Callers) -> None:
        self.callers = callers
        self._inner = inner

    # A coroutine that writes, for the same reason as in InferenceServicer.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: ServicerContext
    ) -> None:
        async with self._admitted(context, request.request_id) as caller:
            if request.request_id:
                request.request_id = await _named(caller.key, request.request_id, context)
            request_id = request.request_id or f"{caller.key.name}/{new_request_id()}"
            progress = GenerateProgress(request_id, caller.key.name)
            try:
                await self._inner.Generate(request, context, progress)
            finally:
                caller.tokens = progress.tokens

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: ServicerContext
    ) -> inference_pb2.CancelResponse:
        try:
            key = self.callers.find(authorization_of(context.invocation_metadata()))
        except Unauthenticated as error:
            await abort(context, error)
        request_id = await _named(key, request.request_id, context)
        return await self._inner.Cancel(inference_pb2.CancelRequest(request_id=request_id), context)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with self._admitted(context):
            return await self._inner.ListModels(request, context)

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: ServicerContext
    ) -> inference_pb2.GetModelResponse:
        async with self._admitted(context):
            return await self._inner.GetModel(request, context)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with self._admitted(context) as caller:
            return await self._inner.Tokenize(request, context, caller.key.name)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        async with self._admitted(context) as caller:
            return await self._inner.Detokenize(request, context, caller.key.name)

    async def Beat(  # noqa: N802
        self, request: inference_pb2.BeatRequest, context: ServicerContext
    ) -> inference_pb2.BeatResponse:
        return await self._inner.Beat(request, context)

    @contextlib.asynccontextmanager
    async def _admitted(self, context: ServicerContext, request_id: str = "") -> AsyncIterator[Caller]:
        async with contextlib.AsyncExitStack() as stack:
            authorization = authorization_of(context.invocation_metadata())
            try:
                caller = await stack.enter_async_context(self.callers.admit(authorization, request_id))
            except KaveriError as error:
                metrics.REQUESTS.labels(outcome=status_of(error)[0].name.lower()).inc()
                await abort(context, error)
            yield caller


async def _named(key: ApiKey, request_id: str, context: ServicerContext) -> str:
    """Prefix a request id with its key's name. Aborts the call if the result is too long."""
    prefix = f"{key.name}/"
    if request_id.startswith(prefix):
        # Responses name it so.
        return request_id
    limit_bytes = MAX_REQUEST_ID_BYTES - len(prefix)
    if len(request_id.encode()) > limit_bytes:
        limit = f"at most {limit_bytes} bytes long with this API key, whose name stands before it"
        await abort(context, InvalidArgument("request_id", f"{len(request_id.encode())} bytes long", limit))
    return prefix + request_id
