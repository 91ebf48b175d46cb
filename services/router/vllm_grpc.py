"""The router as one worker of the field's gRPC: `vllm.grpc.engine.VllmEngine` of the package smg-grpc-proto.

Translates messages, and nothing else: requests live as those of InferenceService. Imported with --vllm-grpc only, for
the package is an extra. What Kaveri cannot honour is refused by the field's name, also fields of newer packages.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NoReturn, cast

import grpc
from google.protobuf import message_factory, unknown_fields
from google.protobuf.message import Message
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from kaveri.domain.sampling import MAX_N, FinishReason, SamplingParams, derived_seed
from kaveri.domain.view import ClusterView, Phase
from kaveri.errors import InvalidArgument, KaveriError, RequestAlreadyExists, SlowReader, Unsupported
from kaveri.hosting.read_limit import ReadLimit
from kaveri.policy.placement import largest_prompt, max_model_len, missing_phases
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.v1 import inference_pb2
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES, check_request_id
from kaveri.wire.messages import finish_from_proto, params_to_proto
from kaveri.wire.status import abort, error_of, status_of
from services.router import metrics
from services.router.model_files import ModelFiles, read_model_files
from services.router.relay import ServicerContext
from services.router.server import GenerateProgress, InferenceServicer, RouterParts, new_request_id

_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE_NAME: str = _SERVICE.full_name
MAX_ABORTED = 256
"""Ids that one Abort may name: each is looked for on all routers."""
_CHUNK_BYTES = 64 * 1024
"""Of GetTokenizer: as other servers of this protocol send it."""
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}

Accepts = Callable[[Any], bool]
"""Whether a value of a field changes nothing."""
_HONOURED_PARAMS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "ignore_eos",
        "n",
        "logprobs",
        "seed",
    }
)
_HARMLESS_PARAMS: Mapping[str, Accepts] = {
    "repetition_penalty": lambda value: value == 1,
    # Of text alone. Answers are token ids, and those of a stop text are among them.
    "spaces_between_special_tokens": lambda _value: True,
    "include_stop_str_in_output": lambda _value: True,
}
_HONOURED_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
_HARMLESS_FIELDS: Mapping[str, Accepts] = {
    "kv_transfer_params_json": lambda value: value == "",
    # The cluster is one rank.
    "data_parallel_rank": lambda value: value == 0,
}


@dataclass(frozen=True, slots=True)
class VllmAsked:
    """A checked Generate of this protocol."""

    request_id: str
    """Empty: the caller gave none."""
    prompt: str | Sequence[int]
    params: SamplingParams
    n: int
    stream: bool

    def request(self, index: int, prompt: str | Sequence[int]) -> inference_pb2.GenerateRequest:
        """Of one of the answers."""
        request = inference_pb2.GenerateRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        seed = derived_seed(self.params.seed, index)
        request.params.CopyFrom(params_to_proto(replace(self.params, seed=seed)))
        if self.request_id:
            request.request_id = self.name(self.request_id, index)
        return request

    def name(self, request_id: str, index: int) -> str:
        """The id of one of the answers."""
        return request_id if self.n == 1 else f"{request_id}-{index}"


def read_generate(request: Any) -> VllmAsked:
    """request: a GenerateRequest of vllm.grpc.engine. Raises InvalidArgument; see _renamed()."""
    _refuse_rest(request, "", _HONOURED_FIELDS, _HARMLESS_FIELDS)
    prompt: str | Sequence[int]
    match request.WhichOneof("input"):
        case "tokenized":
            _refuse_rest(request.tokenized, "tokenized.", frozenset({"original_text", "input_ids"}), {})
            prompt = request.tokenized.input_ids
        case "text":
            prompt = request.text
        case _:
            raise InvalidArgument("input", None, "given as tokenized or text")
    params, n = _read_params(request.sampling_params)
    check_request_id(request.request_id)
    if n > 1 and len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES - len(f"-{n}"):
        limit = f"at most {MAX_REQUEST_ID_BYTES - len(f'-{n}')} bytes long where n is {n}"
        raise InvalidArgument("request_id", request.request_id, limit)
    return VllmAsked(request.request_id, prompt, params, n, request.stream)


def _read_params(params: Any) -> tuple[SamplingParams, int]:
    _refuse_rest(params, "sampling_params.", _HONOURED_PARAMS, _HARMLESS_PARAMS)
    if params.stop and not params.skip_special_tokens:
        limit = "true where stop is given: stop texts are looked for in text without special tokens"
        raise InvalidArgument("sampling_params.skip_special_tokens", False, limit)
    if params.n > MAX_N:
        raise InvalidArgument("sampling_params.n", params.n, f"at most {MAX_N}")
    sampling = SamplingParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        # 0 is how proto3 says that it is not given.
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )
    return sampling, params.n or 1


def _refuse_rest(message: Message, path: str, honoured: frozenset[str], harmless: Mapping[str, Accepts]) -> None:
    """Raises InvalidArgument for every field that is set, is not honoured, and would change something."""
    for field, value in message.ListFields():
        if field.name in honoured or harmless.get(field.name, lambda _value: False)(value):
            continue
        shown = "set" if field.message_type is not None else value
        raise InvalidArgument(path + field.name, shown, "left out: Kaveri does not support it")
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        limit = "left out: the installed smg-grpc-proto has no such field"
        raise InvalidArgument(f"{path}field {unknown[0].field_number}", "set", limit)


def _renamed(error: KaveriError, is_text: bool = True) -> KaveriError:
    """The error with the field's name in this protocol. is_text: of the prompt."""
    if not isinstance(error, InvalidArgument):
        return error
    prompt = "text" if is_text else "tokenized.input_ids"
    names = {"prompt": prompt, "prompt.text": prompt, "prompt.token_ids": prompt}
    name = names.get(error.field, error.field)
    if name.startswith("params."):
        name = "sampling_" + name
    return InvalidArgument(name, error.value, error.limit)


