"""A socket link, frame by frame: which blocks share a frame, and what remains of a stopped write."""

import contextlib
import queue
import select
import socket
from collections.abc import Callable, Iterator, Sequence

import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import xxh3
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports.frames import HEADER_BYTES, Header, Kind, unpack_header
from kaveri.kv.transports.socket import SocketLink
from kaveri.kv.transports.stream import ByteStream, never
from kaveri.testing.transport_peer import fill_pool

LAYOUT = KvLayout("link", 2, block_tokens=4, kv_head_count=2, head_dim=5, dtype="float32")
ENDPOINT = KvEndpoint("unix", "nowhere")
TICKET = Ticket(b"t" * 16, b"s" * 16, 1, (ENDPOINT,), (0, 1, 2, 3), 16, 60.0, LAYOUT)
WRITE_BYTES = 3 * LAYOUT.block_bytes


class EndListener:
    def __init__(self, on_lost: Callable[[str], None] = lambda _: None) -> None:
        self.lost = on_lost

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        raise AssertionError

    def credited(self, byte_count: int, window_bytes: int) -> None:
        raise AssertionError


class Narrow(ByteStream):
    """ByteStream that stops its sender after a number of bytes."""

    room_bytes = 0

    def send(self, regions: Sequence[memoryview], is_stopped: Callable[[], bool] = never) -> int:
        if is_stopped is never:
            return super().send(regions)
        data = b"".join(regions)
        super().send([memoryview(data)[: self.room_bytes]])
        return max(0, len(data) - self.room_bytes)


class LinkPair:
    def __init__(self, on_lost: Callable[[str], None] = lambda _: None) -> None:
        near, self.far = socket.socketpair()
        self.far.settimeout(20.0)
        self.stream = Narrow(near, 10.0)
        self.pool = KvPool(LAYOUT, 4)
        fill_pool(self.pool, 5)
        self.link = SocketLink(self.stream, self.pool, EndListener(on_lost), ENDPOINT)

    def read(self, byte_count: int) -> bytes:
        data = b""
        while len(data) < byte_count:
            part = self.far.recv(byte_count - len(data))
            assert part, "the link has closed"
            data += part
        return data

    def frame(self) -> tuple[Header, bytes]:
        header = unpack_header(self.read(HEADER_BYTES))
        return header, self.read(header.payload_bytes)

    def is_silent(self) -> bool:
        return not select.select([self.far], [], [], 0)[0]

    def close(self) -> None:
        self.link.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[LinkPair]:
    pair = LinkPair()
    yield pair
    pair.close()


def test_the_same_blocks_of_several_layers_are_one_frame_and_the_end_brings_the_digest(pair: LinkPair) -> None:
    pair.stream.room_bytes = 1 << 20
    digest = xxh3()
    assert pair.link.write(TICKET, range(2), 0, [2, 0, 3], digest, lambda: False) == 6
    header, payload = pair.frame()
    assert header == Header(Kind.DATA, TICKET.transfer_id, 2 * WRITE_BYTES, range(2), 0, 3)
    assert payload == pair.pool.memory[:, [2, 0, 3]].tobytes()
    expected = xxh3()
    expected.update(memoryview(payload))
    assert digest.intdigest() == expected.intdigest()
    pair.link.finish(TICKET, b"note", 78)
    assert pair.frame() == (Header(Kind.END, TICKET.transfer_id, 4, digest=78), b"note")


@pytest.mark.parametrize("room_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + 9, HEADER_BYTES + 321])
def test_frames_stay_whole_wherever_a_write_is_stopped(pair: LinkPair, room_bytes: int) -> None:
    pair.stream.room_bytes = room_bytes
    assert pair.link.write(TICKET, range(1, 2), 0, [2, 0, 3], None, lambda: False) == 3
    pair.link.abort(TICKET)
    header, payload = pair.frame()
    assert header == Header(Kind.DATA, TICKET.transfer_id, WRITE_BYTES, range(1, 2), 0, 3)
    shown_bytes = max(0, room_bytes - HEADER_BYTES)
    assert payload[:shown_bytes] == pair.pool.memory[1, [2, 0, 3]].tobytes()[:shown_bytes]
    assert payload[shown_bytes:] == bytes(WRITE_BYTES - shown_bytes)
    assert pair.frame()[0].kind == Kind.ABORT
    assert pair.is_silent()


def test_a_write_that_is_not_wanted_any_more_sends_nothing(pair: LinkPair) -> None:
    assert pair.link.write(TICKET, range(1, 2), 0, [2, 0, 3], None, lambda: True) == 0
    pair.link.abort(TICKET)
    assert pair.frame()[0].kind == Kind.ABORT


def test_the_frames_after_a_stopped_write_are_as_they_should_be(pair: LinkPair) -> None:
    pair.stream.room_bytes = HEADER_BYTES
    assert pair.link.write(TICKET, range(1, 2), 0, [2, 0, 3], None, lambda: False) == 3
    pair.link.abort(TICKET)
    assert [pair.frame()[0].kind for _ in range(2)] == [Kind.DATA, Kind.ABORT]
    pair.stream.room_bytes = 1 << 20
    for _ in range(2):
        pair.link.write(TICKET, range(1), 0, [1], None, lambda: False)
        assert pair.frame()[1] == pair.pool.memory[0, 1].tobytes()
    pair.link.finish(TICKET, b"note", 0)
    assert pair.frame() == (Header(Kind.END, TICKET.transfer_id, 4), b"note")
    assert pair.is_silent()


def test_why_a_connection_is_lost_is_told_before_it_is_broken_off() -> None:
    # The sending thread fails on a connection that is broken off, and would name that as the reason.
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take(reason: str) -> None:
        pair.stream.send([b"stands"])
        told.put(reason)

    with contextlib.closing(LinkPair(take)) as pair:
        pair.far.shutdown(socket.SHUT_WR)
        assert pair.read(6) == b"stands"
        assert told.get(timeout=20.0) == "the peer closed the connection"
        assert pair.far.recv(1) == b""
