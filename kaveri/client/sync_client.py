"""The synchronous SDK: a facade over AsyncClient, which runs on an event loop in its own thread."""

import os
import weakref
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from kaveri.client.answer import Chunk, Completion, JsonModelT, ModelInfo, with_schema
from kaveri.client.async_client import AsyncClient, AsyncStream
from kaveri.client.defaults import DEFAULT_TARGET, DEFAULT_TIMEOUT_S
from kaveri.client.loop_thread import LoopThread
from kaveri.client.request import ChatOptions, MessageLike
from kaveri.client.routers import check_not_forked
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import Unavailable
from kaveri.parsers.answer import AnswerForm
from kaveri.security.tls_files import TlsFiles

ResultT = TypeVar("ResultT")


class Client:
    """Client of one cluster's routers, for code that does not use asyncio.

        with kaveri.Client(["router-0:50051", "router-1:50051"]) as client:
            print(client.generate("Count from 1 to 9.").text)

    Requests go to the given routers in turn. When one cannot be reached, hangs or drains, its requests continue through
    another, which may be one that the cluster named: each token arrives exactly once.

    Raises only KaveriErrors. Expect InvalidArgument, ModelNotFound, RequestAlreadyExists, NoCapacity (with
    retry_after_s), Unavailable, DeadlineExceeded, RequestCancelled and, on public ports, Unauthenticated. A
    KeyboardInterrupt in a call cancels its request everywhere.

    Thread-safe: make one and share it. Does not work in a forked child: fork before the first call, or start processes
    with multiprocessing's "spawn".
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
        """Start the background thread, which ends with close(). Connects at the first call.

        - target: a router's "host:port", or several, at most 64.
        - timeout_s: default deadline of calls, in seconds. None: no limit.
        - tls: the client's certificate and trusted authorities, reloaded when the files change. None: no TLS.
        - api_key: for public ports of routers. None: KAVERI_API_KEY, if set. Without TLS it is sent in clear text.
        - direct: read tokens at the decode instances that generate them, where they can be reached. Routers still place
          and follow the requests, and answers are the same. Not with api_key.

        Raises InvalidArgument, ConfigError for unusable files, and RuntimeError in a forked child.
        """
        check_not_forked()
        self._async_client = AsyncClient(target, timeout_s=timeout_s, tls=tls, api_key=api_key, direct=direct)
        self._process_id = os.getpid()
        self._loop_thread = LoopThread("kaveri-client")
        # Also at garbage collection and at the interpreter's exit.
        self._end = weakref.finalize(self, _end, self._async_client, self._loop_thread, self._process_id)

    @property
    def target(self) -> str:
        """Address of the first of the given routers."""
        return self._async_client.target

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses of the known routers: the given ones, then those named by the cluster."""
        return self._async_client.targets

    @overload
    def generate(
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
    def generate(
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

    def generate(
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
        """Send a request and return the whole answer. Arguments and errors as for stream(). An answer that another
        client has cancelled is returned in part, with FinishReason.CANCELLED.

        schema: a class such as a pydantic model. The answer is JSON of its schema, and an object of it is returned.
        Raises AnswerCut if the answer ended too early, by max_tokens for example; and what schema raises for JSON that
        it does not take, as by a validator of its own.
        """
        completion = self._wait(
            self._async_client.generate(
                prompt,
                prompt_token_ids=prompt_token_ids,
                messages=messages,
                chat=chat,
                params=params if schema is None else with_schema(params, schema),
                model=model,
                request_id=request_id,
                timeout_s=timeout_s,
            )
        )
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
    ) -> "Stream":
        """Send the request, and return the stream of its answer without waiting.

        - prompt, prompt_token_ids, messages: exactly one of them. A text is tokenized unchanged; messages use the
          model's chat template, and are Messages or mappings with "role" and "content".
        - params: sampling and stop conditions. None: SamplingParams().
        - model: None for the cluster's only model.
        - request_id: idempotency key, at most 128 bytes. None: a random id.
        - timeout_s: the request's deadline, over all routers that it goes through. None: the client's default.

        Raises InvalidArgument for arguments that no router accepts. Other errors are raised when the stream is read.
        """

        async def start() -> AsyncStream:
            return self._async_client.stream(
                prompt,
                prompt_token_ids=prompt_token_ids,
                messages=messages,
                chat=chat,
                params=params,
                model=model,
                request_id=request_id,
                timeout_s=timeout_s,
            )

        return Stream(self, self._wait(start()))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a request by its id, even one of another client; its stream ends with FinishReason.CANCELLED. Returns
        False if no router has it in flight. Raises Unavailable or DeadlineExceeded when no router answers."""
        return self._wait(self._async_client.cancel(request_id, timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Return all models of the cluster. Raises Unavailable or DeadlineExceeded when no router answers."""
        return self._wait(self._async_client.list_models(timeout_s=timeout_s))

    def get_model(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Return one model: its limits and readiness. Raises ModelNotFound."""
        return self._wait(self._async_client.get_model(name, timeout_s=timeout_s))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of messages (exactly one of the two), as generate() encodes them. Raises
        InvalidArgument, ModelNotFound, Unavailable and DeadlineExceeded."""
        return self._wait(self._async_client.tokenize(prompt, messages=messages, model=model, timeout_s=timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None) -> str:
        """Return the text of token ids, special tokens included. Raises as tokenize()."""
        return self._wait(self._async_client.detokenize(token_ids, model=model, timeout_s=timeout_s))

    def close(self) -> None:
        """Cancel requests in flight, disconnect and end the thread. Idempotent. Later calls raise RuntimeError."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_forked(self) -> bool:
        return self._process_id != os.getpid()

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        if self._is_forked():
            work.close()
            check_not_forked()
            raise RuntimeError("this Client was made before this process was forked; make a new one")
        try:
            return self._loop_thread.run(work)
        except Unavailable as error:
            if self._end.alive:
                raise
            raise RuntimeError("closed while waiting") from error


class Stream:
    """Chunks of one answer, in order; created by Client.stream.

        with client.stream("Count from 1 to 9.") as stream:
            for chunk in stream:
                print(chunk.text, end="")

    The request is cancelled everywhere when the `with` block is left, close() is called, or the last reference is
    dropped (as `break` does in `for chunk in client.stream(...)`).

    When the router dies, hangs or drains, the stream continues through another one, until the request's deadline. Each
    token, each character and the end arrive exactly once. A client that does not read loses its request after the
    router's --slow-reader-s. For one reader at a time. Reading raises KaveriErrors: NoCapacity, Unavailable,
    DeadlineExceeded, ModelNotFound, RequestAlreadyExists, RequestCancelled.
    """

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        self._client = client
        self._stream = stream
        self.request_id = stream.request_id
        """The caller's id, or a generated one."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._client._wait(self._next())
        if chunk is None:
            if not self._client._end.alive:
                # Not the end of the answer.
                raise RuntimeError("closed while waiting")
            raise StopIteration
        return chunk

    @property
    def answer_form(self) -> AnswerForm:
        """How the text is read, for tool calls and reasoning; known from the first chunk on."""
        return self._stream.answer_form

    def collect(self) -> Completion:
        """Read the remaining chunks and return them as one answer. Raises Unavailable if the stream is closed."""
        return self._client._wait(self._stream.collect())

    def close(self) -> None:
        """Cancel the request everywhere unless it has ended. Idempotent. Does nothing once the Client is closed, or in
        a forked child."""
        if self._client._end.alive and not self._client._is_forked():
            self._client._wait(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)

    async def _close(self) -> None:
        self._stream.close()


def _end(client: AsyncClient, loop_thread: LoopThread, process_id: int) -> None:
    if process_id == os.getpid():
        loop_thread.end(client.close())
