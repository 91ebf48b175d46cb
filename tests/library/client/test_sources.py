import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kaveri.client.direct import DirectRead, DirectStreams
from kaveri.client.received import Received
from kaveri.client.routers import RouterCall, Routers
from kaveri.client.sessions import Sessions
from kaveri.client.sources import AnswerSources
from kaveri.client.targets import Targets
from kaveri.errors import Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2

WAIT_S = 60.0
ROUTER = "router:1"


class OneRead:
    """Test double of DirectStreams with one read, which the test fills."""

    def __init__(self) -> None:
        self.read_here: DirectRead | None = None

    def read(self, at: object, asked: object, wake: Callable[[], None]) -> DirectRead:
        self.read_here = DirectRead(("a", 0), wake)
        return self.read_here

    def leave(self, read: DirectRead) -> None:
        read.ended = True


class ReadByBoth:
    """Answer that the client reads at router and decode instance, after its first token."""

    def __init__(self) -> None:
        self.received = Received()
        self._streams = OneRead()
        self._call_brings: asyncio.Queue[inference_pb2.GenerateResponse | None] = asyncio.Queue()
        self._sources = AnswerSources(self._streams, self.received)  # type: ignore[arg-type]
        self.received.take(_tokens(0, 65), ROUTER)
        self._sources.begin(inference_pb2.TokensAt(address="decode:1"), inference_pb2.GenerateRequest(request_id="a"))

    async def read(self) -> inference_pb2.GenerateResponse | None:
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


PROMPT = tuple(range(300, 307))
DECODE = inference_pb2.TokensAt(address="127.0.0.1:1", incarnation=1)


class ScriptedCall(RouterCall[inference_pb2.GenerateResponse]):
    """Test double of a router's call with scripted responses."""

    target = ROUTER

    def __init__(self, responses: Sequence[inference_pb2.GenerateResponse]) -> None:
        self._responses = iter(responses)

    async def read(self, *, is_stream: bool = True) -> inference_pb2.GenerateResponse | None:
        return next(self._responses, None)

    def cancel(self) -> None:
        """Responses that have arrived can still be read."""


class ScriptedRouters(Routers):
    def __init__(self, responses: Sequence[inference_pb2.GenerateResponse]) -> None:
        super().__init__(Targets((ROUTER,), random.Random(1)))
        self._responses = responses

    def call(self, *args: Any, **named: Any) -> ScriptedCall:
        return ScriptedCall(self._responses)


def report(first: int, end: int) -> inference_pb2.GenerateResponse:
    """Return a response with the prompt's logprobs at positions [first, end)."""
    response = inference_pb2.GenerateResponse()
    response.prompt_logprobs.first = first
    response.prompt_logprobs.token_ids.extend(PROMPT[first:end])
    response.prompt_logprobs.logprobs.extend(sampling_pb2.Logprobs(logprob=-1.0) for _ in range(first, end))
    return response


def first_part(end: int) -> inference_pb2.GenerateResponse:
    response = report(0, end)
    response.usage.prompt_tokens = len(PROMPT)
    return response


async def test_a_report_goes_on_while_the_answer_is_read_at_a_decode_instance() -> None:
    received, streams = Received(wants_prompt=True), DirectStreams()
    sources = AnswerSources(streams, received)
    offer = report(2, 4)
    offer.tokens_at.CopyFrom(DECODE)
    token = inference_pb2.GenerateResponse(token_ids=[1], text="a")
    call = ScriptedCall([first_part(2), offer, report(4, 6), report(6, 7), token])
    try:
        while (response := await sources.next(call)) is not None:
            received.take(response, ROUTER)
            if response.HasField("tokens_at"):
                sources.begin(response.tokens_at, inference_pb2.GenerateRequest(request_id="r"))
    finally:
        sources.end_session()
        await streams.close()
    assert received.prompt_count == len(PROMPT)
    assert list(received.token_ids) == [1]


async def test_a_stream_that_is_closed_while_a_response_waits_ends_quietly() -> None:
    tokens = [inference_pb2.GenerateResponse(index=index, token_ids=[1], text="a") for index in range(3)]
    streams = DirectStreams()
    sessions = Sessions(inference_pb2.GenerateRequest(request_id="r"), ScriptedRouters(tokens), None, streams)
    reader = asyncio.create_task(sessions.read())
    sources = sessions._sources
    assert sources is not None
    await asyncio.sleep(0)
    assert sources._reading is not None, "the reader waits for the first token"
    # Between the read of the first token and the reader's turn.
    sources._reading.add_done_callback(lambda _: sessions.close())
    try:
        assert await reader is None
    finally:
        await streams.close()


@pytest.mark.parametrize("reported", [1, len(PROMPT) - 1])
def test_a_token_before_the_end_of_the_report_is_refused(reported: int) -> None:
    received = Received(wants_prompt=True)
    received.take(first_part(reported), ROUTER)
    with pytest.raises(Unavailable, match=f"{reported} of the {len(PROMPT)}"):
        received.take(inference_pb2.GenerateResponse(token_ids=[1]), ROUTER)
