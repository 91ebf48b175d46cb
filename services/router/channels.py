"""One gRPC channel per instance address, kept while the instance is in the view."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from grpc import aio

from kaveri.rpc.server import open_channel
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub

if TYPE_CHECKING:
    from kaveri.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from kaveri.v1.prefill_pb2_grpc import PrefillServiceAsyncStub


class Channels:
    """Channels and stubs by address. Those of instances that left are closed; close() ends the rest."""

    def __init__(self) -> None:
        self._channels: dict[str, aio.Channel] = {}
        self._prefill_stubs: dict[str, PrefillServiceAsyncStub] = {}
        self._decode_stubs: dict[str, DecodeServiceAsyncStub] = {}

    def prefill(self, address: str) -> PrefillServiceAsyncStub:
        """The prefill service at "host:port"."""
        stub = self._prefill_stubs.get(address)
        if stub is None:
            stub = self._prefill_stubs[address] = PrefillServiceStub(self._channel(address))
        return stub

    def decode(self, address: str) -> DecodeServiceAsyncStub:
        """The decode service at "host:port"."""
        stub = self._decode_stubs.get(address)
        if stub is None:
            stub = self._decode_stubs[address] = DecodeServiceStub(self._channel(address))
        return stub

    async def retain(self, addresses: Collection[str]) -> None:
        """Closes the channels to all other addresses; RPCs on them end as cancelled."""
        gone = [address for address in self._channels if address not in addresses]
        closing = [self._channels.pop(address) for address in gone]
        for address in gone:
            self._prefill_stubs.pop(address, None)
            self._decode_stubs.pop(address, None)
        await asyncio.gather(*(channel.close() for channel in closing))

    async def close(self) -> None:
        """Closes every channel."""
        await self.retain(())

    def _channel(self, address: str) -> aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return channel
