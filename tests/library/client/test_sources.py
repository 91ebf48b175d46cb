"""What a client takes of an answer that it reads at its router and at a decode instance, in whatever order it comes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kaveri.client.direct import DirectRead
from kaveri.client.received import Received
from kaveri.client.sources import AnswerSources
from kaveri.errors import Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2

WAIT_S = 60.0
ROUTER = "router:1"


class OneRead:
    """Direct streams with one read, which the test fills."""

    def __init__(self) -> None:
        self.read_here: DirectRead | None = None

    def read(self, at: object, asked: object, wake: Callable[[], None]) -> DirectRead:
        self.read_here = DirectRead(("a", 0), wake)
        return self.read_here

    def leave(self, read: DirectRead) -> None:
        read.ended = True


class ReadByBoth:
    """An answer that the client reads at both, with its first token received."""

    def __init__(self) -> None:
        self.received = Received()
        self._streams = OneRead()
        self._call_brings: asyncio.Queue[inference_pb2.GenerateResponse | None] = asyncio.Queue()
        self._sources = AnswerSources(self._streams, self.received)  # type: ignore[arg-type]
        self.received.take(_tokens(0, 65), ROUTER)
        self._sources.begin(inference_pb2.TokensAt(address="decode:1"), inference_pb2.GenerateRequest(request_id="a"))

    async def read(self) -> inference_pb2.GenerateResponse | None:
        """As the router's call."""
        return await self._call_brings.get()

    def router_sends(self, response: inference_pb2.GenerateResponse | None) -> None:
        self._call_brings.put_nowait(response)

    def decode_sends(self, response: inference_pb2.GenerateResponse) -> None:
        assert self._streams.read_here is not None
        self._streams.read_here.put(response)
        self._streams.read_here.wake()

    async def next(self) -> inference_pb2.GenerateResponse | None:
        call: Any = self
        async with asyncio.timeout(WAIT_S):
            response = await self._sources.next(call)
        if response is not None:
            self.received.take(response, ROUTER)
        return response


def _tokens(index: int, *token_ids: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(index=index, token_ids=token_ids)


def _cancelled(index: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(index=index, finish_reason=sampling_pb2.FINISH_REASON_CANCELLED)


async def test_what_decode_sends_behind_the_end_of_a_cancelled_answer_is_dropped() -> None:
    answer = ReadByBoth()
    answer.decode_sends(_tokens(1, 66))
    assert (await answer.next()).token_ids == [66]  # type: ignore[union-attr]
    answer.router_sends(_cancelled(1))
    assert (await answer.next()).finish_reason == sampling_pb2.FINISH_REASON_CANCELLED  # type: ignore[union-attr]
    answer.decode_sends(_tokens(2, 67))
    answer.router_sends(None)
    assert await answer.next() is None
    assert list(answer.received.token_ids) == [65, 66]
    assert answer.received.is_complete


async def test_news_of_owner_and_routers_are_taken_without_new_tokens() -> None:
    answer = ReadByBoth()
    answer.decode_sends(_tokens(1, 66))
    await answer.next()
    news = _tokens(1, 66)
    news.owner.holder_instance_id = "decode-1"
    news.routers.append(ROUTER)
    answer.router_sends(news)
    answer.router_sends(_cancelled(2))
    taken = await answer.next()
    assert taken is not None
    assert not taken.token_ids
    assert list(taken.routers) == [ROUTER]
    assert answer.received.owner.holder_instance_id == "decode-1"


def test_a_response_behind_the_end_is_refused() -> None:
    received = Received()
    received.take(_cancelled(0), ROUTER)
    with pytest.raises(Unavailable, match="behind the end"):
        received.take(_tokens(0, 65), ROUTER)
    assert received.is_complete
