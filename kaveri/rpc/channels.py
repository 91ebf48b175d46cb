"""One gRPC channel per peer, with its stubs, kept while the peer is in the cluster."""

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
    """Of the certificates with which it was opened."""
    stubs: dict[Callable[[aio.Channel], Any], Any] = field(default_factory=dict)
    """By their class."""
    call_count: int = 0
    """Calls under way that keep the channel open."""


class Channels:
    """Channels and stubs by address, opened on first use. For one event loop."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        """Channels that were replaced."""

    def stub(self, make: Callable[[aio.Channel], StubT], address: str) -> StubT:
        """The stub of a service at "host:port": `make` is the stub's class. retain() ends its calls."""
        return self._stub(self._peer(address), make)

    def is_connected(self, address: str) -> bool:
        """Whether a call to the address leaves this process at once."""
        return self._peer(address).channel.get_state() is grpc.ChannelConnectivity.READY

    @contextlib.contextmanager
    def calling(self, make: Callable[[aio.Channel], StubT], address: str) -> Iterator[StubT]:
        """As stub(), for calls that retain() must not end: they are made within this context."""
        peer = self._peer(address)
        peer.call_count += 1
        try:
            yield self._stub(peer, make)
        finally:
            peer.call_count -= 1

    async def retain(self, addresses: Collection[str]) -> None:
        """Closes the channels to all other addresses, except those on which calling() is under way. Calls on a closed
        channel end as cancelled."""
        await self._close([name for name, peer in self._peers.items() if name not in addresses and not peer.call_count])

    async def close(self) -> None:
        """Closes every channel."""
        await self._close(list(self._peers))
        await asyncio.gather(*self._closing)

    async def _close(self, addresses: Collection[str]) -> None:
        closing = [self._peers.pop(address).channel for address in addresses]
        await asyncio.gather(*(channel.close() for channel in closing))

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is not None and self._is_outdated(peer):
            del self._peers[address]
            closing = asyncio.create_task(peer.channel.close(), name="close of a channel")
            self._closing[closing] = None
            closing.add_done_callback(self._closing.pop)
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(open_channel(address), _generation())
        return peer

    def _is_outdated(self, peer: _Peer) -> bool:
        """Whether it would connect again with certificates that have been replaced. While it is connected it may
        stay."""
        if peer.call_count or peer.generation == _generation():
            return False
        return peer.channel.get_state() is not grpc.ChannelConnectivity.READY

    def _stub(self, peer: _Peer, make: Callable[[aio.Channel], StubT]) -> StubT:
        stub: StubT | None = peer.stubs.get(make)
        if stub is None:
            stub = peer.stubs[make] = make(peer.channel)
        return stub


def _generation() -> int:
    tls = process_tls()
    return 0 if tls is None else tls.generation
