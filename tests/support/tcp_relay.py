"""TCP relay with which a test can stop or break connections. A stopped one passes neither bytes nor its end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

_PIECE_BYTES = 1 << 16

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a connection to the relay's target."""


class RelayedConnection:
    def __init__(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._closed = False

    def stand_still(self, still: bool) -> None:
        """Stop passing bytes, or pass those held back, in order, and continue."""
        if still and not self._closed:
            self._flows.clear()
        else:
            self._flows.set()

    def close(self) -> None:
        self._closed = True
        self._flows.set()
        for writer in self._writers:
            writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect) -> None:
        self._writers.append(writer)
        await self._flows.wait()
        try:
            far_reader, far_writer = await connect()
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(far_writer)
        if self._closed:
            self.close()
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE_BYTES):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        # The end passes no cut either.
        await self._flows.wait()
        for writer in self._writers:
            writer.transport.abort()


class TcpRelay:
    """Context manager that relays connections from `address` to `target`. Port 0: free, known from `address` later."""

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        self.address = address
        self._target = target
        self._is_cut = False
        self._connections: dict[RelayedConnection, asyncio.Task[None] | None] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, *self.address)
        self.address = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*(task for task in self._connections.values() if task is not None))

    def cut(self) -> None:
        """Stop passing bytes on all connections, new ones included."""
        self._stand_still(True)

    def mend(self) -> None:
        """Pass the bytes held back, and continue."""
        self._stand_still(False)

    def reset(self) -> None:
        """Reset every connection; new ones are accepted."""
        for connection in self._connections:
            connection.close()

    def _stand_still(self, still: bool) -> None:
        self._is_cut = still
        for connection in self._connections:
            connection.stand_still(still)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = RelayedConnection()
        connection.stand_still(self._is_cut)
        self._connections[connection] = asyncio.current_task()
        try:
            await connection.run(reader, writer, lambda: asyncio.open_connection(*self._target))
        finally:
            del self._connections[connection]
