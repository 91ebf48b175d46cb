"""Sends Redis commands that are asked for at about the same time together: one write and one read for all of them."""

import asyncio
from typing import Any

from redis.asyncio import Redis

_BATCH_COUNT = 200


class CommandBatches:
    """One batch is under way at a time; commands that come meanwhile form the next one, and run after it, in order.

    What waits is bounded by the callers, each of which waits for its own answer.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: list[tuple[tuple[bytes | str | int, ...], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def execute(self, *command: bytes | str | int) -> Any:
        """The answer to a command. Raises what the client raises. A caller that is cancelled does not stop it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="redis store: commands")
        return await answer

    async def close(self) -> None:
        """Waits for the batch that is under way, then drops the rest. Its time is limited by the client's time-outs."""
        if self._sending is not None:
            await asyncio.wait({self._sending})

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_COUNT], self._waiting[_BATCH_COUNT:]
                try:
                    answers = await self._answers([command for command, _ in batch])
                except Exception as error:  # Each caller gets it.
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

    async def _answers(self, commands: list[tuple[bytes | str | int, ...]]) -> list[Any]:
        if len(commands) == 1:
            return [await self._redis.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute(raise_on_error=False))
