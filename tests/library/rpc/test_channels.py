import asyncio

import pytest
from grpc import aio

from kaveri.addresses import bind_socket
from kaveri.rpc.channels import Channels
from kaveri.v1 import feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceServicer, FeedServiceStub
from tests.library.rpc.echo_service import EchoService, serving

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
        channels.retain({})
        assert channels.stub(FeedServiceStub, address) is kept
        service.may_answer.set()
        await asyncio.wait_for(asking, WAIT_S)

        service.may_answer.clear()
        service.asked.clear()
        call = kept.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        channels.retain({address: 1})
        assert not call.done()
        channels.retain({})
        with pytest.raises(asyncio.CancelledError):
            await call
        assert channels.stub(FeedServiceStub, address) is not kept
        service.may_answer.set()
        await channels.close()


async def test_a_restarted_peer_is_reached_at_once_however_often_its_former_life_was_not() -> None:
    channels = Channels()
    # Bound and not listening: nobody answers, and no other process gets the port.
    gone = bind_socket("127.0.0.1", 0)
    port = gone.getsockname()[1]
    address = f"127.0.0.1:{port}"
    channels.retain({address: 1})
    kept = channels.stub(FeedServiceStub, address)
    refusals = 0
    # Pauses between attempts to connect grow to a second.
    while refusals < 5:
        with pytest.raises(aio.AioRpcError):
            await kept.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
        refusals += 1
        await asyncio.sleep(0.3)
    gone.close()
    async with serving(EchoService(), port):
        channels.retain({address: 2})
        renewed = channels.stub(FeedServiceStub, address)
        assert renewed is not kept
        await renewed.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
        channels.retain({address: 3})
        assert channels.stub(FeedServiceStub, address) is renewed, "a connected channel may stay"
        await channels.close()
