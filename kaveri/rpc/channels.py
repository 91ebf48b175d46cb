"""Keeps one gRPC channel per peer, with its stubs, while the peer is in the cluster."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc import aio

from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import process_tls

StubT = TypeVar("StubT")


@dataclass(eq=False, slots=True)
class _Peer:
    channel: aio.Channel
    generation: int
    """Version of the TLS certificates that it was opened with."""
    stubs: dict[Callable[[aio.Channel], Any], Any] = field(default_factory=dict)
    """Stubs by class."""
    call_count: int = 0
    """Number of active calls that keep the channel open."""


class Channels:
    """gRPC channels and stubs by address, opened on first use. Not thread-safe."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        """Tasks that close replaced channels."""

    def stub(self, make: Callable[[aio.Channel], StubT], address: str) -> StubT:
        """Return a gRPC stub for "host:port". make: the stub's class. retain() may cancel its calls; see calling()."""
        peer, tls = self._peers.get(address), process_tls()
        generation = 0 if tls is None else tls.generation
        if (
            peer is not None
            and not peer.call_count
            and peer.generation != generation
            and peer.channel.get_state() is not grpc.ChannelConnectivity.READY
        ):
            # It would reconnect with replaced certificates. A connected channel may stay.
            del self._peers[address]
            closing = asyncio.create_task(peer.channel.close(), name="close of a channel")
            self._closing[closing] = None
            closing.add_done_callback(self._closing.pop)
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(open_channel(address), generation)
        stub: StubT | None = peer.stubs.get(make)
        if stub is None:
            stub = peer.stubs[make] = make(peer.channel)
        return stub

    def is_connected(self, address: str) -> bool:
        """Return True if the channel to the address is connected."""
        peer = self._peers.get(address)
        return peer is not None and peer.channel.get_state() is grpc.ChannelConnectivity.READY

    @contextlib.contextmanager
    def calling(self, make: Callable[[aio.Channel], StubT], address: str) -> Iterator[StubT]:
        """Context manager: provides a stub like stub(), whose calls retain() does not cancel until the exit."""
        stub, peer = self.stub(make, address), self._peers[address]
        peer.call_count += 1
        try:
            yield stub
        finally:
            peer.call_count -= 1

    async def retain(self, addresses: Collection[str]) -> None:
        """Close all channels but those to `addresses` and those in use by calling(); cancels their calls."""
        await self._close([name for name, peer in self._peers.items() if name not in addresses and not peer.call_count])

    async def close(self) -> None:
        """Close all channels, which cancels their calls."""
        await self._close(list(self._peers))
        await asyncio.gather(*self._closing)

    async def _close(self, addresses: Collection[str]) -> None:
        closing = [self._peers.pop(address).channel for address in addresses]
        await asyncio.gather(*(channel.close() for channel in closing))
