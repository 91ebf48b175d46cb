"""A client's streams of decode instances, on real gRPC: which instances it reads from, and which it leaves alone."""
# ruff: noqa: N802 - gRPC names the methods

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from kaveri.client.direct import DirectRead, DirectStreams
from kaveri.errors import Unavailable
from kaveri.rpc.server import RpcServer
from kaveri.v1 import decode_pb2, decode_pb2_grpc, inference_pb2
from kaveri.wire.status import abort
from tests.library.client.inference_double import until

LIFE = 7


class AnswersDouble(decode_pb2_grpc.DecodeServiceServicer):
    """A decode instance that lets everyone read, and sends what the test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.beats = True
        self.to_send: asyncio.Queue[decode_pb2.AnswerPart | None] = asyncio.Queue()
        """Parts of answers. None: the stream breaks."""

    async def StreamAnswers(
        self, request: decode_pb2.StreamAnswersRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamAnswersResponse]:
        yield decode_pb2.StreamAnswersResponse(incarnation=LIFE)
        while True:
            try:
                async with asyncio.timeout(0.05):
                    part = await self.to_send.get()
            except TimeoutError:
                if self.beats:
                    yield decode_pb2.StreamAnswersResponse(incarnation=LIFE)
                continue
            if part is None:
                await abort(context, Unavailable("the test breaks it off"))
            else:
                yield decode_pb2.StreamAnswersResponse(incarnation=LIFE, parts=[part])

    async def ReadAnswer(self, request: decode_pb2.ReadAnswerRequest, context: Any) -> decode_pb2.ReadAnswerResponse:
        self.asked.append(request.request_id)
        return decode_pb2.ReadAnswerResponse()


class ReadingClient:
    """Streams of a client, and the instance that they go to."""

    def __init__(self, streams: DirectStreams, decode: AnswersDouble, address: str) -> None:
        self.streams = streams
        self.decode = decode
        self._at = inference_pb2.TokensAt(address=address, incarnation=LIFE)

    def read(self, request_id: str) -> DirectRead:
        asked = decode_pb2.ReadAnswerRequest(request_id=request_id, secret=b"s" * 16)
        return self.streams.read(self._at, asked, lambda: None)


@pytest.fixture
async def client() -> AsyncIterator[ReadingClient]:
    decode = AnswersDouble()
    server = RpcServer("127.0.0.1", 0, ())
    server.add(partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode))
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
