"""Reads a streamed answer, and compares it with that of an undisturbed run."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from kaveri import AsyncStream, Chunk, Completion
from kaveri.client.answer import ServerTiming
from kaveri.parsers.answer import AnswerParser
from kaveri.parsers.parts import Content, Part, Reasoning


class Reading:
    def __init__(self, stream: AsyncStream) -> None:
        self.chunks: list[Chunk] = []
        self.times_s: list[float] = []
        """Arrival time of each chunk."""
        self.parts: list[Part] = []
        """Tool calls, reasoning and content, parsed chunk by chunk."""
        self._grown = asyncio.Condition()
        self.task = asyncio.create_task(self._read(stream))

    @property
    def token_count(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def has(self, token_count: int, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s), self._grown:
            await self._grown.wait_for(lambda: self.token_count >= token_count)

    @property
    def timing(self) -> ServerTiming:
        timing = self.chunks[-1].timing
        assert timing is not None
        return timing.server

    async def _read(self, stream: AsyncStream) -> None:
        parser: AnswerParser | None = None
        async with stream:
            async for chunk in stream:
                parser = parser or stream.answer_form.parser()
                self.parts += parser.feed(chunk.text)
                self.parts += parser.close() if chunk.finish_reason is not None else ()
                assert chunk.index == self.token_count, "a token is missing, or came twice"
                async with self._grown:
                    self.chunks.append(chunk)
                    self.times_s.append(time.monotonic())
                    self._grown.notify_all()

    def check(self, expected: Completion, logprob_tolerance: float = 0.0) -> None:
        """Assert that the answer equals `expected`. logprob_tolerance: for tokens recomputed in larger steps."""
        token_ids = tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
        assert token_ids == expected.token_ids, f"they differ from token {_first_difference(token_ids, expected)} on"
        assert "".join(chunk.text for chunk in self.chunks) == expected.text
        assert _joined(self.parts) == _joined(expected.parts)
        logprobs = tuple(entry for chunk in self.chunks for entry in chunk.logprobs)
        if logprob_tolerance:
            theirs = [entry.logprob for entry in expected.logprobs]
            assert [entry.logprob for entry in logprobs] == pytest.approx(theirs, abs=logprob_tolerance)
        else:
            assert logprobs == expected.logprobs
        last = self.chunks[-1]
        assert last.finish_reason == expected.finish_reason
        assert _counts(last) == _counts(expected)
        assert last.timing is not None


def _counts(counted: Chunk | Completion) -> tuple[int, int]:
    """Return the counts of usage that do not depend on what the prefix cache holds."""
    assert counted.usage is not None
    return counted.usage.prompt_tokens, counted.usage.completion_tokens


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join neighbouring texts."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content | Reasoning) and isinstance(last, type(part)):
            found[-1] = type(part)(last.text + part.text)
        else:
            found.append(part)
    return found


def _first_difference(token_ids: tuple[int, ...], expected: Completion) -> int:
    pairs = enumerate(zip(token_ids, expected.token_ids, strict=False))
    return next(
        (index for index, (ours, theirs) in pairs if ours != theirs), min(len(token_ids), len(expected.token_ids))
    )
