"""Receiving end of the socket transport: accepts connections; a thread for each reads its bytes into pool blocks."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Credit, Landing, LinkLost, TransferIntake
from kaveri.kv.transports.frames import (
    CREDIT,
    HEADER_BYTES,
    HELLO_BYTES,
    MARKS_VERSION,
    OPENING,
    SMALL_PAYLOAD_BYTES,
    Header,
    Kind,
    pack_extensions,
    pack_frame,
    pack_hello,
    unpack_header,
    unpack_hello,
    unpack_payload,
)
from kaveri.kv.transports.stream import BATCH_BYTES, ByteStream, batches
from kaveri.kv.transports.unix_path import UnixPath
from kaveri.telemetry.logs import get_logger

_TICKET_WITHIN_S = 10.0
"""Seconds after the greeting within which a connection must open a transfer with a valid ticket, as all senders do."""


_LEAVING_WITHIN_S = 1.0
_LEAVING_CHECK_S = 0.05


class SocketListener:
    """Accepts senders' connections, each read by its own thread; implements transport.Listener.

    Anyone who reaches the address may connect. So a connection without a valid ticket yet is a stranger's: it is
    dropped after _TICKET_WITHIN_S seconds, or earlier, the oldest first, when a new one needs its place. path: that of
    a Unix socket. make_connection: serves an accepted socket. Raises RuntimeError when no thread can be started; the
    caller then still owns socket and path.
    """

    def __init__(
        self,
        listening: socket.socket,
        path: UnixPath | None,
        endpoint: KvEndpoint,
        connection_limit: int,
        make_connection: "Callable[[socket.socket], ReceivingConnection]",
    ) -> None:
        self._connection_limit = connection_limit
        self._make_connection = make_connection
        self._listening = listening
        self._path = path
        self._lock = threading.Lock()
        # In order of arrival.
        self._connections: dict[threading.Thread, ReceivingConnection] = {}
        # Threads whose connection has lost its place, and that may still run.
        self._leaving: set[threading.Thread] = set()
        self._closing = threading.Event()
        self.endpoint = endpoint
        self._thread = threading.Thread(target=self._accept, name=f"kv-accept-{endpoint.transport}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._path is not None:
            self._path.remove()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        with self._lock:
            threads = (*self._connections, *self._leaving)
            for connection in self._connections.values():
                connection.break_off()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        log = get_logger()
        while not self._closing.is_set():
            try:
                accepted, _ = self._listening.accept()
            except OSError as error:
                if not self._closing.is_set():
                    # Most likely out of descriptors: connections wait in the backlog meanwhile.
                    log.warning("kv_accept_failed", reason=error.strerror)
                    self._closing.wait(0.2)
                continue
            self._wait_for_leaving()
            try:
                with self._lock:
                    has_room = self._begin(accepted)
            except Exception as error:
                # Out of threads, or the connection is gone already: continue with the next one.
                accepted.close()
                log.warning("kv_accept_failed", reason=str(error))
                continue
            if not has_room:
                accepted.close()
                log.warning("kv_connection_refused", reason="too many", limit=self._connection_limit)

    def _wait_for_leaving(self) -> None:
        # Slows a flood of strangers to the rate at which their connections end: they hold threads until then.
        give_up_at_s = time.monotonic() + _LEAVING_WITHIN_S
        while time.monotonic() < give_up_at_s:
            with self._lock:
                self._leaving = {thread for thread in self._leaving if thread.is_alive()}
                if len(self._leaving) < self._connection_limit:
                    return
                last = next(iter(self._leaving))
            last.join(_LEAVING_CHECK_S)

    def _begin(self, accepted: socket.socket) -> bool:
        # Under the lock. If it raises, or returns False for lack of room, the caller still owns the socket.
        if len(self._connections) >= self._connection_limit:
            stranger = next((thread for thread, each in self._connections.items() if each.drop_stranger()), None)
            if stranger is None:
                return False
            del self._connections[stranger]
            self._leaving.add(stranger)
        connection = self._make_connection(accepted)
        name = f"kv-receive-{self.endpoint.transport}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        self._connections[thread] = connection
        try:
            thread.start()
        except BaseException:
            del self._connections[thread]
            raise
        return True

    def _serve(self, connection: "ReceivingConnection") -> None:
        try:
            connection.run()
        except Exception:
            get_logger().exception("kv_connection_failed")
        finally:
            # Under the lock, so close() never shuts down a reused descriptor.
            with self._lock:
                self._leaving = {thread for thread in self._leaving if thread.is_alive()}
                self._leaving.add(threading.current_thread())
                self._connections.pop(threading.current_thread(), None)
                connection.close()


class ReceivingConnection:
    """Receiving side of one sender's connection over a socket."""

    def __init__(self, stream: ByteStream, pool: KvPool, intake: TransferIntake, with_digests: bool) -> None:
        self._stream = stream
        self._pool = pool
        self._intake = intake
        self._with_digests = with_digests
        # True if both ends speak a version of the protocol with open transfers.
        self._has_marks = False
        # Guards the sending of answers, and the sender's status as a stranger.
        self._lock = threading.Lock()
        # Landings that this side can still end. Other threads than the connection's own may remove some.
        self._landings: dict[bytes, Landing] = {}
        self._credit: Credit | None = None
        # When a stranger must have shown a valid ticket; None once one was shown.
        self._ticket_due_s: float | None = math.inf
        self._is_dropped = False

    def run(self) -> None:
        """Read frames until the connection ends, then abort its unfinished transfers."""
        reason = "the receiver was ended"
        try:
            # A silent stranger is dropped after the progress limit.
            self._stream.start()
            self._has_marks = unpack_hello(self._stream.receive_bytes(HELLO_BYTES)).version >= MARKS_VERSION
            self._greet(pack_hello(self._intake.epoch, self._with_digests))
            self._ticket_due_s = time.monotonic() + _TICKET_WITHIN_S
            credit = Header(Kind.CREDIT, bytes(16), CREDIT.size)
            self._credit = self._intake.admit(lambda *given: self._send(pack_frame(credit, CREDIT.pack(*given))))
            while True:
                self._take_frame()
        except LinkLost as error:
            reason = error.reason
            # A sender that leaves without open transfers is not worth a warning.
            level = "warning" if self._landings or "protocol" in reason.lower() else "debug"
            getattr(get_logger(), level)("kv_connection_ended", reason=reason, open_transfers=len(self._landings))
        except Exception as error:
            reason = f"the receiver broke: {error!r}"
            raise
        finally:
            try:
                self._end(f"connection lost: {reason}")
            finally:
                if self._credit is not None:
                    self._credit.close()

    def drop_stranger(self) -> bool:
        """End the connection unless its sender has shown a valid ticket. Returns True if ended. Any thread."""
        with self._lock:
            if self._ticket_due_s is None:
                return False
            self._is_dropped = True
        # The stream's own break_off(), without a subclass's wait: a stranger writes nothing.
        self._stream.break_off()
        return True

    def break_off(self) -> None:
        """End the connection, so that run() returns soon. Any thread."""
        self._stream.break_off()

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        self._send(pack_frame(Header(Kind.MARKED, transfer_id, block_count=block_count)))

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        for frame in pack_extensions(transfer_id, first_index, block_ids):
            self._send(frame)

    def close(self) -> None:
        """Close the socket, after run() has returned."""
        with self._lock:
            self._stream.close()

    def _greet(self, hello: bytes) -> None:
        self._stream.send([hello])

    def _end(self, reason: str) -> None:
        self._stream.break_off()
        # Only this thread wrote into their blocks, so leaving its loop is the fence.
        self._abort_landings(reason)

    def _abort_landings(self, reason: str) -> None:
        for transfer_id, landing in tuple(self._landings.items()):
            try:
                landing.abort(reason)
            except Exception:
                get_logger().exception("kv_transfer_abort_failed", transfer_id=transfer_id.hex())

    def _take_frame(self) -> None:
        within_s = None
        if self._ticket_due_s is not None:
            within_s = self._ticket_due_s - time.monotonic()
            if within_s <= 0:
                raise LinkLost(f"no valid ticket within {_TICKET_WITHIN_S:g} s")
        header = unpack_header(self._stream.receive_next(HEADER_BYTES, within_s))
        landing = self._landings.get(header.transfer_id)
        try:
            if header.kind == Kind.OPEN:
                self._open(header)
            elif header.kind == Kind.DATA:
                self._take_data(header, landing)
            elif header.kind == Kind.MARK:
                self._mark(header, landing)
            elif header.kind == Kind.END:
                self._finish(header, landing)
            elif header.kind == Kind.ABORT:
                self._stream.discard(header.payload_bytes)
                self._let_go(header.transfer_id, keep_marked=bool(header.first_index))
            else:
                self._take_other(header, landing)
        except LinkLost:
            raise
        except TransferFailed:
            self._failed(header.transfer_id)

    def _take_other(self, header: Header, landing: Landing | None) -> None:
        raise LinkLost(f"protocol error: {header.kind.name} from a sender")

    def _let_go(self, transfer_id: bytes, *, keep_marked: bool = False) -> Landing | None:
        landing = self._landings.pop(transfer_id, None)
        if landing is not None:
            landing.abort("the sender gave up", given_up=not keep_marked)
        return landing

    def _failed(self, transfer_id: bytes) -> None:
        # Already answered; the other transfers of the connection continue.
        self._landings.pop(transfer_id, None)

    def _open(self, header: Header) -> None:
        secret, epoch = unpack_payload(header, OPENING, self._stream.receive_bytes(header.payload_bytes))
        # A second opening of the same transfer is refused like a stranger's, and leaves the first one untouched.
        assert self._credit is not None
        try:
            landing = self._intake.open(
                header.transfer_id,
                secret,
                epoch,
                self._answer,
                self._credit,
                self._with_digests,
                self if self._has_marks else None,
            )
        except TransferFailed:
            return
        with self._lock:
            is_first = self._ticket_due_s is not None
            if not self._is_dropped:
                self._ticket_due_s = None
        if self._is_dropped:
            # Before the sender learns that it may write.
            landing.abort("connection lost: another one took its place")
            raise LinkLost("another connection took its place")
        if not is_first and landing.pool.layout.block_bytes != self._pool.layout.block_bytes:
            landing.abort("its blocks are of another size than those of its connection")
            return
        self._pool = landing.pool
        self._opened(header.transfer_id, landing)
        self._forget_stopped(header.transfer_id)

    def _opened(self, transfer_id: bytes, landing: Landing) -> None:
        self._landings[transfer_id] = landing

    def _take_data(self, header: Header, landing: Landing | None) -> None:
        assert self._credit is not None
        cost_bytes = self._cost_bytes(header)
        self._credit.spend(cost_bytes)
        try:
            self._take_blocks(header, landing)
        finally:
            self._credit.settle(cost_bytes)

    def _cost_bytes(self, header: Header) -> int:
        # The two differ where the sender's blocks are in memory already, or where it breaks the rules.
        return max(header.payload_bytes, len(header.layers) * header.block_count * self._pool.layout.block_bytes)

    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        if landing is None:
            self._stream.discard(header.payload_bytes)
            return
        try:
            blocks, digest = landing.begin_write(header.layers, header.first_index, header.block_count)
        except TransferFailed:
            self._stream.discard(header.payload_bytes)
            raise
        left_bytes, block_count = header.payload_bytes, len(header.layers) * len(blocks)
        if left_bytes != block_count * self._pool.layout.block_bytes:
            landing.abort(f"{left_bytes} bytes came for {block_count} blocks")
        try:
            batch_bytes = BATCH_BYTES if digest is None else self._stream.digested_receive_bytes
            for regions in batches(self._pool, header.layers, blocks, batch_bytes):
                missing_bytes = self._stream.receive(regions, landing.is_stopped)
                left_bytes -= sum(map(len, regions)) - missing_bytes
                if missing_bytes:
                    break
                if digest is not None:
                    for region in regions:
                        digest.update(region)
            landing.end_write()
        except LinkLost as error:
            landing.abort(f"connection lost: {error.reason}")
            with contextlib.suppress(TransferFailed):
                landing.end_write()
            raise
        except TransferFailed:
            # Stopped, and released by now: its blocks do not wait while the rest of the frame is discarded.
            self._stream.discard(left_bytes)
            raise

    def _mark(self, header: Header, landing: Landing | None) -> None:
        note = bytes(self._stream.receive_bytes(header.payload_bytes))
        if landing is None:
            self._answer(header.transfer_id, "no such transfer on this connection")
            return
        landing.mark(header.block_count, note, header.digest)

    def _finish(self, header: Header, landing: Landing | None) -> None:
        note = bytes(self._stream.receive_bytes(header.payload_bytes))
        if landing is None:
            self._answer(header.transfer_id, "no such transfer on this connection")
            return
        landing.finish(note, header.digest)
        self._landings.pop(header.transfer_id, None)

    def _forget_stopped(self, transfer_id: bytes) -> None:
        # It was ended here and answered: its sender's last frame is not awaited. Any thread.
        landing = self._landings.get(transfer_id)
        if landing is not None and landing.is_stopped():
            self._landings.pop(transfer_id, None)

    def _answer(self, transfer_id: bytes, rejection: str | None) -> None:
        if rejection is None:
            self._send(pack_frame(Header(Kind.ACCEPTED, transfer_id)))
        else:
            reason = rejection.encode()[:SMALL_PAYLOAD_BYTES]
            self._send(pack_frame(Header(Kind.REJECTED, transfer_id, len(reason)), reason))
            self._forget_stopped(transfer_id)

    def _send(self, frame: bytes) -> None:
        try:
            with self._lock:
                self._stream.send_now(frame)
        except LinkLost:
            self._give_up()

    def _give_up(self) -> None:
        # The sender does not read its answers.
        self._stream.break_off()
