"""Emulated links, for studies: slowed-down transports, and one that moves no bytes. Their labels say so."""

import time
from collections.abc import Callable, Sequence

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Landing, Link, LinkListener, Listener, TransferIntake, Transport
from kaveri.kv.transports.frames import Header, Kind
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.kv.transports.socket import SocketLink, SocketTransport
from kaveri.kv.transports.socket_listener import ReceivingConnection
from kaveri.kv.transports.stream import ByteStream

_CHECK_S = 0.02
"""Max sleep between checks for a stop."""
_AHEAD_S = 0.01
"""Send-ahead of a link, like a socket's buffer. Otherwise it would idle when the sending thread wakes up late."""


class EmulatedTransport:
    """Wraps a transport so that writes over a link take at least the time that `speed` gives.

    Only the sending side is slowed; each link is as fast as if it were alone. text: `speed` as the user wrote it.
    """

    def __init__(self, inner: Transport, speed: LinkSpeed, text: str) -> None:
        self.inner = inner
        self._speed = speed
        self.name, self.capabilities = inner.name, inner.capabilities
        self.label = f"{inner.label} at {text}"

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> "EmulatedLink":
        return EmulatedLink(self.inner.connect(endpoint, epoch, pool, listener), self._speed, pool)

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> Listener:
        return self.inner.listen(address, pool, intake)


class EmulatedLink:
    """Link of an EmulatedTransport, slowed down to `speed`; implements transport.Link."""

    def __init__(self, inner: Link, speed: LinkSpeed, pool: KvPool) -> None:
        self.wants_digest, self.has_marks = inner.wants_digest, inner.has_marks
        self._inner = inner
        self._speed = speed
        self._layout = pool.layout
        self._busy_until_s = 0.0
        self._is_broken = False

    @property
    def is_worn(self) -> bool:
        return self._inner.is_worn

    def open(self, ticket: Ticket) -> None:
        self._inner.open(ticket)

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Send the blocks at once, then sleep until the emulated link has sent all but its last _AHEAD_S seconds."""
        began_s = time.monotonic()
        charged_count = self._inner.write(ticket, layers, first_index, source_blocks, digest, is_stopped)
        moved_bytes = len(layers) * len(source_blocks) * self._layout.block_bytes
        busy_s = self._speed.transfer_s(moved_bytes, self._layout.token_bytes)
        self._busy_until_s = max(began_s, self._busy_until_s) + busy_s
        self._sleep_until(self._busy_until_s - _AHEAD_S, is_stopped)
        return charged_count

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        """Send a mark once the emulated link has sent all bytes before it. Adds no latency."""
        self._sleep_until(self._busy_until_s, lambda: False)
        self._inner.mark(ticket, block_count, note, digest)

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """Send the end mark one latency after the emulated link has sent the last bytes.

        Other transfers of the link wait as well, unlike on a real one: with milliseconds of latency and many short
        transfers to one receiver, the link is slower than its bandwidth says.
        """
        self._sleep_until(max(time.monotonic(), self._busy_until_s) + self._speed.latency_s, lambda: False)
        self._inner.finish(ticket, note, digest)

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        self._inner.abort(ticket, keep_marked=keep_marked)

    def break_off(self) -> None:
        self._is_broken = True
        self._inner.break_off()

    def close(self) -> None:
        self._inner.close()

    def _sleep_until(self, moment_s: float, is_stopped: Callable[[], bool]) -> None:
        while (left_s := moment_s - time.monotonic()) > 0 and not is_stopped() and not self._is_broken:
            time.sleep(min(left_s, _CHECK_S))


class MockTransport(SocketTransport):
    """TCP transport that reports blocks as written without sending any, like TetriInfer's mock (arXiv 2401.11181,
    section 4). For engines that do not read their KV. An EmulatedTransport around it adds the time."""

    def __init__(self, *, advertise_host: str | None = None) -> None:
        super().__init__("tcp", advertise_host=advertise_host)
        self.name = self.label = "mock"
        self.connection_type = _MockReceivingConnection

    def _link(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> SocketLink:
        return _MockLink(stream, pool, listener, endpoint)


class _MockLink(SocketLink):
    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        # Neither side feeds bytes to its digest, so the two agree.
        self._send(Header(Kind.DATA, ticket.transfer_id, 0, layers, first_index, len(source_blocks)))
        return len(layers) * len(source_blocks)


class _MockReceivingConnection(ReceivingConnection):
    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        self._stream.discard(header.payload_bytes)
        if landing is None:
            raise TransferFailed("no such transfer on this connection")
        landing.begin_write(header.layers, header.first_index, header.block_count)
        landing.end_write()
