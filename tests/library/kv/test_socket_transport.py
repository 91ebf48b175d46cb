"""The socket transport against raw peers that break the protocol."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports import make_transports
from kaveri.kv.transports.frames import (
    CREDIT,
    HEADER_BYTES,
    HELLO_BYTES,
    VERSION,
    Header,
    Kind,
    pack_frame,
    pack_hello,
    unpack_header,
)
from kaveri.kv.transports.socket import SocketTransport
from kaveri.testing.transport_peer import WAIT_S, Recorder, wait_until
from tests.library.kv.kv_pair import failure, limited, receiving, release
from tests.library.kv.kv_stranger import EPOCH, LAYOUT, Stranger, credit_frame, require_landing

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def connect(receiver: KvReceiver) -> Iterator[Callable[[], Stranger]]:
    with contextlib.ExitStack() as stack:

        def connect() -> Stranger:
            stranger = Stranger.at(receiver.endpoints[0])
            stack.enter_context(stranger.socket)
            return stranger

        yield connect


Connect = Callable[[], Stranger]


HELLO = pack_hello()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n",
        bytes(range(256)) * 64,
        bytes(HELLO_BYTES),
        # The oldest version that the peer speaks is newer than any that is spoken here.
        HELLO[:8] + bytes([VERSION + 1]) + HELLO[9:],
        HELLO + b"\xff" * HEADER_BYTES,
        HELLO + pack_frame(Header(Kind.DATA, bytes(16), payload_bytes=1 << 60)),
        b"",
    ],
)
def test_garbage_is_sent_away_and_disturbs_nobody(
    receiver: KvReceiver, landed: Recorder, connect: Connect, content: np.ndarray, garbage: bytes
) -> None:
    honest = connect()
    honest.greet()
    stranger = connect()
    stranger.socket.sendall(garbage)
    stranger.require_closed()
    require_landing(receiver, landed, honest, content)


def test_a_sender_does_not_stay_connected_to_another_life_of_its_receiver(receiver: KvReceiver) -> None:
    with pytest.raises(LinkLost, match=f"epoch {EPOCH} answers"):
        SocketTransport("tcp").connect(receiver.endpoints[0], EPOCH - 1, KvPool(LAYOUT, 4), Mock()).close()


def test_one_connection_too_many_is_closed_and_the_others_work(
    receiver: KvReceiver, landed: Recorder, connect: Connect, content: np.ndarray
) -> None:
    guests = [connect() for _ in range(4)]
    for guest in guests:
        guest.greet()
        require_landing(receiver, landed, guest, content)
    connect().require_closed()
    require_landing(receiver, landed, guests[0], content)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (Header(Kind.DATA, b"", LAYOUT.block_bytes, layers=range(2, 3), block_count=1), "layer 2 of 2"),
        (Header(Kind.DATA, b"", 4 * LAYOUT.block_bytes, block_count=4), "block 3 of 3"),
        (Header(Kind.DATA, b"", LAYOUT.block_bytes, first_index=2**32 - 1, block_count=1), "of 3"),
        (Header(Kind.DATA, b"", LAYOUT.block_bytes, first_index=1, block_count=1), "where block 0 was due"),
        (Header(Kind.DATA, b"", 3 * LAYOUT.block_bytes + 1, block_count=3), "bytes came for 3 blocks"),
        (Header(Kind.DATA, b"", LAYOUT.block_bytes - 1, block_count=1), "bytes came for 1 blocks"),
        (Header(Kind.DATA, b"", 2 * LAYOUT.block_bytes, layers=range(1, 3), block_count=1), "layer 2 of 2"),
        (Header(Kind.DATA, b"", LAYOUT.block_bytes, layers=range(0), block_count=1), "of 2"),
        (Header(Kind.DATA, b"", LAYOUT.block_bytes, layers=range(2), block_count=1), "bytes came for 2 blocks"),
        (Header(Kind.END, b""), "2 layers are incomplete"),
    ],
)
def test_a_frame_outside_the_lease_ends_its_transfer_only(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray, frame: Header, complaint: str
) -> None:
    before = receiver.pool.memory.copy()
    ticket = stranger.opened(receiver, [0, 1, 4])
    stranger.send(frame._replace(transfer_id=ticket.transfer_id), b"x" * frame.payload_bytes)
    kind, transfer_id, reason = stranger.answer()
    assert (kind, transfer_id) == (Kind.REJECTED, ticket.transfer_id)
    assert complaint in reason
    event = landed.wait(ticket)
    assert isinstance(event, TransferReleased)
    assert event.reason == reason
    assert (receiver.pool.memory == before).all()
    require_landing(receiver, landed, stranger, content)


def test_the_same_blocks_of_all_layers_land_from_one_frame(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = stranger.opened(receiver, [6, 2, 3])
    header = Header(Kind.DATA, ticket.transfer_id, content.nbytes, range(len(content)), 0, 3)
    stranger.send(header, content.tobytes())
    stranger.send(Header(Kind.END, ticket.transfer_id, digest=xxhash.xxh3_64(content.tobytes()).intdigest()))
    assert stranger.answer() == (Kind.ACCEPTED, ticket.transfer_id, "")
    assert (receiver.pool.memory[:, [6, 2, 3]] == content).all()


def test_a_second_end_is_refused_and_the_landing_stands(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    require_landing(receiver, landed, stranger, content)
    (transfer_id,) = landed.events
    stranger.send(Header(Kind.END, transfer_id))
    kind, refused, _ = stranger.answer()
    assert (kind, refused) == (Kind.REJECTED, transfer_id)


def test_a_byte_flipped_on_the_way_is_found(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = stranger.opened(receiver, [0, 1, 4])
    digest = xxhash.xxh3_64(content.tobytes()).intdigest()
    content[0, 1, 77] ^= 1
    header = Header(Kind.DATA, ticket.transfer_id, content.nbytes, range(len(content)), 0, 3)
    stranger.send(header, content.tobytes())
    stranger.send(Header(Kind.END, ticket.transfer_id, digest=digest))
    assert "digest" in stranger.answer()[2]
    assert isinstance(landed.wait(ticket), TransferReleased)


def test_a_transfer_revoked_within_a_frame_is_fenced_while_its_sender_stands_still(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = stranger.opened(receiver, [0, 1, 4])
    data = content[0].tobytes()
    half = len(data) // 2
    stranger.send(Header(Kind.DATA, ticket.transfer_id, len(data), range(1), 0, 3), data[:half])
    wait_until(lambda: bool((receiver.pool.memory[0, 0] == content[0, 0]).all()), "the first block has arrived")
    receiver.revoke(ticket.transfer_id)
    assert isinstance(landed.wait(ticket), TransferReleased)
    assert stranger.answer() == (Kind.REJECTED, ticket.transfer_id, "revoked")
    # The blocks belong to another transfer by now, and the rest of the frame must not touch them.
    receiver.pool.memory[:] = 0
    stranger.socket.sendall(data[half:])
    require_landing(receiver, landed, stranger, content)
    assert not receiver.pool.memory[:, [0, 1, 4]].any()


def test_a_sender_that_stops_within_a_frame_loses_its_connection(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = stranger.opened(receiver, [0, 1, 4])
    stranger.send(Header(Kind.DATA, ticket.transfer_id, content[0].nbytes, range(1), 0, 3), b"x" * 100)
    assert "nothing arrived" in release(landed, ticket)


def test_a_sender_that_overruns_its_credit_is_refused_before_a_byte_of_it_is_let_in(content: np.ndarray) -> None:
    pool = KvPool(LAYOUT, 8)
    with (
        receiving(pool, KvEndpoint("tcp", "127.0.0.1:0"), epoch=EPOCH, credit_bytes=1) as (receiver, landed),
        Stranger.at(receiver.endpoints[0]).socket as connection,
    ):
        stranger = Stranger(connection)
        stranger.greet()
        header = unpack_header(stranger.read(HEADER_BYTES))
        assert header.kind == Kind.CREDIT
        # Two blocks are the least that a sender is given, and it sends three.
        assert CREDIT.unpack(stranger.read(header.payload_bytes)) == (2 * LAYOUT.block_bytes,) * 2
        ticket = receiver.grant([6, 2, 3], 12, 30.0)
        stranger.open(ticket)
        stranger.send(Header(Kind.DATA, ticket.transfer_id, content[0].nbytes, range(1), 0, 3), content[0].tobytes())
        assert "beyond the sender's credit" in release(landed, ticket)
        assert not pool.memory.any()
        wait_until(lambda: receiver.flow().held_bytes == 0, "its credit is home")
        receiver.check_integrity()


LARGE_LAYOUT = KvLayout("m", 1, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
BLOCK_BYTES = LARGE_LAYOUT.block_bytes


@contextlib.contextmanager
def pushing_to_deaf(
    folder: Path,
    credit_bytes: int = 1 << 30,
    expires_in_s: float = 30.0,
    progress_timeout_s: float = 10.0,
    credit_timeout_s: float = 10.0,
) -> Iterator[tuple[KvSender, Recorder, Ticket, socket.socket]]:
    """Push 1024 blocks to a peer that answers the hello, gives credit, and reads no more."""
    endpoint = KvEndpoint("unix", str(folder / "deaf.sock"))
    ticket = Ticket(b"t" * 16, b"s" * 16, EPOCH, (endpoint,), tuple(range(1024)), 4096, expires_in_s, LARGE_LAYOUT)
    pushed, transport = Recorder(), limited(SocketTransport("unix"), progress_timeout_s=progress_timeout_s)
    sender = KvSender(KvPool(LARGE_LAYOUT, 1024), pushed, transports=[transport], credit_timeout_s=credit_timeout_s)
    with socket.socket(socket.AF_UNIX) as listening, contextlib.closing(sender):
        listening.bind(endpoint.address)
        listening.listen(1)
        sender.open(ticket)
        sender.write(ticket.transfer_id, 0, 0, range(1024))
        accepted, _ = listening.accept()
        with accepted:
            accepted.sendall(pack_hello(EPOCH) + credit_frame(credit_bytes, credit_bytes))
            yield sender, pushed, ticket, accepted


def test_a_receiver_that_reads_nothing_fails_the_push_after_the_progress_limit(tmp_path: Path) -> None:
    with pushing_to_deaf(tmp_path, progress_timeout_s=0.3) as (_, pushed, ticket, _):
        assert "nothing was taken" in failure(pushed, ticket)


def test_a_push_aborted_within_a_frame_is_fenced_while_its_receiver_stands_still(tmp_path: Path) -> None:
    with pushing_to_deaf(tmp_path) as (sender, pushed, ticket, accepted):
        # Once a block is here the sender is in the middle of a frame that is not read.
        accepted.recv(BLOCK_BYTES, socket.MSG_WAITALL)
        sender.abort(ticket.transfer_id)
        assert pushed.wait(ticket) == PushFailed(ticket.transfer_id, "aborted")


def test_a_push_that_waits_for_credit_past_its_ticket_fails(tmp_path: Path) -> None:
    with pushing_to_deaf(tmp_path, credit_bytes=BLOCK_BYTES, expires_in_s=0.2) as (_, pushed, ticket, _):
        assert pushed.wait(ticket) == PushFailed(ticket.transfer_id, "the ticket expired")


def test_a_sender_writes_as_far_as_its_credit(tmp_path: Path) -> None:
    with pushing_to_deaf(tmp_path, credit_bytes=3 * BLOCK_BYTES + 100) as (sender, pushed, ticket, accepted):
        stranger = Stranger(accepted)
        stranger.read(HELLO_BYTES)
        opening = unpack_header(stranger.read(HEADER_BYTES))
        stranger.read(opening.payload_bytes)
        arrived: list[int] = []
        while sum(arrived) < 3:
            arrived.append(take_blocks(stranger))
        accepted.sendall(credit_frame(BLOCK_BYTES - 200, BLOCK_BYTES))
        wait_until(lambda: sender.flow().peers[0].credit_bytes == BLOCK_BYTES - 100, "the credit is counted")
        wait_until(lambda: sender.flow().peers[0].is_waiting, "the sender waits for more")
        accepted.sendall(credit_frame(100, BLOCK_BYTES))
        assert take_blocks(stranger) == 1
        sender.abort(ticket.transfer_id)
        assert isinstance(pushed.wait(ticket), PushFailed)
        # An abort needs no credit, and nothing else has come.
        assert unpack_header(stranger.read(HEADER_BYTES)).kind == Kind.ABORT
        assert sender.flow().credit_waits > 0


def take_blocks(stranger: Stranger) -> int:
    header = unpack_header(stranger.read(HEADER_BYTES))
    assert header.kind == Kind.DATA
    stranger.read(header.payload_bytes)
    return header.block_count


def test_a_receiver_that_gives_no_credit_is_taken_for_gone(tmp_path: Path) -> None:
    with pushing_to_deaf(tmp_path, credit_bytes=0, credit_timeout_s=0.2) as (_, pushed, ticket, accepted):
        assert "no credit came for 0.2 s" in failure(pushed, ticket)
        accepted.settimeout(WAIT_S)
        while accepted.recv(1 << 16):
            pass


def test_an_address_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    pool = KvPool(LAYOUT, 1)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        for endpoint in (
            KvEndpoint("tcp", taken),
            KvEndpoint("tcp", "no-port"),
            KvEndpoint("tcp", "127.0.0.1:65536"),
            KvEndpoint("unix", str(tmp_path / ("x" * 200))),
            KvEndpoint("unix", str(tmp_path / "absent" / "kv.sock")),
            KvEndpoint("rdma", "x"),
        ):
            with pytest.raises(ConfigError):
                KvReceiver(pool, Recorder(), listen=[endpoint], epoch=1, transports=make_transports())


def test_a_wildcard_listener_says_the_advertised_host() -> None:
    transport = SocketTransport("tcp", advertise_host="decode-1.example")
    with receiving(KvPool(LAYOUT, 1), KvEndpoint("tcp", "0.0.0.0:0"), transports=[transport]) as (receiver, _):
        assert receiver.endpoints[0].address.startswith("decode-1.example:")


def test_connecting_to_a_frozen_receiver_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(path)
        frozen.listen(1)
        transport = limited(SocketTransport("unix"), connect_timeout_s=0.1)
        with pytest.raises(LinkLost, match="nothing arrived"):
            transport.connect(KvEndpoint("unix", path), 1, KvPool(LAYOUT, 1), Mock())
