"""Reads, validates and writes messages of vLLM's gRPC API, `vllm.grpc.engine.VllmEngine` (package smg-grpc-proto).

Imported with --vllm-grpc only, as the package is an extra. Unsupported fields, also newer ones, are refused by name."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf import message_factory, unknown_fields
from google.protobuf.message import Message
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import MAX_N, FinishReason, ResolvedParams, SamplingParams, derived_seed
from kaveri.errors import InvalidArgument, KaveriError, Unsupported
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.text.model_files import ModelFiles
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES, check_request
from kaveri.wire.messages import params_to_proto, shown_params

_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE_NAME: str = _SERVICE.full_name
MAX_ABORTED = 256
"""Max ids in one Abort: each is searched on all routers."""
_CHUNK_BYTES = 64 * 1024
"""Chunk size of GetTokenizer, as in other servers of this protocol."""
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}

Accepts = Callable[[Any], bool]
"""Predicate for values of a field that have no effect."""
_GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = {
    "json_schema": Grammar.json_schema,
    "regex": Grammar.regex,
    "grammar": Grammar.lark,
    "choice": lambda value: Grammar.choices(list(value.choices)),
    "json_object": lambda _value: Grammar.json_object(),
}
"""Fields of the oneof that says what the answer must look like. Not: structural_tag."""
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
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        *_GRAMMARS,
    }
)
_HARMLESS_PARAMS: Mapping[str, Accepts] = {
    # Options of text only. Answers are token ids, including those of a stop text.
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
    """A validated Generate request of vLLM's gRPC API."""

    request_id: str
    """Empty: the caller gave none."""
    prompt: str | Sequence[int]
    params: ResolvedParams
    """Parameters without the model's defaults: as with vLLM's server, callers fill these in from GetModelInfo."""
    n: int
    stream: bool

    def request(self, index: int, prompt: str | Sequence[int]) -> inference_pb2.GenerateRequest:
        """Build the router's own request for answer `index` of the `n` requested."""
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
        """Build the request id of answer `index`, from 0."""
        return request_id if self.n == 1 else f"{request_id}-{index}"


def read_generate(request: Any) -> VllmAsked:
    """Parse and validate a GenerateRequest of vLLM's gRPC API. Raises InvalidArgument."""
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
    check_request(request.request_id)
    if n > 1 and len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES - len(f"-{n}"):
        limit = f"at most {MAX_REQUEST_ID_BYTES - len(f'-{n}')} bytes long where n is {n}"
        raise InvalidArgument("request_id", request.request_id, limit)
    return VllmAsked(request.request_id, prompt, params, n, request.stream)


def _read_params(params: Any) -> tuple[ResolvedParams, int]:
    _refuse_rest(params, "sampling_params.", _HONOURED_PARAMS, _HARMLESS_PARAMS)
    if params.n > MAX_N:
        raise InvalidArgument("sampling_params.n", params.n, f"at most {MAX_N}")
    sampling = ResolvedParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        # 0 means unset in proto3.
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        skip_special_tokens=params.skip_special_tokens,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        # 0 means unset in proto3.
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=tuple(params.logit_bias.items()),
        grammar=_grammar(params),
    )
    return sampling, params.n or 1


def _grammar(params: Any) -> Grammar | None:
    """Return the grammar that the answer must match. An empty one is none, as with vLLM."""
    for name, make in _GRAMMARS.items():
        if params.HasField(name) and (value := getattr(params, name)):
            return make(value)
    return None


def _refuse_rest(message: Message, path: str, honoured: frozenset[str], harmless: Mapping[str, Accepts]) -> None:
    """Raise InvalidArgument for a field that is set, unsupported and has an effect."""
    for field, value in message.ListFields():
        if field.name in honoured or harmless.get(field.name, lambda _value: False)(value):
            continue
        shown = "set" if field.message_type is not None else value
        raise InvalidArgument(path + field.name, shown, "left out: Kaveri does not support it")
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        limit = "left out: the installed smg-grpc-proto has no such field"
        raise InvalidArgument(f"{path}field {unknown[0].field_number}", "set", limit)


def renamed(error: KaveriError, is_text: bool = True) -> KaveriError:
    """Translate an error's field name to that of vLLM's gRPC API. is_text: False if the prompt came as token ids."""
    if not isinstance(error, InvalidArgument):
        return error
    prompt = "text" if is_text else "tokenized.input_ids"
    names = {"prompt": prompt, "prompt.text": prompt, "prompt.token_ids": prompt}
    name = names.get(error.field, error.field)
    if name.startswith("params."):
        name = "sampling_" + name
    return InvalidArgument(name, error.value, error.limit)


