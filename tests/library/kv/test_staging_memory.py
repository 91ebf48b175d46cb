"""Staging memory of a mapped sender: how much it takes for several layouts, and when it is freed."""

import gc
import os
import re
import threading
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.mapped_pushes import STAGINGS_MAX
from kaveri.kv.transfer.sender import PushAccepted
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from kaveri.testing.transport_peer import wait_until
from tests.library.kv.kv_pair import push, receiving, sending

LAYOUT = KvLayout("m", 2, block_tokens=16, kv_head_count=2, head_dim=32, dtype="float32")
TRANSPORTS = make_transports(("unix",))
_POOL = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .* (\d+) +/memfd:kaveri-kv", re.MULTILINE)
"""First and last address, and the inode of the memory file."""


def mapped_pools() -> dict[int, int]:
    """Bytes of each KV pool mapped by this process, by its memory file's inode."""
    pools: dict[int, int] = {}
    for start, end, inode in _POOL.findall(Path("/proc/self/maps").read_text()):
        pools[int(inode)] = pools.get(int(inode), 0) + int(end, 16) - int(start, 16)
    return pools


def bytes_beside(known: Set[int]) -> int:
    return sum(byte_count for inode, byte_count in mapped_pools().items() if inode not in known)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_thirty_shapes_in_rotation_take_no_more_staging_than_four(tmp_path: Path, without_collector: None) -> None:
    source = KvPool(LAYOUT, 128)
    staging_bytes = source.memory.nbytes // 4
    # The source, and pools that earlier tests of this process have left.
    known = mapped_pools().keys()
    assert os.fstat(source.descriptor).st_ino in known
    threads = threading.active_count()
    most_bytes = 0
    with sending(source, TRANSPORTS, staging_bytes=staging_bytes) as (sender, pushed):
        for number in range(2 * 30):
            other = replace(LAYOUT, block_tokens=17 + number % 30)
            listen = KvEndpoint("unix", str(tmp_path / f"{number}.sock"))
            # In no memory file, so that only staging counts.
            target = KvPool.over(other, np.zeros((2, 4, other.block_bytes), np.uint8))
            with receiving(target, listen, transports=TRANSPORTS, epoch=number) as (receiver, _):
                ticket = receiver.grant([0, 1], 2 * 16, 60.0)
                push(sender, ticket, [0, 1])
                event = pushed.wait(ticket)
                assert isinstance(event, PushAccepted), event
                most_bytes = max(most_bytes, bytes_beside(known))
        # Plus a page per staging memory, for alignment.
        assert 0 < most_bytes <= STAGINGS_MAX * (staging_bytes + (1 << 16))
    assert threading.active_count() == threads
    wait_until(lambda: bytes_beside(known) == 0, "all staging is free")


def test_a_shape_waits_for_the_memory_of_those_that_were_evicted(tmp_path: Path, without_collector: None) -> None:
    source = KvPool(LAYOUT, 128)
    other = replace(LAYOUT, block_tokens=17)
    target = KvPool.over(other, np.zeros((2, 4, other.block_bytes), np.uint8))
    listen = KvEndpoint("unix", str(tmp_path / "kv.sock"))
    known = mapped_pools().keys()
    with (
        receiving(target, listen, transports=TRANSPORTS) as (receiver, _),
        sending(source, TRANSPORTS) as (sender, pushed),
    ):
        room: Any = sender._mapped._room
        for _ in range(STAGINGS_MAX):
            assert room.acquire(blocking=False)
        ticket = receiver.grant([0, 1], 2 * 16, 60.0)
        push(sender, ticket, [0, 1])
        wait_until(lambda: bool(room._cond._waiters), "it waits for memory")
        assert bytes_beside(known) == 0
        for _ in range(STAGINGS_MAX):
            room.release()
        assert isinstance(pushed.wait(ticket), PushAccepted)
    wait_until(lambda: bytes_beside(known) == 0, "all staging is free")
