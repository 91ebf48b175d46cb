"""Heartbeats on streams: a router can tell an idle instance from a silent one."""

import asyncio
from typing import Any

from kaveri.v1 import feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from tests.services.conftest import DEADLINE_S


async def test_a_stream_is_quiet_while_no_request_of_its_router_is_there_and_beats_otherwise(cluster: Any) -> None:
    decode = await cluster.decode()
    stream = FeedServiceStub(decode.channel).Follow(feed_pb2.FollowRequest(router_id="router-0"))

    async def read() -> feed_pb2.FollowResponse:
        return await asyncio.wait_for(stream.read(), DEADLINE_S)

    assert (await read()).incarnation
    assert (await read()).quiet
    await decode.reserve("a", 20)
    for _ in range(3):
        assert await read() == feed_pb2.FollowResponse()
    await decode.reserve("b", 20, router_id="router-1")
    await decode.abort("a")
    while not (message := await read()).quiet:
        assert not message.reports
    await decode.reserve("c", 20)
    assert not (await read()).quiet
    await decode.abort("c")
    await decode.abort("b", router_id="router-1")
    stream.cancel()
