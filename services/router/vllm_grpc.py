"""Serves vLLM's gRPC API, `vllm.grpc.engine.VllmEngine` of smg-grpc-proto: the cluster looks like one worker.

Requests are those of InferenceService. Imported with --vllm-grpc only, as the package is an extra."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NoReturn, cast

import grpc
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2

from kaveri.domain.sampling import FinishReason
from kaveri.domain.view import ClusterView, Phase
from kaveri.errors import InvalidArgument, KaveriError, RequestAlreadyExists, SlowReader, Unsupported
from kaveri.hosting.read_limit import read_limit
from kaveri.hosting.vllm_grpc import (
    SERVICE_NAME,
    AnswerMessages,
    VllmAsked,
    model_info,
    read_abort,
    read_generate,
    register,
    renamed,
    scheduler_load,
    tokenizer_chunks,
)
from kaveri.policy.placement import largest_prompt, max_model_len, missing_phases
from kaveri.text.model_files import ModelFiles, read_model_files
from kaveri.v1 import inference_pb2
from kaveri.wire.messages import FINISH_FROM_PROTO
from kaveri.wire.status import abort, error_of, status_of
from services.router import metrics
from services.router.relay import ServicerContext
from services.router.server import GenerateProgress, InferenceServicer, RouterParts, new_request_id


class _AnswerFailed(Exception):
    """Carries the error of one answer of a call."""

    def __init__(self, error: KaveriError) -> None:
        super().__init__(error)
        self.error = error


class _Writer:
    """Stands in for the gRPC context of one answer of a call, for the router's own InferenceService."""

    def __init__(
        self, context: ServicerContext, turn: asyncio.Lock, asked: VllmAsked, index: int, progress: GenerateProgress
    ) -> None:
        """turn: held while any answer of the call writes a message."""
        self._context = context
        self._turn = turn
        self._progress = progress
        self._messages = AnswerMessages(asked, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: Sequence[Any]) -> None:
        """Do nothing: the call's metadata goes with its first message."""

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        part = self._messages.part(response.token_ids, response.logprobs, response.usage.prompt_tokens)
        if part is not None:
            await self._send(part)
        if response.finish_reason:
            finish, entry = FINISH_FROM_PROTO[response.finish_reason], self._progress.entry
            assert finish is not None
            await self._send(self._messages.complete(finish, entry.answer.stop_text if entry is not None else None))

    async def write_aborted(self) -> None:
        """Write the end of an answer that was aborted before it began."""
        await self._send(self._messages.complete(FinishReason.CANCELLED))

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[Any] = ()) -> NoReturn:
        """Raise the error within the call, whose other answers may still be written."""
        trailing = aio.Metadata(*trailing_metadata)
        raise _AnswerFailed(error_of(aio.AioRpcError(code, aio.Metadata(), trailing, details)))

    async def _send(self, response: Any) -> None:
        async with self._turn:
            await self._context.write(response)


@dataclass(slots=True)
class _SeveralAnswers:
    """A call for `n` answers."""

    n: int
    aborted: bool = False


