"""Emulated links that share one network port, as the links of one machine do: what one sends, the others wait for."""

import threading
import time
from collections.abc import Callable, Sequence

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkListener, Transport
from kaveri.kv.transports.extra.emulated import EmulatedLink, EmulatedTransport
from kaveri.kv.transports.link_speed import LinkSpeed, parse_link_speed


class _Port:
    """The port: busy with one piece at a time, in the order in which they are sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_until_s = 0.0

    def take(self, busy_s: float) -> float:
        """Books the port for so long; the moment at which it is through."""
        with self._lock:
            self._busy_until_s = max(time.monotonic(), self._busy_until_s) + busy_s
            return self._busy_until_s


class SharedPortTransport(EmulatedTransport):
    """A transport all of whose links share one port."""

    def __init__(self, inner: Transport, link: str) -> None:
        """link: see parse_link_speed."""
        super().__init__(inner, parse_link_speed(link), link)
        self._port = _Port()

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> EmulatedLink:
        """See Transport.connect."""
        return _SharedPortLink(super().connect(endpoint, epoch, pool, listener), self._speed, pool, self._port)


class _SharedPortLink(EmulatedLink):
    """A link that books its port for what it sends."""

    def __init__(self, inner: EmulatedLink, speed: LinkSpeed, pool: KvPool, port: _Port) -> None:
        super().__init__(inner._inner, speed, pool)
        self._port = port

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """See EmulatedLink.write."""
        byte_count = len(layers) * len(source_blocks) * self._layout.block_bytes
        through_s = self._port.take(self._speed.transfer_s(byte_count, self._layout.token_bytes))
        told_count = self._inner.write(ticket, layers, first_index, source_blocks, digest, is_stopped)
        self._busy_until_s = through_s
        self._sleep_until(through_s - 0.01, is_stopped)
        return told_count