class _AnswerFailed(Exception):
    """One answer cannot be given."""

    def __init__(self, error: KaveriError) -> None:
        super().__init__(error)
        self.error = error


class _Writer:
    """Stands in for a call's context while the router serves one of the call's answers."""

    def __init__(
        self, context: ServicerContext, turn: asyncio.Lock, asked: VllmAsked, index: int, progress: GenerateProgress
    ) -> None:
        """turn: held while a message of any of the call's answers is written."""
        self._context = context
        self._turn = turn
        self._asked = asked
        self._index = index
        self._progress = progress
        self._prompt_tokens = 0
        self._last = vllm_engine_pb2.GenerateComplete(index=index)
        """What the last message says. In a stream its tokens are those of the last chunk, as vLLM has it."""

    def __getattr__(self, name: str) -> Any:
        """All else is the call's own."""
        return getattr(self._context, name)

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes a part of the router's answer."""
        self._prompt_tokens = self._prompt_tokens or response.usage.prompt_tokens
        logprobs = _report(response, self._asked.params.logprobs)
        if self._asked.stream:
            if response.token_ids:
                chunk = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=response.token_ids,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=len(response.token_ids),
                    output_logprobs=logprobs,
                    index=self._index,
                )
                await self._send(vllm_engine_pb2.GenerateResponse(chunk=chunk))
            self._last.ClearField("output_ids")
            self._last.ClearField("output_logprobs")
        self._last.output_ids.extend(response.token_ids)
        if logprobs is not None:
            self._last.output_logprobs.MergeFrom(logprobs)
        if response.finish_reason:
            await self._finish(response)

    async def write_aborted(self) -> None:
        """Ends the answer before it has begun."""
        self._last.finish_reason = _FINISH_REASONS[FinishReason.CANCELLED]
        await self._send(vllm_engine_pb2.GenerateResponse(complete=self._last))

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[Any] = ()) -> NoReturn:
        """Leaves the end of the call to who began it: other answers of the call may still be written."""
        trailing = aio.Metadata(*trailing_metadata)
        raise _AnswerFailed(error_of(aio.AioRpcError(code, aio.Metadata(), trailing, details)))

    async def _finish(self, response: inference_pb2.GenerateResponse) -> None:
        finish = finish_from_proto(response.finish_reason)
        assert finish is not None
        last = self._last
        last.finish_reason = _FINISH_REASONS[finish]
        last.prompt_tokens = self._prompt_tokens
        last.completion_tokens = len(last.output_ids)
        entry = self._progress.entry
        if entry is not None and finish is FinishReason.STOP:
            token_ids, stop_text = entry.answer.token_ids, entry.answer.stop_text
            if stop_text is not None:
                last.matched_stop_str = stop_text
            elif token_ids and token_ids[-1] in self._asked.params.stop_token_ids:
                last.matched_token_id = token_ids[-1]
        if last.ByteSize() > MAX_MESSAGE_BYTES:
            limit = f"true, or logprobs or max_tokens less: the whole answer has more than {MAX_MESSAGE_BYTES} bytes"
            raise InvalidArgument("stream", False, limit)
        await self._send(vllm_engine_pb2.GenerateResponse(complete=last))

    async def _send(self, response: Any) -> None:
        async with self._turn:
            await self._context.write(response)


def _report(response: inference_pb2.GenerateResponse, top_count: int | None) -> Any:
    """The log-probabilities of a part of an answer; None: none were asked for."""
    if not response.logprobs:
        return None
    report = vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[each.logprob for each in response.logprobs], token_ids=response.token_ids
    )
    if top_count:
        for each in response.logprobs:
            values, token_ids = [likely.logprob for likely in each.top], [likely.token_id for likely in each.top]
            report.top_logprobs.add(values=values, token_ids=token_ids)
    return report


