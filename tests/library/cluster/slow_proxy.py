"""A TCP proxy that takes its time: every byte arrives half a round trip later, on either way. Connecting is at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def slow_proxy(port: int, round_trip_s: float) -> AsyncIterator[int]:
    """The port of 127.0.0.1 behind which `port` seems to be far away, while the context lasts."""
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
