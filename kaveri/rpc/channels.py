"""Keeps one gRPC channel per peer, with its stubs, while the peer is in the cluster."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
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
    incarnation: int
    """Incarnation of the instance at the address when the channel was opened; 0: unknown."""
    stubs: dict[Callable[[aio.Channel], Any], Any] = field(default_factory=dict)
    """Stubs by class."""
    call_count: int = 0
    """Number of active calls that keep the channel open."""


class Channels:
    """gRPC channels and stubs by address, opened on first use. Not thread-safe."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._incarnations: Mapping[str, int] = {}
        """Incarnation of the instance at each address, as of the last retain()."""
        self._closing: dict[asyncio.Task[None], None] = {}
        """Tasks that close channels."""

    def stub(self, make: Callable[[aio.Channel], StubT], address: str) -> StubT:
        """Return a gRPC stub for "host:port". make: the stub's class. retain() may cancel its calls; see calling()."""
        peer, tls = self._peers.get(address), process_tls()
        generation = 0 if tls is None else tls.generation
        incarnation = self._incarnations.get(address, 0)
        if (
            peer is not None
            and not peer.call_count
            and (peer.generation != generation or peer.incarnation not in (0, incarnation))
            and peer.channel.get_state() is not grpc.ChannelConnectivity.READY
        ):
            # It would reconnect with replaced certificates, or only after the backoff from failed connections to an
            # earlier incarnation. A connected channel may stay.
            self._close(address)
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(open_channel(address), generation, incarnation)
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

    def retain(self, incarnations: Mapping[str, int]) -> None:
        """Close all channels but those to these addresses and those in use by calling(); cancels their calls. At an
        address with another incarnation than before, the next stub() opens a new channel, unless the old one is
        connected.

        incarnations: incarnation of the instance at each address; 0: unknown."""
        self._incarnations = incarnations
        for address, peer in tuple(self._peers.items()):
            peer.incarnation = peer.incarnation or incarnations.get(address, 0)
            if address not in incarnations and not peer.call_count:
                self._close(address)

    async def close(self) -> None:
        """Close all channels, which cancels their calls."""
        for address in tuple(self._peers):
            self._close(address)
        await asyncio.gather(*self._closing)

    def _close(self, address: str) -> None:
        closing = asyncio.create_task(self._peers.pop(address).channel.close(), name="close of a channel")
        self._closing[closing] = None
        closing.add_done_callback(self._closing.pop)
