"""Ends answers to clients that do not read them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kaveri.errors import SlowReader

_LIMIT_TICKS = 10


@dataclass(eq=False, slots=True)
class Writes:
    """Progress of an answer's writes, which read_limit() watches."""

    ticks: int | None = None
    """Tenths of the limit since the present write began. The writer sets 0 before each write, and None after it."""


@contextlib.asynccontextmanager
async def read_limit(limit_s: float) -> AsyncIterator[Writes]:
    """Limit how long each write of one answer takes: `limit_s` seconds, and a tenth more. A longer one ends the context
    with SlowReader. The caller marks each write in the yielded object.

    Only time in which the event loop runs counts: a stalled loop cannot notice that the client has read, and counts one
    tick for the stall. One timer serves a whole answer: one per write would cost more."""
    writes, timeout, loop = Writes(), asyncio.timeout(None), asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        if writes.ticks is not None:
            writes.ticks += 1
            # The first tick may follow right after the start.
            if writes.ticks > _LIMIT_TICKS:
                timeout.reschedule(loop.time())
                return
        timer = loop.call_later(limit_s / _LIMIT_TICKS, tick)

    timer = loop.call_later(limit_s / _LIMIT_TICKS, tick)
    try:
        async with timeout:
            yield writes
    except TimeoutError as error:
        if timeout.expired():
            raise SlowReader(limit_s) from error
        raise
    finally:
        timer.cancel()
