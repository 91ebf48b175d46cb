import asyncio
import time

import pytest

from kaveri.errors import SlowReader
from kaveri.hosting.read_limit import read_limit


async def write_for_ever(limit_s: float) -> None:
    async with read_limit(limit_s) as writes:
        writes.ticks = 0
        await asyncio.Event().wait()


async def test_a_write_that_nobody_reads_ends_with_the_limit() -> None:
    with pytest.raises(SlowReader) as caught:
        await write_for_ever(0.05)
    assert caught.value.limit_s == 0.05


async def test_time_in_which_the_event_loop_stands_still_does_not_count() -> None:
    async with read_limit(0.1) as writes:
        writes.ticks = 0
        for _ in range(5):
            time.sleep(0.2)  # noqa: ASYNC251 - it is to stand still
            await asyncio.sleep(0)
        writes.ticks = None
        await asyncio.sleep(0)


async def test_each_write_has_the_whole_limit() -> None:
    ticks = 0
    async with read_limit(0.1) as writes:
        while ticks < 50:
            writes.ticks = 0
            await asyncio.sleep(0.05)
            writes.ticks = None
            ticks += 5
