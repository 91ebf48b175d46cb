"""A TCP proxy on loopback whose connections a test can reset."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.router.service import Router


class BreakableLink:
    """Passes bytes on to one port."""

    def __init__(self, host: str, port: int) -> None:
        self.address = ""
        self._target = host, port
        self._pumps: dict[asyncio.Task[None], None] = {}
        self._writers: dict[asyncio.StreamWriter, None] = {}

    def reset(self) -> None:
        """Breaks every connection; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        for one in (writer, far_writer):
            self._writers[one] = None
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps[asyncio.create_task(_pump(source, sink))] = None

    async def close(self) -> None:
        """Breaks every connection, and waits until all is over."""
        self.reset()
        await asyncio.gather(*self._pumps)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.transport.abort()


@contextlib.asynccontextmanager
async def breakable_link(router: Router, address: str) -> AsyncIterator[BreakableLink]:
    """The router reaches `address` through the link from now on."""
    host, port = address.rsplit(":", 1)
    link = BreakableLink(host, int(port))
    server = await asyncio.start_server(link.connect, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stub = router.channels.stub

    def redirected(make, asked):  # type: ignore[no-untyped-def]
        return stub(make, link.address if asked == address else asked)

    router.channels.stub = redirected  # type: ignore[method-assign]
    try:
        yield link
    finally:
        server.close()
        await link.close()
