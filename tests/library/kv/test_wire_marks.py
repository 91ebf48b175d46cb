"""Open transfers over a socket, with peers of protocol version 4, peers that lie, and garbage frames."""

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports import make_transports
from kaveri.kv.transports.frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    OLDEST_VERSION,
    VERSION,
    Header,
    Hello,
    Kind,
    pack_extensions,
    pack_frame,
    pack_hello,
    unpack_extension,
    unpack_header,
    unpack_hello,
)
from kaveri.testing.transport_peer import Recorder
from tests.library.kv.kv_pair import failure
from tests.library.kv.kv_stranger import EPOCH, LAYOUT, Stranger, credit_frame, require_honest_lands, require_landing

pytestmark = pytest.mark.usefixtures("nothing_left")

FUZZ_ROUNDS = 900
"""Of three mutated frames each."""


def test_two_sides_use_the_newest_version_that_both_speak() -> None:
    assert unpack_hello(pack_hello(7)) == Hello(7, False, VERSION)
    assert unpack_hello(pack_hello(7, True, 200)) == Hello(7, True, VERSION)
    # Version 4's hello: one version, nothing after the digests.
    former = struct.pack("<8sHB5xQ", b"KAVERIKV", 4, 1, 7)
    assert unpack_hello(former) == Hello(7, True, OLDEST_VERSION)
    # Version 4's view of our hello.
    assert struct.unpack("<8sHB5xQ", pack_hello(7, True)) == (b"KAVERIKV", 4, 1, 7)
    for version in (3, VERSION + 1):
        with pytest.raises(LinkLost, match=f"versions {version} to {version}"):
            unpack_hello(struct.pack("<8sHB5xQ", b"KAVERIKV", version, 1, 7))


def test_a_sender_of_the_former_version_is_served_but_for_open_transfers(
    receiver: KvReceiver, landed: Recorder, content: np.ndarray
) -> None:
    former = Stranger.at(receiver.endpoints[0])
    with former.socket:
        former.socket.sendall(pack_hello(version=0))
        unpack_hello(former.read(HELLO_BYTES))
        ticket = receiver.grant([0, 1, 4], 12, 30.0, is_open=True)
        former.open(ticket)
        kind, transfer_id, reason = former.answer()
        assert (kind, transfer_id) == (Kind.REJECTED, ticket.transfer_id)
        assert "no open transfers" in reason
        # At once: the blocks do not wait for the end of the ticket.
        assert landed.wait(ticket) == TransferReleased(ticket.transfer_id, reason)
        require_landing(receiver, landed, former, content)


class Scripted:
    def __init__(self, path: str, version: int) -> None:
        self.pushed = Recorder()
        self._version = version
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(1)
        self._endpoint = KvEndpoint("unix", path)
        self._pool = KvPool(LAYOUT, 8)

    @contextlib.contextmanager
    def pushing(self) -> Iterator[tuple[KvSender, Stranger, Ticket]]:
        ticket = Ticket(b"t" * 16, b"s" * 16, EPOCH, (self._endpoint,), (4, 2, 6), 12, 30.0, LAYOUT, is_open=True)
        with (
            self._listening,
            contextlib.closing(KvSender(self._pool, self.pushed, transports=make_transports())) as sender,
        ):
            sender.open(ticket)
            accepted, _ = self._listening.accept()
            with accepted:
                peer = Stranger(accepted)
                accepted.sendall(
                    pack_hello(EPOCH, with_digests=True, version=self._version) + credit_frame(1 << 20, 1 << 20)
                )
                peer.read(HELLO_BYTES)
                yield sender, peer, ticket


def _frame(peer: Stranger) -> tuple[Header, bytes]:
    header = unpack_header(peer.read(HEADER_BYTES))
    return header, peer.read(header.payload_bytes)


def test_an_open_push_to_a_receiver_of_the_former_version_fails_and_names_why(tmp_path: Path) -> None:
    scripted = Scripted(str(tmp_path / "kv.sock"), version=0)
    with scripted.pushing() as (sender, peer, ticket):
        assert "no open transfers" in failure(scripted.pushed, ticket)
        plain = Ticket(b"p" * 16, b"s" * 16, EPOCH, ticket.endpoints, (), 0, 30.0, LAYOUT)
        sender.open(plain)
        sender.finish(plain.transfer_id, b"")
        assert [_frame(peer)[0].kind for _ in range(2)] == [Kind.OPEN, Kind.END]
        peer.send(Header(Kind.ACCEPTED, plain.transfer_id))
        assert isinstance(scripted.pushed.wait(plain), PushAccepted)


