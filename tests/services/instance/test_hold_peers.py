"""What a decode instance leaves at prefill instances when it ends."""

import asyncio
from typing import Any

from grpc import aio

from kaveri.domain.view import ClusterView
from kaveri.rpc.channels import Channels
from kaveri.v1 import prefill_pb2, prefill_pb2_grpc
from services.instance import hold_peers
from services.instance.hold_params import HoldAt
from services.instance.hold_peers import HoldPeers
from services.prefill.holds import HOLD_ID_BYTES, HoldName
from tests.support.scripted_ports import add_port

WITHIN_S = 60.0


class SlowToRelease(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill instance that answers a release when the test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.answered = 0

    async def ReleaseHold(  # noqa: N802
        self, request: prefill_pb2.ReleaseHoldRequest, context: Any
    ) -> prefill_pb2.ReleaseHoldResponse:
        self.asked.set()
        await self.may_answer.wait()
        self.answered += 1
        return prefill_pb2.ReleaseHoldResponse()


async def test_closing_waits_for_releases_and_ends_the_connections(monkeypatch: Any) -> None:
    monkeypatch.setattr(hold_peers, "_RELEASE_TIMEOUT_S", WITHIN_S)
    closed = []
    close = Channels.close

    async def noted(channels: Channels) -> None:
        closed.append(prefill.answered)
        await close(channels)

    monkeypatch.setattr(Channels, "close", noted)
    server, prefill = aio.server(), SlowToRelease()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
    address = f"127.0.0.1:{add_port(server)}"
    await server.start()
    try:
        peers = HoldPeers("decode-0", 1, ClusterView)
        async with peers.using(HoldAt("prefill-0", address, HoldName(1, bytes(HOLD_ID_BYTES)))):
            pass
        await asyncio.wait_for(prefill.asked.wait(), WITHIN_S)
        closing = asyncio.create_task(peers.close())
        await asyncio.sleep(0)
        assert not closed
        prefill.may_answer.set()
        await asyncio.wait_for(closing, WITHIN_S)
        assert closed == [1]
    finally:
        await server.stop(0)
