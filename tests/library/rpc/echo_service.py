"""A gRPC service on loopback that ends its RPCs as a test wishes."""
# ruff: noqa: N802 - gRPC names the methods

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from kaveri.rpc.server import RpcServer
from kaveri.v1 import decode_pb2, decode_pb2_grpc

SERVICE_NAME = "kaveri.v1.DecodeService"


class EchoService(decode_pb2_grpc.DecodeServiceServicer):
    """Abort answers at once, or does what `on_abort` says; StreamTokens stays open until it is cancelled."""

    def __init__(self) -> None:
        self.on_abort: Callable[[Any], Awaitable[None]] | None = None
        self.open_streams = 0

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        return decode_pb2.ReserveResponse()

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        if self.on_abort is not None:
            await self.on_abort(context)
        return decode_pb2.AbortResponse()

    async def StreamTokens(
        self, request: decode_pb2.StreamTokensRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        self.open_streams += 1
        try:
            yield decode_pb2.StreamTokensResponse(incarnation=1)
            await asyncio.Event().wait()
        finally:
            self.open_streams -= 1


@contextlib.asynccontextmanager
async def serving(service: EchoService) -> AsyncIterator[RpcServer]:
    """Serves `service` on loopback, not ready yet; `port` says where."""
    server = RpcServer("127.0.0.1", 0, [SERVICE_NAME])
    server.add(partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, service))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
