"""Shared memory: mappings are released, a pool in use cannot shrink, other transports are the fallback."""

import contextlib
import dataclasses
import gc
import os
import socket
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool, SharedMemory
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.receiver import TransferLanded
from kaveri.kv.transfer.sender import PushAccepted
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports import make_transports, transport_names
from kaveri.kv.transports.shm import ShmTransport
from kaveri.kv.transports.stream import ByteStream
from kaveri.testing.transport_peer import fill_pool
from tests.library.kv.kv_pair import HookedDigest, failure, kv_pair, push, receiving, sending

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")


def mapped_pools() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kaveri-kv")


def test_a_sender_that_closes_lets_go_of_the_receivers_pool(tmp_path: Path) -> None:
    source, target = KvPool(LAYOUT, 4), KvPool(LAYOUT, 4)
    source.memory[:] = 7
    gc.collect()
    before = mapped_pools()
    with kv_pair(source, target, KvEndpoint("shm", str(tmp_path / "kv.sock"))) as pair:
        assert pair.accepted(pair.push([2, 0], [1, 3])).transport == "shm"
        assert mapped_pools() == before + 1
        gc.disable()
        try:
            pair.sender.close()
            assert mapped_pools() == before, "the pool stays mapped until the garbage collector comes by"
        finally:
            gc.enable()
    assert (target.memory[:, [0, 2]] == 7).all()
    assert not target.memory[:, [1, 3]].any()


def test_nobody_can_shrink_a_pool_that_others_have_mapped() -> None:
    pool = KvPool(LAYOUT, 4)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.descriptor, 0)


def test_a_pool_at_the_beginning_of_a_larger_file_is_written_to(tmp_path: Path) -> None:
    shared = SharedMemory(LAYOUT.layer_count * 4 * LAYOUT.block_bytes + 4096)
    memory = shared.bytes[:-4096].reshape(LAYOUT.layer_count, 4, LAYOUT.block_bytes)
    source, target = KvPool(LAYOUT, 4), KvPool.over(LAYOUT, memory, shared)
    source.memory[:] = 7
    with kv_pair(source, target, KvEndpoint("shm", str(tmp_path / "kv.sock"))) as pair:
        pair.accepted(pair.push([2, 0], [1, 3]))
    assert (target.memory[:, [0, 2]] == 7).all()
    assert not target.memory[:, [1, 3]].any()
    assert not shared.bytes[-4096:].any()


def test_a_pool_that_no_other_process_can_map_is_refused(tmp_path: Path) -> None:
    pool = KvPool.over(LAYOUT, np.zeros((LAYOUT.layer_count, 4, LAYOUT.block_bytes), np.uint8))
    with pytest.raises(ConfigError, match="memory file"):
        ShmTransport().listen(str(tmp_path / "kv.sock"), pool, None)
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_the_hosts_is_refused() -> None:
    class DeviceTensor:
        shape = (LAYOUT.layer_count, 4, LAYOUT.block_bytes)

    with pytest.raises(ConfigError, match="host memory"):
        KvPool.over(LAYOUT, DeviceTensor())


def test_a_ticket_for_blocks_beyond_the_pool_fails_and_writes_nothing(tmp_path: Path) -> None:
    source, target = KvPool(LAYOUT, 8), KvPool(LAYOUT, 4)
    source.memory[:] = 7
    with kv_pair(source, target, KvEndpoint("shm", str(tmp_path / "kv.sock"))) as pair:
        ticket = dataclasses.replace(pair.receiver.grant([3], 4, 30.0), block_ids=(4,))
        pair.sender.open(ticket)
        pair.sender.write(ticket.transfer_id, 0, 0, [1])
        assert "block 4" in failure(pair.pushed, ticket)
    assert not target.memory.any()


def test_a_sender_that_cannot_reach_the_memory_falls_back_to_the_next_transport(tmp_path: Path) -> None:
    source, target = KvPool(LAYOUT, 4), KvPool(LAYOUT, 4)
    source.memory[:] = np.arange(LAYOUT.block_bytes, dtype=np.uint8)
    path = tmp_path / "kv.sock"
    listen = [KvEndpoint("shm", str(path)), KvEndpoint("tcp", "127.0.0.1:0")]
    with receiving(target, *listen) as (receiver, landed):
        # As in another container: the path is not there.
        path.rename(tmp_path / "elsewhere.sock")
        with sending(source) as (sender, pushed):
            ticket = receiver.grant([2, 0], 8, 30.0)
            push(sender, ticket, [1, 3])
            event = pushed.wait(ticket)
        assert isinstance(event, PushAccepted)
        assert event.transport == "tcp"
        assert isinstance(landed.wait(ticket), TransferLanded)


def test_transport_names_are_read_in_order_and_unknown_ones_refused() -> None:
    assert transport_names("tcp, shm") == ("tcp", "shm")
    with pytest.raises(ValueError, match="is 'rdma'; choose shm, unix, tcp"):
        transport_names("shm,rdma")
    with pytest.raises(ValueError, match="names none"):
        transport_names(" , ")


@pytest.mark.parametrize("count", [0, 2])
def test_descriptors_of_a_receiver_that_sends_too_many_are_given_back(tmp_path: Path, count: int) -> None:
    (tmp_path / "sent").touch()
    near, far = socket.socketpair()
    with near, far, open(tmp_path / "sent") as sent:
        for message in range(2):
            socket.send_fds(far, [b"data"], [sent.fileno()] * (message < count))
        with pytest.raises(LinkLost, match=f"{count} descriptors"):
            ByteStream(near, 10.0).receive_descriptor(8)
        assert _descriptors_of(tmp_path / "sent") == [sent.fileno()]


def _descriptors_of(path: Path) -> list[int]:
    # Other tests' threads may be closing theirs.
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                found.append(int(descriptor))
    return found


@pytest.mark.parametrize(
    ("digests", "transport", "is_verified"),
    [
        (Digests.AUTO, "shm", False),
        (Digests.AUTO, "unix", True),
        (Digests.AUTO, "tcp", True),
        (Digests.ON, "shm", True),
        (Digests.OFF, "unix", False),
    ],
)
def test_the_receiver_says_whether_a_transfer_is_verified_and_it_lands_either_way(
    tmp_path: Path, digests: Digests, transport: str, is_verified: bool
) -> None:
    digested = threading.Event()
    source, target = KvPool(LAYOUT, 4), KvPool(LAYOUT, 8)
    fill_pool(source, 1)
    listen = KvEndpoint(transport, "127.0.0.1:0" if transport == "tcp" else str(tmp_path / "kv.sock"))
    spoken = make_transports((transport,))
    with (
        receiving(target, listen, transports=spoken, digests=digests) as (receiver, _),
        sending(source, spoken, digest=partial(HookedDigest, lambda _: digested.set())) as (sender, pushed),
    ):
        ticket = receiver.grant([6, 2], 8, 60.0)
        push(sender, ticket, [1, 3])
        event = pushed.wait(ticket)
    assert isinstance(event, PushAccepted), event
    assert (target.memory[:, [6, 2]] == source.memory[:, [1, 3]]).all()
    assert digested.is_set() == is_verified
