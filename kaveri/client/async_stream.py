"""Stream of one answer: converts responses to chunks, times them, and cancels the request when the caller leaves."""

import asyncio
import contextlib
import os
import time
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from kaveri.client.answer import Chunk, Completion, PromptToken, ServerTiming, Timing, Usage
from kaveri.client.sessions import Sessions
from kaveri.errors import KaveriError, RequestCancelled, Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.messages import finish_from_proto, logprobs_from_proto


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
    grow to a second. Each token, each character and the end arrive exactly once. Nothing is recomputed while the
    instances live, except the prompt of a request with prompt_logprobs when the router changes before its first token.
    `timing.server.reattaches` counts such changes.

    For one reader at a time. Raises only KaveriErrors.
    """

    def __init__(self, sessions: Sessions, request_id: str, started_s: float) -> None:
        """Takes ownership of `sessions`. started_s: time.monotonic() of the caller's call."""
        self.request_id = request_id
        """The caller's id, or a generated one."""
        self.prompt_tokens: int | None = None
        """Tokens of the prompt; None until the first chunk."""
        self.completion_tokens = 0
        """Tokens received so far."""
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
        )

    def close(self) -> None:
        """Cancel the request everywhere unless it has ended. Does not wait. Idempotent."""
        self._closed = True
        self._sessions.close()

    def _note_cancelled(self) -> bool:
        """Cancel later sessions of the request as well. Returns False if the answer has ended."""
        self._sessions.cancel_asked = True
        return not self._closed and not self._sessions.received.is_complete

    def _cancel_when_known(self) -> None:
        """Cancel the request by its id once a router knows the request."""
        self._sessions.cancel_when_known()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may run in any thread; gRPC's calls belong to one loop.
        if not self._closed and self._process_id == os.getpid():
            with contextlib.suppress(RuntimeError):  # The event loop is closed, and so are its calls.
                self._loop.call_soon_threadsafe(self._sessions.close)

    def _chunk(self, response: inference_pb2.GenerateResponse) -> Chunk:
        now_s = time.monotonic()
        if response.token_ids:
            if self._first_s is None:
                self._first_s = now_s
            self._last_s = now_s
            self.completion_tokens += len(response.token_ids)
        is_last = self._sessions.received.is_complete
        if self.prompt_tokens is None and response.HasField("usage"):
            self.prompt_tokens = response.usage.prompt_tokens
        return Chunk(
            index=response.index,
            token_ids=tuple(response.token_ids),
            text=response.text,
            logprobs=tuple(logprobs_from_proto(entry) for entry in response.logprobs),
            finish_reason=finish_from_proto(response.finish_reason),
            usage=Usage(**_values(Usage, response.usage)) if is_last else None,
            timing=self._timing(response.timing, now_s) if is_last else None,
            prompt_tokens=_prompt_tokens(response.prompt_logprobs) if response.HasField("prompt_logprobs") else (),
        )

    def _timing(self, message: inference_pb2.Timing, now_s: float) -> Timing:
        ttft_s = None if self._first_s is None else self._first_s - self._started_s
        tpot_s = None
        token_count = len(self._sessions.received.token_ids)
        if self._first_s is not None and token_count > 1:
            tpot_s = (self._last_s - self._first_s) / (token_count - 1)
        server = ServerTiming(**_values(ServerTiming, message))
        return Timing(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=now_s - self._started_s, server=server)


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


def _values(kind: type[Usage | ServerTiming], message: inference_pb2.Usage | inference_pb2.Timing) -> dict[str, Any]:
    """Copy a dataclass's fields from a message with fields of the same names."""
    return {field.name: getattr(message, field.name) for field in fields(kind)}
