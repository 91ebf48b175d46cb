"""The socket transport, "tcp" and "unix": blocking sendmsg and recvmsg_into between pools, on threads of its own.

Payload goes from source blocks into the kernel and on into destination blocks, without intermediate copies. For each
connection, the sender's thread writes and one thread here reads the answers; one thread of the receiver reads, and
answers without waiting. frames.py shows the frames.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence

from kaveri.addresses import bind_socket, join_address, split_address
from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Capabilities, LinkListener, LinkLost, TransferIntake
from kaveri.kv.transports.frames import (
    CREDIT,
    HEADER_BYTES,
    HELLO_BYTES,
    MARKS_VERSION,
    OPENING,
    Header,
    Kind,
    pack_frame,
    pack_hello,
    unpack_extension,
    unpack_header,
    unpack_hello,
    unpack_payload,
)
from kaveri.kv.transports.socket_listener import ReceivingConnection, SocketListener
from kaveri.kv.transports.stream import BATCH_BYTES, ByteStream, batches
from kaveri.kv.transports.unix_path import UnixPath
from kaveri.telemetry.logs import get_logger

_BACKLOG = 128
_BUFFER_BYTES = 1 << 18
"""Socket buffer on one host: small enough for data in flight to stay in the second-level cache. Four times as much
costs a plain copy over loopback tcp up to a third of its speed, in calls of a batch."""
_TCP_SEND_BUFFER_BYTES = 1 << 17
"""Over loopback tcp, where a sender that finds room does all the work of the network, up to the receiver's queue. One
that has to wait leaves part of it to the receiver's core: a quarter faster with calls of a batch."""