class AnswerMessages:
    """Builds the response messages of one answer in vLLM's gRPC API."""

    def __init__(self, asked: VllmAsked, index: int) -> None:
        """index: of the answer among those requested, from 0."""
        self._asked = asked
        self._prompt_tokens = 0
        self._last_token_id: int | None = None

        self._last = vllm_engine_pb2.GenerateComplete(index=index)
        """The final message. In a stream its tokens are those of the last chunk, as in vLLM."""

    def part(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.Logprobs], prompt_tokens: int
    ) -> Any | None:
        """Add the next tokens. Returns their message if the answer is streamed. logprobs: one per token, or empty.
        prompt_tokens: 0 if already reported."""
        self._prompt_tokens = self._prompt_tokens or prompt_tokens
        if token_ids:
            self._last_token_id = token_ids[-1]
        report = _report(token_ids, logprobs, self._asked.params.logprobs)
        message = None
        if self._asked.stream:
            if token_ids:
                chunk = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=token_ids,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=len(token_ids),
                    output_logprobs=report,
                    index=self._last.index,
                )
                message = vllm_engine_pb2.GenerateResponse(chunk=chunk)
            self._last.ClearField("output_ids")
            self._last.ClearField("output_logprobs")
        self._last.output_ids.extend(token_ids)
        if report is not None:
            self._last.output_logprobs.MergeFrom(report)
        return message

    def complete(self, finish: FinishReason, stop_text: str | None = None) -> Any:
        """Return the final message. stop_text: the text that ended the answer. Raises InvalidArgument if an answer that
        is not streamed is too large."""
        last = self._last
        last.finish_reason = _FINISH_REASONS[finish]
        last.prompt_tokens = self._prompt_tokens
        last.completion_tokens = len(last.output_ids)
        if finish is FinishReason.STOP:
            if stop_text is not None:
                last.matched_stop_str = stop_text
            elif self._last_token_id in self._asked.params.stop_token_ids:
                last.matched_token_id = self._last_token_id
        # The last message of a stream repeats its last chunk, which came in one message of our own and is smaller here.
        if not self._asked.stream and last.ByteSize() > MAX_MESSAGE_BYTES:
            limit = f"true, or logprobs or max_tokens less: the whole answer has more than {MAX_MESSAGE_BYTES} bytes"
            raise InvalidArgument("stream", False, limit)
        return vllm_engine_pb2.GenerateResponse(complete=last)


def _report(token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.Logprobs], top_count: int | None) -> Any:
    if not logprobs:
        return None
    report = vllm_engine_pb2.OutputLogProbs(token_logprobs=[each.logprob for each in logprobs], token_ids=token_ids)
    if top_count:
        for each in logprobs:
            values, token_ids = [likely.logprob for likely in each.top], [likely.token_id for likely in each.top]
            report.top_logprobs.add(values=values, token_ids=token_ids)
    return report


def register(servicer: object, server: aio.Server) -> None:
    """Register the methods that `servicer` has at a server that has not started. All others are UNIMPLEMENTED."""
    handlers = {
        method.name: _HANDLERS[method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
        for method in _SERVICE.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


_HANDLERS: Mapping[bool, Callable[..., Any]] = {
    False: grpc.unary_unary_rpc_method_handler,
    True: grpc.unary_stream_rpc_method_handler,
}
"""Handler factories by whether responses are streamed."""


def read_abort(request: Any) -> tuple[str, ...]:
    """Return the distinct ids of an AbortRequest. Raises InvalidArgument."""
    if len(request.request_ids) > MAX_ABORTED:
        raise InvalidArgument("request_ids", f"{len(request.request_ids)} ids", f"at most {MAX_ABORTED} ids")
    for request_id in request.request_ids:
        check_request(request_id)
    return tuple(filter(None, dict.fromkeys(request.request_ids)))


def model_info(
    model: str,
    name: str,
    limit: int,
    longest_prompt: int,
    vocab_size: int,
    files: ModelFiles,
    defaults: SamplingParams,
) -> Any:
    """Build a GetModelInfoResponse. name: of the served model. limit: max tokens of prompt and answer together.
    defaults: sampling parameters with which callers complete their requests."""
    drawing = {name: value for name, value in shown_params(defaults).items() if name != "max_tokens"}
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=model,
        tokenizer_path=model,
        served_model_name=name,
        is_generation=True,
        max_context_length=limit,
        max_req_input_len=max(0, longest_prompt),
        vocab_size=vocab_size,
        default_sampling_params_json=json.dumps(drawing, separators=(",", ":")) if drawing else "",
        **files.facts,
    )


def tokenizer_chunks(files: ModelFiles) -> Iterable[Any]:
    """Yield the tokenizer archive as GetTokenizer chunks. Raises Unsupported if the model has none."""
    data = files.archive
    if not data:
        raise Unsupported("the model has no tokenizer files to send")
    for start in range(0, len(data), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(data)
        part = data[start : start + _CHUNK_BYTES]
        yield common_pb2.GetTokenizerChunk(data=part, sha256=files.sha256 if is_last else "")


def scheduler_load(running: int, waiting: int, used_tokens: int, total_tokens: int, uncached_tokens: int) -> Any:
    """Build a SchedulerLoad message. Tokens are in KV pools, except uncached_tokens, which wait to be computed."""
    usage = used_tokens / total_tokens if total_tokens else 0.0
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=min(used_tokens, 2**31 - 1),
        max_total_num_tokens=min(total_tokens, 2**31 - 1),
        token_usage=usage,
        utilization=usage,
        num_waiting_uncached_tokens=uncached_tokens,
    )
