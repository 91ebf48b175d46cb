"""Channels to peers: which of them close when peers leave, and what happens to the calls on them."""

import asyncio

import pytest

from kaveri.rpc.channels import Channels
from kaveri.v1 import decode_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceServicer, DecodeServiceStub
from tests.library.rpc.echo_service import serving

WAIT_S = 60.0


class _Slow(DecodeServiceServicer):
    """Answers Abort once it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def Abort(self, request: decode_pb2.AbortRequest, context: object) -> decode_pb2.AbortResponse:  # noqa: N802
        self.asked.set()
        await self.may_answer.wait()
        return decode_pb2.AbortResponse()


async def test_a_peer_that_left_loses_its_channel_and_its_calls_unless_they_keep_it_open() -> None:
    service, channels = _Slow(), Channels()

    async def ask_in_context(address: str) -> decode_pb2.AbortResponse:
        with channels.calling(DecodeServiceStub, address) as stub:
            return await stub.Abort(decode_pb2.AbortRequest(), timeout=WAIT_S)

    async with serving(service) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.port}"
        asking = asyncio.create_task(ask_in_context(address))
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        kept = channels.stub(DecodeServiceStub, address)
        await channels.retain(())
        assert channels.stub(DecodeServiceStub, address) is kept
        service.may_answer.set()
        await asyncio.wait_for(asking, WAIT_S)

        service.may_answer.clear()
        service.asked.clear()
        call = kept.Abort(decode_pb2.AbortRequest(), timeout=WAIT_S)
        await asyncio.wait_for(service.asked.wait(), WAIT_S)
        await channels.retain((address,))
        assert not call.done()
        await channels.retain(())
        with pytest.raises(asyncio.CancelledError):
            await call
        assert channels.stub(DecodeServiceStub, address) is not kept
        service.may_answer.set()
        await channels.close()
