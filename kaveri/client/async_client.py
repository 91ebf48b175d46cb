"""The SDK's asyncio client: calls InferenceService on the routers, and returns streams of answers."""

import asyncio
import contextlib
import os
import random
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self, overload

from kaveri.client.answer import (
    Chunk,
    Completion,
    JsonModelT,
    ModelInfo,
    PromptToken,
    RenderedPrompt,
    ServerTiming,
    Timing,
    Usage,
    with_schema,
)
from kaveri.client.api_key import find_api_key
from kaveri.client.defaults import DEFAULT_TARGET, DEFAULT_TIMEOUT_S
from kaveri.client.direct import DirectStreams
from kaveri.client.request import ChatOptions, MessageLike, build_request, check_text, check_timeout
from kaveri.client.routers import Routers, check_not_forked, is_forked
from kaveri.client.sessions import Sessions
from kaveri.client.targets import Targets, check_targets
from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument, KaveriError, RequestCancelled, Unavailable
from kaveri.parsers.answer import PLAIN
from kaveri.rpc.tls import RpcTls
from kaveri.security.tls_files import TlsFiles
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES, MIN_SECRET_BYTES
from kaveri.wire.messages import (
    FINISH_FROM_PROTO,
    form_from_proto,
    grammar_from_proto,
    grammar_to_proto,
    id_drawn_from,
    logprobs_from_proto,
    params_from_proto,
)


class AsyncStream:
    """Chunks of one answer, in order; created by AsyncClient.stream.

        async with client.stream("Count from 1 to 9.") as stream:
            async for chunk in stream:
                print(chunk.text, end="")

    The request is cancelled everywhere when the `async with` block is left, close() is called, or the reading task is
    cancelled. Without `async with` it is cancelled when the last reference to the stream is dropped; for
    `async for chunk in client.stream(...)` that is right after `break`.

    When the router dies, hangs, is cut off or drains, the stream continues through another one, or the same one when it
    is back, until the request's deadline; without a deadline until it succeeds or is closed. Pauses between attempts
    grow to a second. Each token, each character and the end arrive exactly once. No tokens are recomputed while the
    instances live, except the prompt of a request with prompt_logprobs if the router changes before the first token.
    `timing.server.reattaches` counts such changes.

    For one reader at a time. Raises only KaveriErrors.
    """

    def __init__(self, sessions: Sessions, request_id: str, started_s: float) -> None:
        """sessions: the request's calls to routers; owned by this object. started_s: start on the monotonic clock."""
        self.request_id = request_id
        """The caller's id, or a generated one."""
        self.prompt_tokens: int | None = None
        """Tokens of the prompt; None until the first chunk."""
        self.completion_tokens = 0
        """Tokens received so far."""
        self.answer_form = PLAIN
        """How the text is read, for tool calls and reasoning; known from the first chunk on."""
        self._sessions = sessions
        self._loop = asyncio.get_running_loop()
        self._process_id = os.getpid()
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises StopAsyncIteration after the last one, and once the stream is closed."""
        if self._closed:
            raise StopAsyncIteration
        try:
            response = await self._sessions.read()
        except RequestCancelled as error:
            self._closed = True
            raise RequestCancelled(self.request_id) from error
        except KaveriError:
            self._closed = True
            raise
        except asyncio.CancelledError:
            # gRPC also raises this for a call cancelled by close(); then the reader's task must continue.
            closed = self._closed
            self.close()
            task = asyncio.current_task()
            if closed and (task is None or not task.cancelling()):
                raise StopAsyncIteration from None
            raise
        if response is None:
            self._closed = True
            raise StopAsyncIteration
        return self._chunk(response)

    async def collect(self) -> Completion:
        """Read the remaining chunks and return them as one answer. Raises Unavailable if the stream is closed."""
        chunks = [chunk async for chunk in self]
        last = chunks[-1] if chunks else None
        if last is None or last.finish_reason is None or last.usage is None or last.timing is None:
            raise Unavailable(f"the stream of request {self.request_id!r} was closed before the end of the answer")
        return Completion(
            request_id=self.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timing=last.timing,
            prompt_tokens=tuple(token for chunk in chunks for token in chunk.prompt_tokens),
            answer_form=self.answer_form,
        )

    def close(self) -> None:
        """Cancel the request everywhere unless it has ended. Does not wait. Idempotent."""
        self._closed = True
        self._sessions.close()

    def _note_cancelled(self) -> bool:
        """Cancel the request's later calls to routers as well. Returns False if the answer has ended."""
        self._sessions.note_cancelled()
        return not self._closed and not self._sessions.received.is_complete

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may run in any thread; gRPC's calls belong to one loop.
        if not self._closed and self._process_id == os.getpid():
            with contextlib.suppress(RuntimeError):  # The loop is closed; so are its calls.
                self._loop.call_soon_threadsafe(self._sessions.close)

    def _chunk(self, response: inference_pb2.GenerateResponse) -> Chunk:
        now_s = time.monotonic()
        if response.token_ids:
            if self._first_s is None:
                self._first_s = now_s
            self._last_s = now_s
            self.completion_tokens += len(response.token_ids)
        if response.HasField("answer_form"):
            self.answer_form = form_from_proto(response.answer_form)
        is_last = self._sessions.received.is_complete
        if self.prompt_tokens is None and response.HasField("usage"):
            self.prompt_tokens = response.usage.prompt_tokens
        return Chunk(
            index=response.index,
            token_ids=tuple(response.token_ids),
            text=response.text,
            logprobs=tuple(logprobs_from_proto(entry) for entry in response.logprobs),
            finish_reason=FINISH_FROM_PROTO[response.finish_reason],
            usage=_usage(response) if is_last else None,
            timing=self._timing(response.timing, now_s) if is_last else None,
            prompt_tokens=_prompt_tokens(response.prompt_logprobs) if response.HasField("prompt_logprobs") else (),
        )

    def _timing(self, message: inference_pb2.Timing, now_s: float) -> Timing:
        ttft_s = None if self._first_s is None else self._first_s - self._started_s
        tpot_s = None
        token_count = len(self._sessions.received.token_ids)
        if self._first_s is not None and token_count > 1:
            tpot_s = (self._last_s - self._first_s) / (token_count - 1)
        server = ServerTiming(**{field.name: getattr(message, field.name) for field in fields(ServerTiming)})
        return Timing(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=now_s - self._started_s, server=server)


