import asyncio

import pytest

from kaveri.rpc.channels import Channels
from kaveri.v1 import feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceServicer, FeedServiceStub
from tests.library.rpc.echo_service import serving

WAIT_S = 60.0


class _Slow(FeedServiceServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def Abort(self, request: feed_pb2.AbortRequest, context: object) -> feed_pb2.AbortResponse:  # noqa: N802
        self.asked.set()
        await self.may_answer.wait()
        return feed_pb2.AbortResponse()


async def test_a_peer_that_left_loses_its_channel_and_its_calls_unless_they_keep_it_open() -> None:
    service, channels = _Slow(), Channels()

    async def ask_in_context(address: str) -> feed_pb2.AbortResponse:
        with channels.calling(FeedServiceStub, address) as stub:
            return await stub.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)

    async with serving(service) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.port}"
        asking = asyncio.create_task(ask_in_context(address))
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        kept = channels.stub(FeedServiceStub, address)
        await channels.retain(())
        assert channels.stub(FeedServiceStub, address) is kept
        service.may_answer.set()
        await asyncio.wait_for(asking, WAIT_S)

        service.may_answer.clear()
        service.asked.clear()
        call = kept.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        await channels.retain((address,))
        assert not call.done()
        await channels.retain(())
        with pytest.raises(asyncio.CancelledError):
            await call
        assert channels.stub(FeedServiceStub, address) is not kept
        service.may_answer.set()
        await channels.close()