def test_a_mark_is_behind_its_blocks_with_the_digest_of_all_before(tmp_path: Path) -> None:
    scripted = Scripted(str(tmp_path / "kv.sock"), VERSION)
    with scripted.pushing() as (sender, peer, ticket):
        digest = xxhash.xxh3_64()
        for count in (1, 2):
            for layer in range(LAYOUT.layer_count):
                sender.write(ticket.transfer_id, layer, count - 1, [count])
            sender.mark(ticket.transfer_id, count, b"note")
        peer_frames = []
        while len(peer_frames) < 2:
            header, payload = _frame(peer)
            if header.kind == Kind.DATA:
                digest.update(payload)
            elif header.kind == Kind.MARK:
                assert (header.digest, payload) == (digest.intdigest(), b"note")
                peer_frames.append(header.block_count)
        assert peer_frames == [1, 2]
        peer.send(Header(Kind.MARKED, ticket.transfer_id, block_count=1))
        scripted.pushed.wait_for_step(PushMarked(ticket.transfer_id, 1))
        peer.send(Header(Kind.MARKED, ticket.transfer_id, block_count=3))
        assert "block 3 was marked by the receiver" in failure(scripted.pushed, ticket)


def test_extensions_that_leave_blocks_out_end_the_push(tmp_path: Path) -> None:
    scripted = Scripted(str(tmp_path / "kv.sock"), VERSION)
    with scripted.pushing() as (_, peer, ticket):
        assert _frame(peer)[0].kind == Kind.OPEN
        for frame in pack_extensions(ticket.transfer_id, 3, [7, 1]):
            peer.socket.sendall(frame)
        scripted.pushed.wait_for_step(PushExtended(ticket.transfer_id, 5))
        for frame in pack_extensions(ticket.transfer_id, 6, [0]):
            peer.socket.sendall(frame)
        assert "extended at block 6" in failure(scripted.pushed, ticket)


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([("data", 0, 1), ("mark", 0)], "a mark at block 0, behind 0 marked and 1 there"),
        ([("data", 0, 1), ("mark", 2)], "a mark at block 2, behind 0 marked and 1 there"),
        ([("data", 0, 2), ("mark", 2), ("mark", 2)], "a mark at block 2, behind 2 marked"),
        ([("data", 0, 2), ("mark", 2), ("mark", 1)], "a mark at block 1, behind 2 marked"),
        ([("layer 0", 0, 2), ("mark", 1)], "behind 0 marked and 0 there"),
        ([("data", 0, 1), ("wrong mark", 1)], "wrong digest"),
        ([("data", 0, 1), ("mark", 1), ("data", 2, 3)], "block 2 came where block 1 was due"),
        ([("data", 0, 1), ("data", 0, 1)], "block 0 came where block 1 was due"),
        ([("data", 0, 1), ("mark", 1), ("data", 1, 4)], "block 3 of 3"),
        ([("data", 0, 1), ("mark", 1), ("layer 0", 1, 2), ("end",)], "1 layers are incomplete"),
    ],
)
def test_a_mark_that_lies_and_blocks_outside_the_grant_end_their_transfer_only(
    receiver: KvReceiver,
    landed: Recorder,
    stranger: Stranger,
    content: np.ndarray,
    frames: list[tuple[object, ...]],
    complaint: str,
) -> None:
    ticket = receiver.grant([0, 1, 4], 12, 30.0, is_open=True)
    stranger.open(ticket)
    digest = xxhash.xxh3_64()
    for kind, *counts in frames:
        if kind in ("data", "layer 0"):
            start, end = counts
            blocks = np.resize(content, (2, 8, LAYOUT.block_bytes))[:, start:end]
            layers = range(1 if kind == "layer 0" else 2)
            payload = blocks[: len(layers)].tobytes()
            digest.update(payload)
            data = Header(Kind.DATA, ticket.transfer_id, len(payload), layers, start, end - start)
            stranger.send(data, payload)
        elif kind == "end":
            stranger.send(Header(Kind.END, ticket.transfer_id, digest=digest.intdigest()))
        else:
            told = digest.intdigest() ^ (kind == "wrong mark")
            stranger.send(Header(Kind.MARK, ticket.transfer_id, 1, block_count=counts[0], digest=told), b"n")
    kept_count = 0
    while (answer := stranger.answer())[0] == Kind.MARKED:
        kept_count += 1
    assert answer[:2] == (Kind.REJECTED, ticket.transfer_id)
    assert complaint in answer[2]
    event = landed.wait(ticket)
    assert event == TransferReleased(ticket.transfer_id, answer[2], False)
    assert len(landed.steps.get(ticket.transfer_id, ())) == kept_count
    require_landing(receiver, landed, stranger, content)


def test_an_ordinary_transfer_is_not_marked(receiver: KvReceiver, landed: Recorder, stranger: Stranger) -> None:
    ticket = receiver.grant([0], 4, 30.0)
    stranger.open(ticket)
    stranger.send(Header(Kind.MARK, ticket.transfer_id, block_count=1))
    assert "not open" in stranger.answer()[2]
    assert isinstance(landed.wait(ticket), TransferReleased)