class VllmEngineServicer:
    """gRPC VllmEngine service with the whole cluster as one engine. Methods that it lacks are UNIMPLEMENTED."""

    service_name = SERVICE_NAME

    def __init__(self, router: RouterParts, inner: InferenceServicer) -> None:
        """inner: the router's own service, which serves the requests."""
        self._router = router
        self._inner = inner
        self._several: dict[str, _SeveralAnswers] = {}
        """Calls for several answers, by request id."""
        self._started_s = time.monotonic()
        self._files: ModelFiles | None = None
        self._reading = asyncio.Lock()

    def register(self, server: aio.Server) -> None:
        register(self, server)

    # A coroutine that writes, for the same reason as in InferenceServicer.
    async def Generate(self, request: Any, context: ServicerContext) -> None:  # noqa: N802
        is_text = request.WhichOneof("input") == "text"
        try:
            asked = read_generate(request)
            in_flight = self._router.table.slot_of(asked.request_id) if asked.n > 1 else None
            if asked.request_id in self._several or in_flight is not None:
                # Abort knows one call of an id. One answer's id is checked with those of InferenceService.
                raise RequestAlreadyExists(asked.request_id)
            if asked.n == 1:
                await self._answer(asked, 0, asked.prompt, _SeveralAnswers(1), asyncio.Lock(), context)
            else:
                await self._answer_several(asked, context)
        except KaveriError as error:
            metrics.REQUESTS.labels(outcome=status_of(error)[0].name.lower()).inc()
            await abort(context, renamed(error, is_text))
        except _AnswerFailed as failed:
            if isinstance(failed.error, SlowReader):
                await self._inner.abort_unread(context, failed.error)
            await abort(context, renamed(failed.error, is_text))

    async def _answer_several(self, asked: VllmAsked, context: ServicerContext) -> None:
        """Write several answers. Raises _AnswerFailed if one of them fails; the others are cancelled."""
        asked = replace(asked, request_id=asked.request_id or new_request_id())
        several = self._several[asked.request_id] = _SeveralAnswers(asked.n)
        turn = asyncio.Lock()
        try:
            # Tokenize once for all answers.
            first = asked.request(0, asked.prompt)
            tokenized, _ = await self._router.intake.tokenize(first, self._inner.until_s(context))
            async with asyncio.TaskGroup() as group:
                for index in range(asked.n):
                    group.create_task(self._answer(asked, index, tokenized.token_ids, several, turn, context))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            del self._several[asked.request_id]

    async def _answer(
        self,
        asked: VllmAsked,
        index: int,
        prompt: str | Sequence[int],
        several: _SeveralAnswers,
        turn: asyncio.Lock,
        context: ServicerContext,
    ) -> None:
        progress = GenerateProgress(asked.name(asked.request_id or new_request_id(), index))
        writer = _Writer(context, turn, asked, index, progress)
        if several.aborted:
            await writer.write_aborted()
        else:
            await self._inner.Generate(asked.request(index, prompt), cast(ServicerContext, writer), progress)

    async def Abort(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        try:
            request_ids = read_abort(request)
        except InvalidArgument as error:
            await abort(context, error)
        for request_id in request_ids:
            names = [request_id]
            if several := self._several.get(request_id):
                several.aborted = True
                names = [f"{request_id}-{index}" for index in range(several.n)]
            for name in names:
                await self._inner.Cancel(inference_pb2.CancelRequest(request_id=name), context)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        missing = missing_phases(self._router.store.view(), self._router.config.model_name)
        message = f"no {missing[0]} instance is ready" if missing else ""
        if self._router.draining:
            message = "this router is draining"
        return vllm_engine_pb2.HealthCheckResponse(healthy=not message, message=message)

    async def GetModelInfo(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        router, name = self._router, self._router.config.model_name
        try:
            view = await router.placer.wait_for_instances(self._inner.until_s(context))
        except KaveriError as error:
            await abort(context, error)
        files = await self._model_files()
        limit, largest = max_model_len(view, name), largest_prompt(view, name)
        longest = min(limit - 1, limit if largest is None else largest)
        vocab_size, defaults = router.intake.tokenizer.vocab_size, router.intake.defaults.params
        return model_info(router.config.model, name, limit, longest, vocab_size, files, defaults)

    async def GetServerInfo(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=len(self._router.table),
            is_paused=self._router.draining,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        if request.dp_rank:
            await abort(context, InvalidArgument("dp_rank", request.dp_rank, "0, or left out: the cluster is one rank"))
        loads = [cluster_load(self._router.store.view(), self._router.config.model_name)]
        return vllm_engine_pb2.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=1, loads=loads)

    async def GetTokenizer(self, request: Any, context: ServicerContext) -> None:  # noqa: N802
        files = await self._model_files()
        try:
            async with read_limit(self._router.config.slow_reader_s) as writes:
                for chunk in tokenizer_chunks(files):
                    writes.ticks = 0
                    await context.write(chunk)
                    writes.ticks = None
        except Unsupported as error:
            await abort(context, error)
        except SlowReader as error:
            await self._inner.abort_unread(context, error)

    async def _model_files(self) -> ModelFiles:
        async with self._reading:
            if self._files is None:
                self._files = await asyncio.to_thread(read_model_files, self._router.config.model)
            return self._files


def cluster_load(view: ClusterView, model: str) -> Any:
    """Build the SchedulerLoad over all of the model's instances; used and total tokens are of decode KV pools."""
    instances = [
        instance for instance in view.instances.values() if instance.record.phases and instance.record.model == model
    ]
    running = sum(instance.load.running_requests for instance in instances)
    waiting = sum(instance.load.waiting_requests for instance in instances)
    used_tokens = total_tokens = 0
    for instance in instances:
        if Phase.DECODE in instance.record.phases:
            layout, load = instance.record.layout, instance.load
            block_tokens = 1 if layout is None else layout.block_tokens
            total_tokens += load.total_blocks * block_tokens
            used_tokens += (load.total_blocks - load.free_blocks) * block_tokens
    uncached = sum(instance.load.queued_prefill_tokens for instance in instances)
    return scheduler_load(running, waiting, used_tokens, total_tokens, uncached)
