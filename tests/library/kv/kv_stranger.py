"""A raw socket peer of a receiver, which sends arbitrary frames."""

import contextlib
import socket

import numpy as np

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.digest import xxh3
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports.frames import (
    CREDIT,
    HEADER_BYTES,
    HELLO_BYTES,
    OPENING,
    Header,
    Kind,
    pack_frame,
    pack_hello,
    unpack_header,
    unpack_hello,
)
from kaveri.testing.transport_peer import WAIT_S, Recorder

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
EPOCH = 2**63 + 5


def credit_frame(byte_count: int, window_bytes: int) -> bytes:
    return pack_frame(Header(Kind.CREDIT, bytes(16), CREDIT.size), CREDIT.pack(byte_count, window_bytes))


class Stranger:
    """Raw connection to a receiver, which sends arbitrary frames."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(WAIT_S)

    @staticmethod
    def at(endpoint: KvEndpoint) -> "Stranger":
        if endpoint.address.startswith("/"):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(endpoint.address)
        else:
            host, port = endpoint.address.split(":")
            connection = socket.create_connection((host, int(port)))
        return Stranger(connection)

    def greet(self) -> None:
        self.socket.sendall(pack_hello())
        assert unpack_hello(self.read(HELLO_BYTES)).epoch == EPOCH

    def send(self, header: Header, payload: bytes = b"") -> None:
        self.socket.sendall(pack_frame(header, payload))

    def open(self, ticket: Ticket) -> None:
        opening = OPENING.pack(ticket.secret, ticket.epoch)
        self.send(Header(Kind.OPEN, ticket.transfer_id, len(opening)), opening)

    def opened(self, receiver: KvReceiver, block_ids: list[int]) -> Ticket:
        ticket = receiver.grant(block_ids, len(block_ids) * LAYOUT.block_tokens, 30.0)
        self.open(ticket)
        return ticket

    def push(self, ticket: Ticket, blocks: np.ndarray) -> None:
        digest = xxh3()
        for layer, content in enumerate(blocks):
            digest.update(content.data.cast("B"))
            self.send(
                Header(Kind.DATA, ticket.transfer_id, content.nbytes, range(layer, layer + 1), 0, len(content)),
                content.tobytes(),
            )
        self.send(Header(Kind.END, ticket.transfer_id, digest=digest.intdigest()))

    def read(self, byte_count: int) -> bytes:
        data = b""
        while len(data) < byte_count:
            part = self.socket.recv(byte_count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def answer(self) -> tuple[Kind, bytes, str]:
        """Return the next frame that is not CREDIT."""
        while True:
            header = unpack_header(self.read(HEADER_BYTES))
            payload = self.read(header.payload_bytes)
            if header.kind != Kind.CREDIT:
                return header.kind, header.transfer_id, payload.decode()

    def require_closed(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                frame = data.removeprefix(pack_hello(EPOCH, with_digests=True))
                assert not frame or unpack_header(frame[:HEADER_BYTES]).kind == Kind.CREDIT


def require_landing(receiver: KvReceiver, landed: Recorder, stranger: Stranger, content: np.ndarray) -> None:
    ticket = receiver.grant([6, 2, 3], 12, 30.0)
    stranger.open(ticket)
    stranger.push(ticket, content)
    assert stranger.answer() == (Kind.ACCEPTED, ticket.transfer_id, "")
    assert isinstance(landed.wait(ticket), TransferLanded)
    assert (receiver.pool.memory[:, [6, 2, 3]] == content).all()


def require_honest_lands(receiver: KvReceiver, landed: Recorder, content: np.ndarray) -> None:
    honest = Stranger.at(receiver.endpoints[0])
    with honest.socket:
        honest.greet()
        require_landing(receiver, landed, honest, content)
