"""The answers to one HTTP request: one stream of the SDK for each, read one by one or merged."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from kaveri.client.answer import Chunk, Completion
from kaveri.client.async_client import AsyncClient
from kaveri.client.async_stream import AsyncStream
from kaveri.client.request import pack_token_ids
from kaveri.domain.sampling import FinishReason
from kaveri.errors import RequestCancelled, SlowReader, Unavailable
from kaveri.wire.attempts import CLIENTS_ID_SUFFIX_BYTES, MAX_CLIENTS_ID_BYTES
from services.gateway.asked import Asked, is_token_ids

PieceT = TypeVar("PieceT", Chunk, Completion)
_SENT_TOGETHER = 8


class Answers:
    """Asks a router for all answers at once. Leaving the context cancels those that have not ended, everywhere."""

    def __init__(self, client: AsyncClient, asked: Asked, request_id: str) -> None:
        """request_id: stands before the ids that routers get, so that it can be found in their logs."""
        self.streams: list[AsyncStream] = []
        self._client = client
        self._asked = asked
        self._reported = [asyncio.Event() for _ in asked.prompts]
        """Of the reports on the prompts: whether all of it has come, for the answers that begin with it."""
        self._closed = False
        self._failure = "the answer was closed before its end"
        # Two requests may have one id: a client's id traces requests, and need not be unique.
        self._name = f"{request_id[:MAX_CLIENTS_ID_BYTES]}-{secrets.token_hex(CLIENTS_ID_SUFFIX_BYTES)}"

    async def _ask(self) -> None:
        """Sends the requests. Others go on in between."""
        answers, n = self._asked.answers, self._asked.n
        for number, (prompt, params) in enumerate(answers):
            if number % n == 0:
                text = prompt if isinstance(prompt, str) else None
                # Checked once for all answers to it.
                token_ids = pack_token_ids(prompt) if is_token_ids(prompt) else None  # type: ignore[arg-type]
            if number % _SENT_TOGETHER == _SENT_TOGETHER - 1:
                await asyncio.sleep(0)
            if self._closed:
                raise Unavailable(self._failure)
            self.streams.append(
                self._client.stream(
                    text,
                    prompt_token_ids=token_ids,
                    messages=prompt if text is None and token_ids is None else None,  # type: ignore[arg-type]
                    params=params,
                    model=self._asked.model,
                    request_id=f"{self._name}-{number}" if len(answers) > 1 else self._name,
                )
            )

    async def __aenter__(self) -> Self:
        """Asks. Raises InvalidArgument, and Unavailable once closed."""
        try:
            await self._ask()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def fail(self, reason: str) -> None:
        """Cancels what has not ended; readers get Unavailable with this reason."""
        self._failure = reason
        self.close()

    def close(self) -> None:
        """Cancels what has not ended. Idempotent."""
        self._closed = True
        for stream in self.streams:
            stream.close()

    async def collect(self) -> list[Completion]:
        """All answers, whole, in order. Raises the first error of any, and RequestCancelled when another client has
        cancelled one."""
        if len(self.streams) == 1:
            answers = [await self.streams[0].collect()]
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    reading = [group.create_task(stream.collect()) for stream in self.streams]
            except BaseExceptionGroup as errors:
                raise _first(errors) from errors
            answers = [task.result() for task in reading]
        for answer in answers:
            _check_not_cancelled(answer.finish_reason, answer.request_id)
        return [self._shown(answer) for answer in answers]

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """The chunks of all answers as they come, with the index of the answer. Raises as collect(). Close it."""
        if len(self.streams) == 1:
            stream, finish = self.streams[0], None
            async for chunk in stream:
                finish = chunk.finish_reason
                _check_not_cancelled(finish, stream.request_id)
                yield 0, self._shown(chunk)
            if finish is None:
                raise Unavailable(self._failure)
            return
        # Full: the streams wait, and the routers join their tokens.
        merged: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue(len(self.streams))
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
                        _check_not_cancelled(chunk.finish_reason, self.streams[index].request_id)
                        yield index, self._shown(chunk)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(self, index: int, merged: asyncio.Queue[tuple[int, Chunk | BaseException | None]]) -> None:
        finish, reported = None, self._reported[index // self._asked.n]
        is_first = index % self._asked.n == 0
        try:
            async for chunk in self.streams[index]:
                finish = chunk.finish_reason
                if self._asked.echoes_logprobs and not is_first:
                    await reported.wait()
                await merged.put((index, chunk))
                if is_first and chunk.token_ids:
                    reported.set()
            if finish is None:
                raise Unavailable(self._failure)
        except Exception as error:
            waits_for_report = self._asked.echoes_logprobs and not is_first and not reported.is_set()
            if isinstance(error, SlowReader) and waits_for_report:
                # That it was not read is no fault of the client's.
                await merged.put((index, Unavailable("the report on the prompt took too long")))
            else:
                await merged.put((index, error))
        else:
            await merged.put((index, None))

    def _shown(self, piece: PieceT) -> PieceT:
        """A piece of an answer as the client gets it."""
        if not self._asked.prompt_alone:
            return piece
        finish = None if piece.finish_reason is None else FinishReason.LENGTH
        usage = None if piece.usage is None else replace(piece.usage, completion_tokens=0)
        return replace(piece, token_ids=(), text="", logprobs=(), finish_reason=finish, usage=usage)


def _check_not_cancelled(finish_reason: FinishReason | None, request_id: str) -> None:
    if finish_reason is FinishReason.CANCELLED:
        raise RequestCancelled(request_id)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
