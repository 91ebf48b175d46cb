"""A client's direct reads at decode instances, on real gRPC."""
# ruff: noqa: N802 - gRPC names the methods

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import psutil
import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.client.direct import MAX_UNREAD_BYTES, DirectRead, DirectStreams
from kaveri.errors import Unavailable
from kaveri.rpc.server import RpcServer
from kaveri.v1 import feed_pb2, feed_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from kaveri.wire.status import abort
from tests.library.client.inference_double import until

LIFE = 7


class AnswersDouble(feed_pb2_grpc.FeedServiceServicer):
    """Test double of a decode instance: accepts all direct reads, and sends what the test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.beats = True
        self.to_send: asyncio.Queue[feed_pb2.AnswerPart | None] = asyncio.Queue()
        """Parts of answers. None: the stream breaks."""

    async def Follow(self, request: feed_pb2.FollowRequest, context: Any) -> AsyncIterator[feed_pb2.FollowResponse]:
        assert request.form == feed_pb2.FORM_TEXT
        yield feed_pb2.FollowResponse(incarnation=LIFE)
        while True:
            try:
                async with asyncio.timeout(0.05):
                    part = await self.to_send.get()
            except TimeoutError:
                if self.beats:
                    yield feed_pb2.FollowResponse(incarnation=LIFE)
                continue
            if part is None:
                await abort(context, Unavailable("the test breaks it off"))
            yield feed_pb2.FollowResponse(incarnation=LIFE, parts=[part])

    async def Attach(self, request: feed_pb2.AttachRequest, context: Any) -> feed_pb2.AttachResponse:
        self.asked.append(request.request_id)
        return feed_pb2.AttachResponse()


class ReadingClient:
    def __init__(self, streams: DirectStreams, decode: AnswersDouble, address: str) -> None:
        self.streams = streams
        self.decode = decode
        self._at = inference_pb2.TokensAt(address=address, incarnation=LIFE)

    def read(self, request_id: str) -> DirectRead:
        asked = feed_pb2.AttachRequest(request_id=request_id, secret=b"s" * 16)
        return self.streams.read(self._at, asked, lambda: None)


@pytest.fixture
async def client() -> AsyncIterator[ReadingClient]:
    decode = AnswersDouble()
    server = RpcServer("127.0.0.1", 0, ())
    server.add(partial(feed_pb2_grpc.add_FeedServiceServicer_to_server, decode))
    await server.start()
    streams = DirectStreams()
    yield ReadingClient(streams, decode, f"127.0.0.1:{server.port}")
    await streams.close()
    await server.stop(0)


@pytest.mark.parametrize("way", ["breaks off", "goes silent"])
async def test_an_instance_that_is_lost_while_it_is_read_is_left_alone(client: ReadingClient, way: str) -> None:
    read = client.read("a")
    await until(lambda: client.decode.asked == ["a"], "the answer is asked for")
    if way == "breaks off":
        client.decode.to_send.put_nowait(None)
    else:
        client.decode.beats = False
    await until(lambda: read.ended, "the read ends")
    assert read.broken
    assert client.read("b").ended


async def test_an_answer_that_its_caller_does_not_take_is_left_to_the_router(client: ReadingClient) -> None:
    read = client.read("a")
    await until(lambda: client.decode.asked == ["a"], "the answer is asked for")
    text = "a" * (MAX_UNREAD_BYTES // 8)
    for index in range(16):
        response = inference_pb2.GenerateResponse(index=index, token_ids=[65], text=text)
        client.decode.to_send.put_nowait(feed_pb2.AnswerPart(request_id="a", response=response))
    await until(client.decode.to_send.empty, "everything is sent")
    await until(lambda: read.ended, "the read ends")
    assert read.broken
    assert MAX_UNREAD_BYTES < read.unread_bytes < 2 * MAX_UNREAD_BYTES
    taken = 0
    while (piece := read.take()) is not None:
        assert piece.index == taken
        taken += 1
    assert 0 < taken < 16
    assert read.unread_bytes == 0


def test_a_piece_that_waits_keeps_nothing_of_the_other_answers_of_its_message() -> None:
    response = inference_pb2.GenerateResponse(index=7, token_ids=[65], text="a")
    parts = [feed_pb2.AnswerPart(request_id=f"request-{number}", response=response) for number in range(256)]
    data = feed_pb2.FollowResponse(incarnation=LIFE, parts=parts).SerializeToString()
    read = DirectRead(("request-0", 0), lambda: None)
    this = psutil.Process()
    before_bytes = this.memory_info().rss
    for _ in range(2_000):
        read.put(feed_pb2.FollowResponse.FromString(data).parts[0].response)
    # With their messages they would take 70 KB each.
    assert this.memory_info().rss - before_bytes < 40 * 2**20
    assert read.take() == response


class InterruptedAnswers(inference_pb2_grpc.InferenceServiceServicer):
    """Test double of a router that interrupts every answer with direct reads."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        index = len(request.received.token_ids)
        response = inference_pb2.GenerateResponse(index=index, token_ids=[65], text="a", first_character=index)
        response.max_tokens = 9
        if request.direct:
            response.tokens_at.address = "127.0.0.1:1"
            yield response
            yield inference_pb2.GenerateResponse(index=index + 1, first_character=index + 1, interrupted=True)
            await abort(context, Unavailable("interrupted"))
        response.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        response.usage.prompt_tokens, response.usage.completion_tokens = 1, index + 1
        yield response


async def test_a_request_that_was_interrupted_once_is_read_at_routers() -> None:
    router = InterruptedAnswers()
    server = RpcServer("127.0.0.1", 0, ())
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, router))
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}", timeout_s=60, direct=True) as client:
            answer = await client.generate(prompt_token_ids=[1], params=SamplingParams(max_tokens=9))
    finally:
        await server.stop(0)
    assert answer.text == "aa"
    assert [request.direct for request in router.requests] == [True, False]
    assert list(router.requests[1].received.token_ids) == [65]