def _usage(response: inference_pb2.GenerateResponse) -> Usage:
    counts, cached_tokens = response.usage, response.timing.cached_tokens
    return Usage(
        prompt_tokens=counts.prompt_tokens, completion_tokens=counts.completion_tokens, cached_tokens=cached_tokens
    )


def _prompt_tokens(message: sampling_pb2.PromptLogprobs) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(
            token_id=token_id,
            text=entry.text,
            logprobs=logprobs_from_proto(entry) if message.first + place else None,
            raw_bytes=entry.raw_bytes,
        )
        for place, (token_id, entry) in enumerate(zip(message.token_ids, message.logprobs, strict=True))
    )


class AsyncClient:
    """Client of one cluster's routers, for one event loop.

    Requests go to the given routers in turn. When one cannot be reached, hangs or drains, its requests continue through
    another, which may be one that the cluster named; see AsyncStream. Other calls are then sent to another router.

    Raises only KaveriErrors. Expect InvalidArgument, ModelNotFound, RequestAlreadyExists, NoCapacity (with
    retry_after_s), Unavailable, DeadlineExceeded and RequestCancelled. Cancelling a task that waits here cancels its
    request everywhere.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
        direct: bool = False,
    ) -> None:
        """Arguments as for Client. Connects at the first call, and belongs to that call's event loop. Raises
        InvalidArgument, and ConfigError for unusable files. In a process forked after any client has connected, calls
        raise RuntimeError."""
        check_timeout(timeout_s)
        # The environment variable alone is accepted, since it is also set for commands.
        if direct and api_key:
            limit = "False with api_key: a public port sends all tokens itself, and decode instances take certificates"
            raise InvalidArgument("direct", True, limit)
        self._given = check_targets(target)
        self._timeout_s = timeout_s
        self._tls = None if tls is None else RpcTls(tls, "tls.")
        self._routers = Routers(Targets(self._given, random.Random()), self._tls, find_api_key(api_key))
        self._is_direct = direct
        self._direct: DirectStreams | None = None
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        """Streams that callers still refer to; several may have the same request id."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def target(self) -> str:
        """Address of the first of the given routers."""
        return self._given[0]

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses of the known routers: the given ones, then those named by the cluster."""
        return self._routers.targets.known

    def use_targets(self, target: str | Sequence[str]) -> None:
        """Replace the given routers, for new requests. Raises InvalidArgument."""
        self._given = check_targets(target)
        self._routers.targets.replace(self._given)

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        chat: ChatOptions | None = None,
        params: SamplingParams | None = None,
        schema: None = None,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        chat: ChatOptions | None = None,
        params: SamplingParams | None = None,
        schema: type[JsonModelT],
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> JsonModelT: ...

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        chat: ChatOptions | None = None,
        params: SamplingParams | None = None,
        schema: type[JsonModelT] | None = None,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion | JsonModelT:
        """Send a request and return the whole answer, or an object of `schema` that was read from it. Arguments as for
        Client.generate()."""
        if schema is not None:
            params = with_schema(params, schema)
        stream = self.stream(
            prompt,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            chat=chat,
            params=params,
            model=model,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        async with stream:
            completion = await stream.collect()
        return completion if schema is None else completion.parsed(schema)

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        chat: ChatOptions | None = None,
        params: SamplingParams | None = None,
        model: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Send the request, and return the stream of its answer without waiting. Arguments as for Client.stream()."""
        started_s = time.monotonic()
        check_timeout(timeout_s)
        secret = secrets.token_bytes(MIN_SECRET_BYTES)
        request_id = id_drawn_from(secret) if request_id is None else request_id
        request = build_request(prompt, prompt_token_ids, messages, params, model, request_id, chat)
        request.secret = secret
        sessions = Sessions(request, self._connect(), self._deadline_s(timeout_s), self._direct)
        stream = AsyncStream(sessions, request_id, started_s)
        self._streams.add(stream)
        return stream

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a request by its id, even one of another client; its stream ends with FinishReason.CANCELLED. Returns
        False if no router has such a request in flight."""
        request_id = check_text("request_id", request_id, most_bytes=MAX_REQUEST_ID_BYTES)
        request = inference_pb2.CancelRequest(request_id=request_id)
        own = [stream for stream in self._streams if stream.request_id == request_id and stream._note_cancelled()]
        response = await self._ask("Cancel", request, timeout_s)
        if not response.found:
            # A router may not have received the request yet.
            for stream in own:
                stream._sessions.cancel_when_known()
        return response.found or bool(own)

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Return all models of the cluster, with their limits and readiness."""
        response = await self._ask("ListModels", inference_pb2.ListModelsRequest(), timeout_s)
        return [_model_info(model) for model in response.models]

    async def get_model(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Return one model, with its limits and readiness. Raises ModelNotFound."""
        request = inference_pb2.GetModelRequest(model=check_text("name", name))
        response = await self._ask("GetModel", request, timeout_s)
        return _model_info(response.model)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of messages, as generate() encodes them. Raises as generate()."""
        return (await self.render(prompt, messages=messages, model=model, timeout_s=timeout_s)).token_ids

    async def render(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        chat: ChatOptions | None = None,
        grammar: Grammar | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> RenderedPrompt:
        """Return the token ids of a text or of messages, with what a request that sends these in place of the messages
        needs. grammar: of the request. Raises as generate()."""
        built = build_request(prompt, None, messages, None, model, "tokenize", chat)
        request = inference_pb2.TokenizeRequest(model=built.model)
        if built.WhichOneof("prompt") == "text":
            request.text = built.text
        else:
            request.messages.CopyFrom(built.messages)
            if grammar is not None:
                request.grammar.CopyFrom(grammar_to_proto(grammar))
        response = await self._ask("Tokenize", request, timeout_s)
        if response.HasField("grammar"):
            grammar = grammar_from_proto(response.grammar)
        form = form_from_proto(response.answer_form)
        return RenderedPrompt(tuple(response.token_ids), grammar, form, response.show_special_tokens)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids, special tokens included. Raises as generate()."""
        built = build_request(None, token_ids, None, None, model, "detokenize")
        request = inference_pb2.DetokenizeRequest(model=built.model, token_ids=built.token_ids.ids)
        return str((await self._ask("Detokenize", request, timeout_s)).text)

    async def close(self) -> None:
        """Cancel requests in flight and disconnect. Idempotent. Does nothing in a forked child."""
        self._closed = True
        if not is_forked():
            # First, so that no stream continues at another router.
            for stream in tuple(self._streams):
                stream.close()
            if self._direct is not None:
                await self._direct.close()
            await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _connect(self) -> Routers:
        if self._closed:
            raise RuntimeError("this AsyncClient is closed")
        check_not_forked()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            reason = "an AsyncClient needs a running event loop; kaveri.Client works without one"
            raise RuntimeError(reason) from None
        if self._loop is None:
            # Not in the constructor: channels belong to the event loop in which they are created.
            self._loop = loop
            if self._is_direct:
                self._direct = DirectStreams(self._tls)
        elif self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient belongs to the event loop of its first call, and each asyncio.run() makes another "
                "one: make a client per loop, or use kaveri.Client"
            )
        return self._routers

    async def _ask(self, method: str, request: Any, timeout_s: float | None) -> Any:
        check_timeout(timeout_s)
        return await self._connect().ask(method, request, self._deadline_s(timeout_s))

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return None if limit_s is None else time.monotonic() + float(limit_s)


def _model_info(message: inference_pb2.Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        ready=message.ready,
        default_params=params_from_proto(message.default_params, SamplingParams),
    )
