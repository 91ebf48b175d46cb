"""Test double: a gRPC service on loopback whose RPCs end as the test wishes."""
# ruff: noqa: N802 - gRPC names the methods

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from kaveri.rpc.server import RpcServer
from kaveri.v1 import feed_pb2, feed_pb2_grpc

SERVICE_NAME = "kaveri.v1.FeedService"


class EchoService(feed_pb2_grpc.FeedServiceServicer):
    """Test double: Abort returns at once or runs `on_abort`; Follow stays open until it is cancelled."""

    def __init__(self) -> None:
        self.on_abort: Callable[[Any], Awaitable[None]] | None = None
        self.open_streams = 0

    async def Attach(self, request: feed_pb2.AttachRequest, context: Any) -> feed_pb2.AttachResponse:
        return feed_pb2.AttachResponse()

    async def Abort(self, request: feed_pb2.AbortRequest, context: Any) -> feed_pb2.AbortResponse:
        if self.on_abort is not None:
            await self.on_abort(context)
        return feed_pb2.AbortResponse()

    async def Follow(self, request: feed_pb2.FollowRequest, context: Any) -> AsyncIterator[feed_pb2.FollowResponse]:
        self.open_streams += 1
        try:
            yield feed_pb2.FollowResponse(incarnation=1)
            await asyncio.Event().wait()
        finally:
            self.open_streams -= 1


@contextlib.asynccontextmanager
async def serving(service: EchoService, port: int = 0) -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", port, [SERVICE_NAME])
    server.add(partial(feed_pb2_grpc.add_FeedServiceServicer_to_server, service))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
