"""TCP proxies in front of instances, so that a benchmark can cut living processes off from one another.

An instance that advertises 127.0.0.2 and listens on 127.0.0.1 is reached through a proxy at the same port of 127.0.0.2,
which can be opened once the port is known. A cut link says nothing: no byte passes, and no connection ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self

ADVERTISED_HOST = "127.0.0.2"
_HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 16


class CutLink:
    """All connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, ADVERTISED_HOST, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """Nothing passes from now on."""
        self._passing.clear()

    def mend(self) -> None:
        """What was held back passes, in order."""
        self._passing.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(_HOST, self._port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE_BYTES):
                await self._passing.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


@contextlib.asynccontextmanager
async def cut_links(ports: Iterable[int]) -> AsyncIterator[dict[int, CutLink]]:
    """A proxy for each port, at ADVERTISED_HOST."""
    async with contextlib.AsyncExitStack() as stack:
        yield {port: await stack.enter_async_context(CutLink(port)) for port in ports}
