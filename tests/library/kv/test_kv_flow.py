"""Flow control of pushes on real links: who waits for whom, by bytes. What lands is the conformance suite's."""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kaveri.kv.layout import KvLayout
from kaveri.kv.sender import KvSender
from kaveri.testing.transport_conformance import WAIT_S, World, load_transport

LAYOUT = KvLayout("flow", 8, block_tokens=16, kv_head_count=8, head_dim=64, dtype="float32")
"""64 KiB blocks."""
POOL_BLOCKS = 80
LONG_BLOCKS = 64
"""A long push is of 4 MiB in each layer, 32 MiB in all."""
SHORT_BLOCKS = 2
MIB = 1 << 20

_FACTORIES = {
    "unix": "kaveri.kv.transports:unix_transport",
    "tcp": "kaveri.kv.transports:tcp_transport",
    "shm": "kaveri.kv.transports:shm_transport",
    "gloo": "kaveri.kv.transports:gloo_transport",
    "nixl": "kaveri.kv.transports:nixl_transport",
}
_TRANSPORTS = [
    pytest.param(
        name, marks=pytest.mark.skipif(name == "nixl" and importlib.util.find_spec("nixl_cu13") is None, reason="nixl")
    )
    for name in _FACTORIES
]


@pytest.fixture(params=_TRANSPORTS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    name = request.param
    address = str(tmp_path / "kv.sock") if name in ("unix", "shm") else "127.0.0.1:0"
    world = World(_FACTORIES[name], address, LAYOUT, POOL_BLOCKS)
    try:
        yield world
        world.check_integrity()
    finally:
        world.close()


class WrittenBytes:
    """What a sender has written of each transfer. The thread that writes stands still until release()."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self._released = threading.Event()
        # (transfer, bytes) of each write, in order.
        self.writes: list[tuple[bytes, int]] = []

    def __call__(self, transfer_id: bytes, layer: int, blocks: Sequence[int]) -> None:
        self.writes.append((transfer_id, len(blocks) * LAYOUT.block_bytes))
        self.began.set()
        assert self._released.wait(WAIT_S)

    def release(self) -> None:
        self._released.set()

    def before_the_end_of(self, transfer_id: bytes, other_id: bytes) -> int:
        """Bytes of `other_id` that were written before the last ones of `transfer_id`."""
        last = max(i for i, (writer, _) in enumerate(self.writes) if writer == transfer_id)
        return sum(byte_count for writer, byte_count in self.writes[:last] if writer == other_id)


def test_a_short_push_overtakes_a_long_one_of_the_same_sender(world: World) -> None:
    written = WrittenBytes()
    transport = load_transport(world.factory)
    with contextlib.closing(
        KvSender(world.source, world.pushed, transports=[transport], on_local_done=written)
    ) as sender:
        long, short = world.grant(LONG_BLOCKS), world.grant(SHORT_BLOCKS)
        world.push(long, list(range(LONG_BLOCKS)), sender)
        assert written.began.wait(WAIT_S)
        # All of the long one is queued before it.
        world.push(short, [70, 79], sender)
        written.release()
        for ticket, source in ((long, list(range(LONG_BLOCKS))), (short, [70, 79])):
            world.landed.wait(ticket)
            world.pushed.wait(ticket)
            world.expect(ticket, source)
    world.check_target()
    # A turn of the long one, and what was under way.
    assert written.before_the_end_of(short.transfer_id, long.transfer_id) <= 12 * MIB
    layers = [byte_count for writer, byte_count in written.writes if writer == long.transfer_id]
    assert sum(layers) == 32 * MIB