class SocketTransport:
    """Transport over sockets of one address family, "tcp" or "unix", which is also its name except in subclasses.

    advertise_host: host in the endpoints of a tcp listener on a wildcard address; None: the listening host. Subclasses
    create other links over the same connections: _link() and connection_type.
    """

    connection_type: type[ReceivingConnection] = ReceivingConnection
    """Class that serves an accepted connection."""
    connect_timeout_s: float = 2.0
    progress_timeout_s: float = 10.0
    """A frame in progress that moves no byte for this long breaks its connection."""
    connection_limit: int = 256
    """Max connections of one listener; more are closed at once."""

    def __init__(self, family: str, advertise_host: str | None = None) -> None:
        assert family in ("tcp", "unix"), family
        self._is_unix = family == "unix"
        self.name = self.label = family
        self.advertise_host = advertise_host
        self.capabilities = Capabilities(
            can_revoke=True,
            is_byte_stream=True,
            write_bytes=4 << 20,
            path_addresses=self._is_unix,
        )

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> "SocketLink":
        try:
            if self._is_unix:
                connection = _connected_path(endpoint.address, self.connect_timeout_s)
            else:
                connection = socket.create_connection(split_address(endpoint.address), self.connect_timeout_s)
        except (OSError, ValueError, OverflowError) as error:
            raise LinkLost(f"{endpoint.transport} {endpoint.address}: {error}") from error
        try:
            # The kernel accepts connections for a hanging process; the hello proves that the process runs.
            stream = self._stream(connection, self.connect_timeout_s)
            stream.start()
            stream.send([pack_hello()])
            hello = unpack_hello(stream.receive_bytes(HELLO_BYTES))
            if hello.epoch != epoch:
                raise LinkLost(f"epoch {hello.epoch} answers at {endpoint.address}, the ticket is of epoch {epoch}")
            self._set_up(connection, self.progress_timeout_s)
            stream.progress_timeout_s = self.progress_timeout_s
            link = self._link(stream, pool, listener, endpoint)
            link.wants_digest, link.has_marks = hello.with_digests, hello.version >= MARKS_VERSION
            return link
        except BaseException:
            connection.close()
            raise

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> SocketListener:
        try:
            listening, path = self._listen(address)
        # OverflowError: a port beyond 65535.
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"kv {self.name} address", f"cannot listen on {address}: {reason}") from error
        endpoint = KvEndpoint(self.name, address if path is not None else _address_of(listening, self.advertise_host))
        with_digests = intake.wants_digests(self.capabilities)

        def make_connection(accepted: socket.socket) -> ReceivingConnection:
            stream = self._stream(accepted, self.progress_timeout_s, is_accepted=True)
            return self.connection_type(stream, pool, intake, with_digests)

        try:
            return SocketListener(listening, path, endpoint, self.connection_limit, make_connection)
        except RuntimeError as error:
            if path is not None:
                path.remove()
            listening.close()
            raise ConfigError(f"kv {self.name} address", f"cannot listen on {address}: {error}") from error

    def _stream(self, connected: socket.socket, progress_timeout_s: float, *, is_accepted: bool = False) -> ByteStream:
        self._set_up(connected, progress_timeout_s)
        return ByteStream(connected, progress_timeout_s)

    def _set_up(self, connected: socket.socket, progress_timeout_s: float) -> None:
        if not self._is_unix:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(progress_timeout_s * 1e3))
            # Detects within a minute that an idle peer's host is gone.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        # Only for peers on this host. For others the kernel adapts its buffers to the round trip.
        if self._is_unix or ipaddress.ip_address(connected.getsockname()[0]).is_loopback:
            send_bytes = _BUFFER_BYTES if self._is_unix else _TCP_SEND_BUFFER_BYTES
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def _link(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> "SocketLink":
        # The hellos were exchanged; the time limit of a connect still holds.
        return SocketLink(stream, pool, listener, endpoint)

    def _listen(self, address: str) -> tuple[socket.socket, UnixPath | None]:
        listening = socket.socket(socket.AF_UNIX) if self._is_unix else bind_socket(*split_address(address))
        try:
            if self._is_unix:
                return listening, UnixPath(listening, address, _BACKLOG)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening, None


class SocketLink:
    """A sender's connection over a socket; implements transport.Link. Its own thread reads the receiver's answers."""

    def __init__(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> None:
        self._stream = stream
        self._pool = pool
        self._listener = listener
        self.wants_digest = True
        self.has_marks = False
        # Unsent part of the last frame's header.
        self._held = b""
        # Unsent payload announced by the last DATA frame.
        self._owed_bytes = 0
        self._thread = threading.Thread(target=self._read_answers, name=f"kv-answers-{endpoint.transport}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LinkLost(f"no thread for the answers: {error}") from error

    @property
    def is_worn(self) -> bool:
        return self._stream.is_worn

    def open(self, ticket: Ticket) -> None:
        opening = OPENING.pack(ticket.secret, ticket.epoch)
        self._send(Header(Kind.OPEN, ticket.transfer_id, len(opening)), opening)

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        self._fill_frame()
        if is_stopped():
            return 0
        block_count = len(layers) * len(source_blocks)
        left_bytes = block_count * self._pool.layout.block_bytes
        head = pack_frame(Header(Kind.DATA, ticket.transfer_id, left_bytes, layers, first_index, len(source_blocks)))
        batch_bytes_max = BATCH_BYTES if digest is None else self._stream.digested_send_bytes
        for regions in batches(self._pool, layers, source_blocks, batch_bytes_max):
            if digest is not None:
                # Digest first: the kernel then copies from the cache.
                for region in regions:
                    digest.update(region)
            batch_bytes = sum(map(len, regions))
            unsent_bytes = self._stream.send([head, *regions] if head else regions, is_stopped)
            if unsent_bytes:
                unsent_head_bytes = max(0, unsent_bytes - batch_bytes)
                self._held = head[len(head) - unsent_head_bytes :] if unsent_head_bytes else b""
                self._owed_bytes = left_bytes - batch_bytes + unsent_bytes - unsent_head_bytes
                break
            left_bytes -= batch_bytes
            head = b""
        return block_count

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        self._send(Header(Kind.MARK, ticket.transfer_id, len(note), block_count=block_count, digest=digest), note)

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        self._send(Header(Kind.END, ticket.transfer_id, len(note), digest=digest), note)

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        self._send(Header(Kind.ABORT, ticket.transfer_id, first_index=int(keep_marked)))

    def break_off(self) -> None:
        self._stream.break_off()

    def close(self) -> None:
        self._stream.break_off()
        self._thread.join()
        self._stream.close()

    def _send(self, header: Header, payload: bytes = b"") -> None:
        self._fill_frame()
        self._stream.send([pack_frame(header, payload)])

    def _fill_frame(self) -> None:
        # A frame that was stopped half way. At the stop this would block while its source is waited for.
        if self._owed_bytes:
            self._stream.send([self._held])
            self._held = b""
            self._stream.fill(self._owed_bytes)
            self._owed_bytes = 0

    def _read_answers(self) -> None:
        reason = "the connection was closed"
        try:
            while True:
                header = unpack_header(self._stream.receive_next(HEADER_BYTES))
                payload = self._stream.receive_bytes(header.payload_bytes)
                self._take_answer(header, payload)
        except LinkLost as error:
            reason = error.reason
        except Exception as error:
            reason = f"the sender broke: {error!r}"
            get_logger().exception("kv_answers_unreadable")
        finally:
            # Report first: the sending thread fails once the link is broken off, without another reason.
            try:
                self._listener.lost(reason)
            finally:
                self.break_off()

    def _take_answer(self, header: Header, payload: bytes | bytearray) -> None:
        if header.kind == Kind.CREDIT:
            self._listener.credited(*unpack_payload(header, CREDIT, payload))
        elif header.kind == Kind.ACCEPTED:
            self._listener.answered(header.transfer_id, None)
        elif header.kind == Kind.REJECTED:
            self._listener.answered(header.transfer_id, payload.decode(errors="replace"))
        elif header.kind == Kind.MARKED:
            self._listener.marked(header.transfer_id, header.block_count)
        elif header.kind == Kind.EXTENDED:
            self._listener.extended(header.transfer_id, header.first_index, unpack_extension(header, payload))
        else:
            raise LinkLost(f"protocol error: {header.kind.name} from a receiver")


def _connected_path(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _address_of(listening: socket.socket, advertise_host: str | None) -> str:
    host, port = listening.getsockname()[:2]
    return join_address(advertise_host or host, port)
