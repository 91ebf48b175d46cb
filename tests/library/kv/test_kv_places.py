"""Places for chunks: every one is held to the same behaviour, and then to its own."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from kaveri.errors import DeadlineExceeded, InvalidArgument, LayoutMismatch, NoCapacity, TransferFailed
from kaveri.kv.chunk_link import ChunkReceiver, ChunkSender
from kaveri.kv.disk import LocalDisk
from kaveri.kv.places import FetchPlace, FlushPlace, HostMemory
from kaveri.kv.staging import StagingBuffers
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import WAIT_S, wait_until

CHUNK_BYTES = 40_000
BLOCK_BYTES = 4096
"""Of the remote place: chunks are several blocks and part of one."""


class BothEnds(Protocol):
    """Opens a place: where to flush to, and where to fetch from."""

    def __call__(self) -> tuple[FlushPlace, FetchPlace]: ...


@pytest.fixture(params=["host", "disk", "tcp", "unix", "shm"])
def both_ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BothEnds]:
    with contextlib.ExitStack() as stack:

        def open_place() -> tuple[FlushPlace, FetchPlace]:
            if request.param == "host":
                host = HostMemory(CHUNK_BYTES, 4)
                return host, host
            if request.param == "disk":
                return LocalDisk(tmp_path / "kv", 4 * CHUNK_BYTES), LocalDisk(tmp_path / "kv", 0)
            return linked(stack, request.param, tmp_path)

        yield open_place


def linked(
    stack: contextlib.ExitStack,
    transport: str,
    folder: Path,
    wrap: Callable[[Callable[[str, int, float], Ticket]], Callable[[str, int, float], Ticket]] = lambda grant: grant,
) -> tuple[ChunkSender, ChunkReceiver]:
    address = "127.0.0.1:0" if transport == "tcp" else str(folder / "kv.sock")
    receiver = ChunkReceiver(listen=[KvEndpoint(transport, address)], epoch=1, block_count=40, block_bytes=BLOCK_BYTES)
    stack.callback(receiver.close)
    sender = ChunkSender(wrap(receiver.grant), block_count=20, block_bytes=BLOCK_BYTES)
    stack.callback(sender.close)
    return sender, receiver


def chunk_of(byte_count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, byte_count, dtype=np.uint8)


def fetched(place: FetchPlace, name: str, byte_count: int, timeout_s: float = WAIT_S) -> np.ndarray:
    into = np.empty(byte_count, np.uint8)
    place.fetch(name, into, timeout_s)
    return into


def test_what_was_flushed_is_fetched(both_ends: BothEnds) -> None:
    out, back = both_ends()
    for i, byte_count in enumerate((1, BLOCK_BYTES, CHUNK_BYTES)):
        chunk = chunk_of(byte_count, seed=i)
        expected = chunk.copy()
        out.flush(f"chunk-{i}", chunk, WAIT_S)
        chunk.fill(0)  # flush() has returned, so the memory is the caller's again
        out.settle("", WAIT_S)
        assert np.array_equal(fetched(back, f"chunk-{i}", byte_count), expected)


def test_fetch_waits_for_a_chunk_that_comes_later(both_ends: BothEnds) -> None:
    out, back = both_ends()
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(fetched(back, "late", 100)))
    thread.start()
    out.flush("late", chunk_of(100), WAIT_S)
    thread.join(WAIT_S)
    assert np.array_equal(found[0], chunk_of(100))


def test_a_chunk_that_never_comes_ends_at_the_deadline(both_ends: BothEnds) -> None:
    _, back = both_ends()
    with pytest.raises(DeadlineExceeded):
        fetched(back, "never", 100, timeout_s=0.01)


def test_a_newer_chunk_replaces_the_one_of_its_name(both_ends: BothEnds) -> None:
    out, back = both_ends()
    for seed in range(3):
        out.flush("name", chunk_of(100 + seed, seed), WAIT_S)
        out.settle("", WAIT_S)
        # The acceptance may be here before the receiver's listener has heard of the landing.
        wait_until(lambda seed=seed: can_fetch(back, "name", 100 + seed), "the newer chunk")  # type: ignore[misc]
    assert np.array_equal(fetched(back, "name", 102), chunk_of(102, 2))


def test_chunks_that_are_replaced_again_and_again_take_the_room_of_one(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        out, back = linked(stack, "unix", tmp_path)
        chunk_bytes = 10 * BLOCK_BYTES
        for seed in range(8):
            # A quarter of the room, and the one before it is there until this one has landed.
            chunk = chunk_of(chunk_bytes, seed)
            out.flush("name", chunk, WAIT_S)
            out.settle("", WAIT_S)
            is_there = partial(lambda chunk: bool((fetched(back, "name", chunk_bytes) == chunk).all()), chunk)
            wait_until(is_there, "it has replaced the one before")
        back.check_integrity()


def can_fetch(place: FetchPlace, name: str, byte_count: int) -> bool:
    try:
        fetched(place, name, byte_count, timeout_s=0.0)
    except (DeadlineExceeded, TransferFailed):
        return False
    return True


def test_a_discarded_chunk_is_gone_and_its_room_free(both_ends: BothEnds) -> None:
    out, back = both_ends()
    for i in range(12):  # more than fits at once
        out.flush(f"chunk-{i}", chunk_of(CHUNK_BYTES, i), WAIT_S)
        out.settle("", WAIT_S)
        assert np.array_equal(fetched(back, f"chunk-{i}", CHUNK_BYTES), chunk_of(CHUNK_BYTES, i))
        back.discard(f"chunk-{i}")
        if isinstance(out, LocalDisk):
            out.discard(f"chunk-{i}")
        with pytest.raises(DeadlineExceeded):
            fetched(back, f"chunk-{i}", CHUNK_BYTES, timeout_s=0.0)
        back.discard("unknown")


def test_a_full_place_says_so_and_takes_more_when_there_is_room(both_ends: BothEnds) -> None:
    out, back = both_ends()
    for i in range(4):
        out.flush(f"chunk-{i}", chunk_of(CHUNK_BYTES), WAIT_S)
        out.settle("", WAIT_S)
    with pytest.raises(NoCapacity):
        out.flush("chunk-4", chunk_of(CHUNK_BYTES), 0.01)
    fetched(back, "chunk-0", CHUNK_BYTES)
    back.discard("chunk-0")
    if isinstance(out, LocalDisk):
        out.discard("chunk-0")
    out.flush("chunk-4", chunk_of(CHUNK_BYTES, 4), WAIT_S)
    assert np.array_equal(fetched(back, "chunk-4", CHUNK_BYTES), chunk_of(CHUNK_BYTES, 4))


@pytest.mark.parametrize("name", ["", ".hidden", "~", "a/b", "../up", "a b", "a" * 201])
def test_names_that_could_leave_the_place_are_refused(both_ends: BothEnds, name: str) -> None:
    with pytest.raises(InvalidArgument, match="name"):
        both_ends()[0].flush(name, chunk_of(1), WAIT_S)


def test_a_chunk_of_another_size_is_refused(both_ends: BothEnds) -> None:
    out, back = both_ends()
    out.flush("chunk", chunk_of(100), WAIT_S)
    with pytest.raises(TransferFailed):
        fetched(back, "chunk", 101)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_file_is_found(tmp_path: Path, damage: str) -> None:
    disk = LocalDisk(tmp_path, 10**6)
    disk.flush("chunk", chunk_of(1000), WAIT_S)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes({"flipped": bytes(data), "short": path.read_bytes()[:-1], "empty": b""}[damage])
    with pytest.raises(TransferFailed):
        fetched(disk, "chunk", 1000)


def test_a_file_half_written_is_no_chunk(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path, 10**6)
    (tmp_path / ".chunk.part").write_bytes(b"KVCHUNK1")
    with pytest.raises(DeadlineExceeded):
        fetched(disk, "chunk", 100, timeout_s=0.0)
    disk.flush("chunk", chunk_of(100), WAIT_S)
    assert [path.name for path in tmp_path.iterdir()] == ["chunk.chunk"]


def test_a_folder_that_cannot_be_written_fails_the_flush_and_keeps_no_room(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path / "kv", 100)
    (tmp_path / "kv").rmdir()
    with pytest.raises(TransferFailed):
        disk.flush("chunk", chunk_of(100), WAIT_S)
    (tmp_path / "kv").mkdir()
    disk.flush("another", chunk_of(100), WAIT_S)


def test_a_receiver_that_is_gone_fails_what_is_under_way_and_frees_both_ends(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def closing(grant: Callable[[str, int, float], Ticket]) -> Callable[[str, int, float], Ticket]:
            def grant_and_close(name: str, byte_count: int, expires_in_s: float) -> Ticket:
                ticket = grant(name, byte_count, expires_in_s)
                receiver.close()
                return ticket

            return grant_and_close

        sender, receiver = linked(stack, "tcp", tmp_path, closing)
        sender.flush("chunk", chunk_of(CHUNK_BYTES), WAIT_S)
        with pytest.raises(TransferFailed, match="chunk"):
            sender.settle("", WAIT_S)
        sender.settle("", WAIT_S)  # a failure is told once
        receiver.check_integrity()


def test_a_flush_waits_for_room_at_the_receiver(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        asked = threading.Event()

        def telling(grant: Callable[[str, int, float], Ticket]) -> Callable[[str, int, float], Ticket]:
            def grant_and_tell(name: str, byte_count: int, expires_in_s: float) -> Ticket:
                try:
                    return grant(name, byte_count, expires_in_s)
                except NoCapacity:
                    asked.set()
                    raise

            return grant_and_tell

        sender, receiver = linked(stack, "unix", tmp_path, telling)
        for i in range(4):
            sender.flush(f"chunk-{i}", chunk_of(CHUNK_BYTES, i), WAIT_S)
        thread = threading.Thread(target=sender.flush, args=("chunk-4", chunk_of(CHUNK_BYTES, 4), WAIT_S))
        thread.start()
        assert asked.wait(WAIT_S)
        fetched(receiver, "chunk-0", CHUNK_BYTES)
        receiver.discard("chunk-0")
        thread.join(WAIT_S)
        assert np.array_equal(fetched(receiver, "chunk-4", CHUNK_BYTES), chunk_of(CHUNK_BYTES, 4))


def test_a_lost_chunk_is_told_to_its_owner_only(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def losing(grant: Callable[[str, int, float], Ticket]) -> Callable[[str, int, float], Ticket]:
            def grant_and_spoil(name: str, byte_count: int, expires_in_s: float) -> Ticket:
                ticket = grant(name, byte_count, expires_in_s)
                return replace(ticket, secret=bytes(16)) if name.startswith("a~") else ticket

            return grant_and_spoil

        sender, receiver = linked(stack, "unix", tmp_path, losing)
        sender.flush("a~1", chunk_of(100), WAIT_S)
        sender.flush("b~1", chunk_of(100), WAIT_S)
        sender.settle("b~", WAIT_S)
        with pytest.raises(TransferFailed, match=r"a~1: .*wrong secret"):
            sender.settle("a~", WAIT_S)
        sender.settle("a~", WAIT_S)
        assert np.array_equal(fetched(receiver, "b~1", 100), chunk_of(100))


def test_ends_of_different_block_sizes_refuse_each_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        _, receiver = linked(stack, "tcp", tmp_path)
        other = ChunkSender(receiver.grant, block_count=20, block_bytes=2 * BLOCK_BYTES)
        stack.callback(other.close)
        with pytest.raises(LayoutMismatch):
            other.flush("chunk", chunk_of(100), WAIT_S)
        other.settle("", 0.0)


def test_staging_is_bounded_aligned_and_comes_back() -> None:
    staging = StagingBuffers(5000, 2)
    with staging.lend(0.0) as one, staging.lend(0.0) as other:
        assert one.shape == other.shape == (5000,)
        assert one.ctypes.data % 4096 == other.ctypes.data % 4096 == 0
        assert not np.shares_memory(one, other)
        with pytest.raises(DeadlineExceeded):
            staging.acquire(0.0)
    assert staging.free_count == 2
