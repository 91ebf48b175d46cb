"""TCP proxy that delays every byte by half a round trip in each direction. Connecting is not delayed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def slow_proxy(port: int, round_trip_s: float) -> AsyncIterator[int]:
    """Yield a port of 127.0.0.1 that forwards to `port` with this round trip time."""
    running: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                _delay(reader, far_writer, round_trip_s / 2), _delay(far_reader, writer, round_trip_s / 2)
            )
        except asyncio.CancelledError:
            # Of the context's end; asyncio's streams would print it.
            pass
        finally:
            running.discard(task)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _delay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            loop.call_later(delay_s, writer.write, data)
    loop.call_later(delay_s, writer.close)