def test_a_mark_of_a_foreign_transfer_is_refused_and_changes_nothing(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = receiver.grant([0], 4, 30.0, is_open=True)
    stranger.send(Header(Kind.MARK, ticket.transfer_id, block_count=1))
    assert stranger.answer() == (Kind.REJECTED, ticket.transfer_id, "no such transfer on this connection")
    require_landing(receiver, landed, stranger, content)
    stranger.open(ticket)
    stranger.send(Header(Kind.ABORT, ticket.transfer_id))
    assert landed.wait(ticket) == TransferReleased(ticket.transfer_id, "the sender gave up", given_up=True)


def test_a_mark_within_the_next_write_of_a_frozen_sender_stands(
    receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray
) -> None:
    ticket = receiver.grant([0, 1, 4], 12, 30.0, is_open=True)
    stranger.open(ticket)
    first = content[:, :1].tobytes()
    stranger.send(Header(Kind.DATA, ticket.transfer_id, len(first), range(2), 0, 1), first)
    stranger.send(Header(Kind.MARK, ticket.transfer_id, block_count=1, digest=xxhash.xxh3_64(first).intdigest()))
    landed.wait_for_step(TransferMarked(ticket.transfer_id, 1, b""))
    # Less than it says, and then nothing: the progress limit ends the connection.
    stranger.send(Header(Kind.DATA, ticket.transfer_id, len(first), range(2), 1, 1), first[:100])
    event = landed.wait(ticket)
    assert isinstance(event, TransferReleased)
    assert not event.given_up
    assert (receiver.pool.memory[:, 0] == content[:, 0]).all()


def test_an_extension_of_the_wrong_size_cannot_be_a_frame() -> None:
    (frame,) = pack_extensions(bytes(16), 3, [7, 2**32 - 1])
    header = unpack_header(frame[:HEADER_BYTES])
    assert unpack_extension(header, frame[HEADER_BYTES:]) == (7, 2**32 - 1)
    for payload in (frame[HEADER_BYTES:-1], b"", frame[HEADER_BYTES:] + bytes(4)):
        with pytest.raises(LinkLost, match="EXTENDED of"):
            unpack_extension(header, payload)
    frames = list(pack_extensions(bytes(16), 0, range(2500)))
    headers = [unpack_header(each[:HEADER_BYTES]) for each in frames]
    assert [(each.first_index, each.block_count) for each in headers] == [(0, 1024), (1024, 1024), (2048, 452)]


def _mutated(chance: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        how, at = chance.randrange(3), chance.randrange(len(changed))
        if how == 0:
            changed[at] = chance.randrange(256)
        elif how == 1:
            del changed[at : at + chance.randint(1, 8)]
        else:
            changed[at:at] = chance.randbytes(chance.randint(1, 8))
        if not changed:
            return b"\0"
    return bytes(changed)


def test_no_mutated_mark_breaks_a_receiver_or_moves_a_mark(
    receiver: KvReceiver, landed: Recorder, content: np.ndarray
) -> None:
    chance = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    first = content[:, :1].tobytes()
    for _ in range(FUZZ_ROUNDS):
        ticket = receiver.grant([0, 1, 4], 12, 30.0, is_open=True)
        stranger = Stranger.at(receiver.endpoints[0])
        with stranger.socket, contextlib.suppress(OSError):
            stranger.greet()
            stranger.open(ticket)
            stranger.send(Header(Kind.DATA, ticket.transfer_id, len(first), range(2), 0, 1), first)
            digest = xxhash.xxh3_64(first).intdigest()
            mark = pack_frame(Header(Kind.MARK, ticket.transfer_id, 4, block_count=1, digest=digest), b"note")
            end = pack_frame(Header(Kind.END, ticket.transfer_id, digest=digest))
            stranger.socket.sendall(_mutated(chance, mark + mark + end))
            stranger.socket.shutdown(socket.SHUT_WR)
        receiver.revoke(ticket.transfer_id)
        landed.wait(ticket)
        assert all(step.block_count == 1 for step in landed.steps.get(ticket.transfer_id, ()))
        receiver.check_integrity()
    require_honest_lands(receiver, landed, content)


def test_no_mutated_answer_breaks_a_sender(tmp_path: Path) -> None:
    chance = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    for number in range(FUZZ_ROUNDS // 9):
        scripted = Scripted(str(tmp_path / f"{number}.sock"), VERSION)
        with scripted.pushing() as (sender, peer, ticket):
            for layer in range(LAYOUT.layer_count):
                sender.write(ticket.transfer_id, layer, 0, [5])
            sender.mark(ticket.transfer_id, 1, b"")
            while _frame(peer)[0].kind != Kind.MARK:
                pass
            answers = pack_frame(Header(Kind.MARKED, ticket.transfer_id, block_count=1))
            answers += b"".join(pack_extensions(ticket.transfer_id, 3, [7, 1]))
            answers += pack_frame(Header(Kind.MARKED, ticket.transfer_id, block_count=2))
            with contextlib.suppress(OSError):
                peer.socket.sendall(_mutated(chance, answers))
                peer.socket.shutdown(socket.SHUT_RDWR)
            assert isinstance(scripted.pushed.wait(ticket), PushFailed)
        assert not scripted.pushed.doubled
