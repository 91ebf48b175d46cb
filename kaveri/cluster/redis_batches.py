"""Batches concurrent Redis commands: one write and one read per batch."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from redis.asyncio import Connection, ConnectionPool
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ResponseError

_BATCH_COUNT = 200
_CLOSED = "handler is closed"
"""Part of uvloop's error for a write to a connection that was just closed."""

Command = tuple[bytes | str | int, ...]


@contextlib.contextmanager
def closed_as_lost() -> Iterator[None]:
    """Raise redis.exceptions.ConnectionError instead of uvloop's RuntimeError for a write to a closed connection."""
    try:
        yield
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise NotConnected(f"the connection was closed: {error}") from error


class CommandBatches:
    """Sends Redis commands in batches over one connection of the pool: commands that arrive during a batch form the
    next one, in order. Several times cheaper than the client's methods, which borrow a connection and create tasks per
    command. Each caller waits for its answer, so the backlog is at most their number."""

    def __init__(self, pool: ConnectionPool, answer_timeout_s: float) -> None:
        self._pool = pool
        self._answer_timeout_s = answer_timeout_s
        self._connection: Connection | None = None
        self._waiting: list[tuple[Command, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def execute(self, *command: bytes | str | int) -> Any:
        """Run a command and return its answer. Raises the client's errors. Cancelling the caller does not stop it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="redis store: commands")
        return await answer

    async def close(self) -> None:
        """Wait for the running batch, whose time is limited, and drop later commands."""
        if self._sending is not None:
            await asyncio.wait({self._sending})
        if self._connection is not None:
            await self._pool.release(self._connection)

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_COUNT], self._waiting[_BATCH_COUNT:]
                try:
                    answers = await self._answers([command for command, _ in batch])
                except Exception as error:
                    answers = [error] * len(batch)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if future.done():
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        finally:
            self._sending = None

    async def _answers(self, commands: list[Command]) -> list[Any]:
        connection = self._connection
        if connection is None:
            connection = self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            # The timeout below is cheaper than the connection's own.
            connection.socket_timeout = None
        elif connection.is_connected:
            try:
                # Data while no answer is due, such as the end of the stream.
                is_closed = bool(await connection.can_read())
            except NotConnected:
                is_closed = True
            if is_closed:
                await connection.disconnect(nowait=True)
        loop = asyncio.get_running_loop()
        answers: list[Any] = []
        async with asyncio.timeout(self._answer_timeout_s) as limit:
            with closed_as_lost():
                await connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                limit.reschedule(loop.time() + self._answer_timeout_s)
                try:
                    answers.append(await connection.read_response())
                except ResponseError as error:
                    answers.append(error)
        return answers