@dataclass(slots=True)
class _SeveralAnswers:
    """One call for several answers."""

    n: int
    aborted: bool = False


class VllmEngineServicer:
    """The whole cluster as one engine. What this class has no method for is UNIMPLEMENTED."""

    def __init__(self, router: RouterParts, inner: InferenceServicer) -> None:
        """inner: serves the requests."""
        self._router = router
        self._inner = inner
        self._several: dict[str, _SeveralAnswers] = {}
        """By request id."""
        self._started_s = time.monotonic()
        self._files: ModelFiles | None = None
        self._reading = asyncio.Lock()

    def register(self, server: aio.Server) -> None:
        """Adds what is built of the service to a server that has not started."""
        handlers = {
            method.name: _HANDLERS[method.server_streaming](
                getattr(self, method.name),
                request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
            for method in _SERVICE.methods
            if hasattr(self, method.name)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    # A coroutine that writes, for the same reason as in InferenceServicer.
    async def Generate(self, request: Any, context: ServicerContext) -> None:  # noqa: N802
        is_text = request.WhichOneof("input") == "text"
        try:
            asked = read_generate(request)
            if asked.request_id in self._several:
                raise RequestAlreadyExists(asked.request_id)
            if asked.n == 1:
                await self._answer(asked, 0, asked.prompt, _SeveralAnswers(1), asyncio.Lock(), context)
            else:
                await self._answer_several(asked, context)
        except KaveriError as error:
            metrics.REQUESTS.labels(outcome=status_of(error)[0].name.lower()).inc()
            await abort(context, _renamed(error, is_text))
        except _AnswerFailed as failed:
            if isinstance(failed.error, SlowReader):
                await self._inner.abort_unread(context, failed.error)
            await abort(context, _renamed(failed.error, is_text))

    async def _answer_several(self, asked: VllmAsked, context: ServicerContext) -> None:
        """Raises _AnswerFailed when one of the answers cannot be given; the others are then cancelled."""
        asked = replace(asked, request_id=asked.request_id or new_request_id())
        several = self._several[asked.request_id] = _SeveralAnswers(asked.n)
        turn = asyncio.Lock()
        try:
            # Once for all, and before there are as many of them.
            token_ids, _ = await self._router.intake.tokenize(asked.prompt, self._inner.until_s(context))
            async with asyncio.TaskGroup() as group:
                for index in range(asked.n):
                    group.create_task(self._answer(asked, index, token_ids, several, turn, context))
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
            await self._inner.generate(asked.request(index, prompt), progress, cast(ServicerContext, writer))

    async def Abort(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802
        try:
            if len(request.request_ids) > MAX_ABORTED:
                raise InvalidArgument("request_ids", f"{len(request.request_ids)} ids", f"at most {MAX_ABORTED} ids")
            for request_id in request.request_ids:
                check_request_id(request_id)
        except InvalidArgument as error:
            await abort(context, error)
        for request_id in filter(None, dict.fromkeys(request.request_ids)):
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
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=router.config.model,
            tokenizer_path=router.config.model,
            served_model_name=name,
            is_generation=True,
            max_context_length=limit,
            max_req_input_len=max(0, min(limit - 1, limit if largest is None else largest)),
            vocab_size=router.tokenizer.vocab_size,
            **files.facts,
        )

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
        data = files.archive
        if not data:
            await abort(context, Unsupported(f"{self._router.config.model!r} has no tokenizer files to send"))
        try:
            async with ReadLimit(self._router.config.slow_reader_s) as limit:
                for start in range(0, len(data), _CHUNK_BYTES):
                    is_last = start + _CHUNK_BYTES >= len(data)
                    part = data[start : start + _CHUNK_BYTES]
                    limit.begin()
                    await context.write(common_pb2.GetTokenizerChunk(data=part, sha256=files.sha256 if is_last else ""))
                    limit.end()
        except SlowReader as error:
            await self._inner.abort_unread(context, error)

    async def _model_files(self) -> ModelFiles:
        async with self._reading:
            if self._files is None:
                self._files = await asyncio.to_thread(read_model_files, self._router.config.model)
            return self._files


_HANDLERS: Mapping[bool, Callable[..., Any]] = {
    False: grpc.unary_unary_rpc_method_handler,
    True: grpc.unary_stream_rpc_method_handler,
}
"""By whether responses are streamed."""


def cluster_load(view: ClusterView, model: str) -> Any:
    """The load of all instances of the model, as one scheduler's. Tokens are those of the pools that decode uses."""
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
    usage = used_tokens / total_tokens if total_tokens else 0.0
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=min(used_tokens, 2**31 - 1),
        max_total_num_tokens=min(total_tokens, 2**31 - 1),
        token_usage=usage,
        utilization=usage,
        num_waiting_uncached_tokens=sum(instance.load.queued_prefill_tokens for instance in instances),
    )
