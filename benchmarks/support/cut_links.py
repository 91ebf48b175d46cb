"""Relays in front of instances, so that a benchmark can cut living processes off from one another.

An instance that advertises 127.0.0.2 and listens on 127.0.0.1 is reached through a relay at the same port of 127.0.0.2,
which can be opened once the port is known.
"""

import contextlib
from collections.abc import AsyncIterator, Iterable

from tests.support.tcp_relay import TcpRelay

ADVERTISED_HOST = "127.0.0.2"


@contextlib.asynccontextmanager
async def cut_links(ports: Iterable[int]) -> AsyncIterator[dict[int, TcpRelay]]:
    """A relay for each port, at ADVERTISED_HOST."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            port: await stack.enter_async_context(TcpRelay((ADVERTISED_HOST, port), ("127.0.0.1", port)))
            for port in ports
        }
