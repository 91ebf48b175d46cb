"""What a client that reads at decode instances keeps of its router's responses."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kaveri.client.direct import DirectStreams
from kaveri.client.received import Received
from kaveri.client.routers import RouterCall, Routers
from kaveri.client.sessions import Sessions
from kaveri.client.sources import AnswerSources
from kaveri.client.targets import Targets
from kaveri.errors import Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2

PROMPT = tuple(range(300, 307))
# Nothing listens there.
DECODE = inference_pb2.TokensAt(address="127.0.0.1:1", incarnation=1)


class ScriptedCall(RouterCall[inference_pb2.GenerateResponse]):
    """Of a router: brings these responses."""

    target = "router-0:1"

    def __init__(self, responses: Sequence[inference_pb2.GenerateResponse]) -> None:
        self._responses = iter(responses)

    async def read(self) -> inference_pb2.GenerateResponse | None:
        return next(self._responses, None)

    def cancel(self) -> None:
        """What has come already can still be read."""


class ScriptedRouters(Routers):
    """One router that answers every request with the same responses."""

    def __init__(self, responses: Sequence[inference_pb2.GenerateResponse]) -> None:
        super().__init__(Targets(("router-0:1",), random.Random(1)))
        self._responses = responses

    def call(self, *args: Any, **named: Any) -> ScriptedCall:
        return ScriptedCall(self._responses)


def report(first: int, end: int) -> inference_pb2.GenerateResponse:
    """On the prompt's positions from `first` to before `end`."""
    response = inference_pb2.GenerateResponse()
    response.prompt_logprobs.first = first
    response.prompt_logprobs.token_ids.extend(PROMPT[first:end])
    response.prompt_logprobs.logprobs.extend(sampling_pb2.Logprobs(logprob=-1.0) for _ in range(first, end))
    return response


def first_part(end: int) -> inference_pb2.GenerateResponse:
    """The first response: of a report up to before `end`."""
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
            received.take(response, "router-0")
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
    received.take(first_part(reported), "router-0")
    with pytest.raises(Unavailable, match=f"{reported} of the {len(PROMPT)}"):
        received.take(inference_pb2.GenerateResponse(token_ids=[1]), "router-0")
