"""Streams the answers to one HTTP request, merged: one request to a router for each of a prompt's n answers."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kaveri.client.answer import Chunk
from kaveri.client.async_client import AsyncClient, AsyncStream
from kaveri.client.request import add_token_ids
from kaveri.domain.sampling import FinishReason
from kaveri.errors import RequestCancelled, SlowReader, Unavailable
from kaveri.parsers.answer import AnswerForm
from kaveri.v1 import inference_pb2
from kaveri.wire.attempts import CLIENTS_ID_SUFFIX_BYTES, MAX_CLIENTS_ID_BYTES
from services.gateway.parsed_request import ParsedRequest, is_token_ids

_Merged = asyncio.Queue[tuple[int, Chunk | BaseException | None]]
_SENT_TOGETHER = 8
_MERGED_CHUNKS = 32
_SLICE_TOKENS = 16_384
"""Token ids checked and packed at a time, in about a millisecond of the event loop. Prompts longer than this are sent
one HTTP request at a time: otherwise each would take a slice of every turn of the loop."""


class Answers:
    """Context manager for all answers to one HTTP request. On exit it cancels unfinished ones, also in the cluster."""

    def __init__(self, client: AsyncClient, asked: ParsedRequest, request_id: str, turn: asyncio.Lock) -> None:
        """request_id: prefix of the request ids sent to routers. turn: lock shared by all HTTP requests of the process;
        one with a long prompt of token ids holds it while sending."""
        self.streams: list[AsyncStream] = []
        self._client = client
        self._asked = asked
        self._turn = turn
        self._reported = [asyncio.Event() for _ in asked.prompts]
        """For each prompt, set once all its logprobs were forwarded. Answers that begin with these wait for it."""
        self._closed = False
        self._failure = "the answer was closed before its end"
        # Request ids may repeat: a client's id is for tracing, and need not be unique.
        self._name = f"{request_id[:MAX_CLIENTS_ID_BYTES]}-{secrets.token_hex(CLIENTS_ID_SUFFIX_BYTES)}"

    async def _ask(self) -> None:
        answers, n = self._asked.answers, self._asked.n
        for number, (prompt, params) in enumerate(answers):
            if number % n == 0:
                text = prompt if isinstance(prompt, str) else None
                token_ids = await _packed(prompt) if is_token_ids(prompt) else None  # type: ignore[arg-type]
            if number % _SENT_TOGETHER == _SENT_TOGETHER - 1:
                await asyncio.sleep(0)
            if self._closed:
                raise Unavailable(self._failure)
            self.streams.append(
                self._client.stream(
                    text,
                    prompt_token_ids=token_ids,  # type: ignore[arg-type]
                    messages=prompt if text is None and token_ids is None else None,  # type: ignore[arg-type]
                    chat=self._asked.chat,
                    params=params,
                    model=self._asked.model,
                    request_id=f"{self._name}-{number}" if len(answers) > 1 else self._name,
                )
            )

    async def __aenter__(self) -> Self:
        """Send all requests to routers. Raises InvalidArgument, and Unavailable once close() or fail() was called."""
        is_long = any(is_token_ids(prompt) and len(prompt) > _SLICE_TOKENS for prompt in self._asked.prompts)
        try:
            async with self._turn if is_long else contextlib.nullcontext():
                await self._ask()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def form(self, index: int) -> AnswerForm:
        """Return how an answer's text is read, once its first chunk has come."""
        return self._asked.form if self._asked.chat is None else self.streams[index].answer_form

    def fail(self, reason: str) -> None:
        """Cancel unfinished answers; chunks() then raises Unavailable with this reason."""
        self._failure = reason
        self.close()

    def close(self) -> None:
        self._closed = True
        for stream in self.streams:
            stream.close()

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield (prompt number * n + answer number, chunk) as chunks of any answer arrive. Close the generator. Raises
        the first error of any answer, and RequestCancelled if another caller cancelled one."""
        if len(self.streams) == 1:
            stream, finish = self.streams[0], None
            async for chunk in stream:
                finish = chunk.finish_reason
                _check_not_cancelled(finish, stream.request_id)
                yield 0, self._shown(chunk)
            if finish is None:
                raise Unavailable(self._failure)
            return
        # When full, the streams wait, and the routers coalesce tokens. The caller takes the whole queue in one turn of
        # the event loop.
        merged: _Merged = asyncio.Queue(_MERGED_CHUNKS)
        pumps = [asyncio.create_task(self._pump(index, merged)) for index in range(len(self.streams))]
        try:
            left = len(pumps)
            while left:
                index, found = await merged.get()
                match found:
                    case None:
                        left -= 1
                    case BaseException():
                        raise found
                    case chunk:
                        yield index, chunk
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(self, index: int, merged: _Merged) -> None:
        failure = None
        try:
            await self._read(index, merged)
        except Exception as error:
            failure = error
        await merged.put((index, failure))

    async def _read(self, index: int, merged: _Merged) -> None:
        stream, finish, reported = self.streams[index], None, self._reported[index // self._asked.n]
        is_first = index % self._asked.n == 0
        waits = self._asked.echoes_logprobs and not is_first
        try:
            async for chunk in stream:
                finish = chunk.finish_reason
                _check_not_cancelled(finish, stream.request_id)
                if waits:
                    await reported.wait()
                await merged.put((index, self._shown(chunk)))
                if is_first and chunk.token_ids:
                    reported.set()
        except SlowReader as error:
            if not waits or reported.is_set():
                raise
            # The client is not at fault if its report was not read.
            raise Unavailable("the report on the prompt took too long") from error
        if finish is None:
            raise Unavailable(self._failure)

    def _shown(self, chunk: Chunk) -> Chunk:
        if not self._asked.prompt_alone:
            return chunk
        finish = None if chunk.finish_reason is None else FinishReason.LENGTH
        usage = None if chunk.usage is None else replace(chunk.usage, completion_tokens=0)
        return replace(chunk, token_ids=(), text="", logprobs=(), finish_reason=finish, usage=usage)


async def _packed(token_ids: Sequence[int]) -> inference_pb2.TokenIds:
    packed = inference_pb2.TokenIds()
    for start in range(0, len(token_ids), _SLICE_TOKENS):
        add_token_ids(packed, token_ids[start : start + _SLICE_TOKENS])
        if start:
            await asyncio.sleep(0)
    return packed


def _check_not_cancelled(finish_reason: FinishReason | None, request_id: str) -> None:
    if finish_reason is FinishReason.CANCELLED:
        raise RequestCancelled(request_id)
