"""An encrypted stream between two ends with certificates of one authority. Knows no frames.

TLS by Python's ssl from memory to memory, over a plain socket: Python's encrypted sockets cannot be read and written at
the same time, nor be left in the middle of a call, and make a system call per 16 KiB.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports.stream import ByteStream, never
from kaveri.security.tls_files import is_named

_PIECE_BYTES = 1 << 18
"""Bytes encrypted, or read off the socket, at a time: they stay in the second-level cache."""

KEY_RECORDS = 1 << 24
"""Max records encrypted with one key: 256 GiB of full ones. RFC 8446, section 5.5, sets the limit at 2**24.5."""
_WORN_SHARE = 0.75
_REFUSAL_S = 1.0
"""Time for a refused peer to read the reason."""
_FOREIGN = frozenset({"WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "HTTP_REQUEST", "BAD_RECORD_TYPE"})


class TlsStream(ByteStream):
    """ByteStream encrypted by TLS; without the methods that only one-sided connections need.

    Encrypted data left over when send() was stopped is sent before later data. peer_name: a DNS name that the peer's
    certificate must carry; empty: any. key_records: max TLS records sent; the connection is lost with the next one.
    """

    def __init__(
        self,
        connected: socket.socket,
        progress_timeout_s: float,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        peer_name: str = "",
        key_records: int = KEY_RECORDS,
    ) -> None:
        super().__init__(connected, progress_timeout_s)
        self._key_records = key_records
        self._records = 0
        self._peer_name = peer_name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        # OpenSSL's object, with its memory, is for one thread at a time. It never waits.
        self._lock = threading.Lock()
        self._arrived = memoryview(bytearray(_PIECE_BYTES))
        self._unsent = memoryview(b"")

    @property
    def is_worn(self) -> bool:
        """True shortly before key_records is reached: Python's ssl cannot renew a connection's keys."""
        return self._records >= _WORN_SHARE * self._key_records

    def start(self) -> None:
        """Perform the TLS handshake and check the peer's name. Raises LinkLost."""
        began_s = time.monotonic()
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                super().send([self._outgoing.read()])
                try:
                    # The time limit covers all of it, not each piece: the peer is not authenticated yet.
                    self._require_progress(began_s, "was agreed on")
                    self._pull(began_s)
                except LinkLost as error:
                    raise LinkLost(f"tls protocol: in the handshake, {error.reason}") from error
            except ssl.SSLError as error:
                self._refuse()
                raise LinkLost(f"tls protocol: {_reason(error)}") from error
            else:
                if self._peer_name and not is_named(self._tls.getpeercert(), self._peer_name):
                    self._refuse()
                    raise LinkLost(f"tls protocol: the peer's certificate does not carry the name {self._peer_name}")
                super().send([self._outgoing.read()])
                return

    def receive(self, regions: Sequence[memoryview], is_stopped: Callable[[], bool] = never) -> int:
        left_bytes, progress_s = sum(map(len, regions)), time.monotonic()
        for region in regions:
            start = 0
            while start < len(region):
                if is_stopped():
                    return left_bytes
                received = self._decrypted(region[start:])
                if received:
                    start += received
                    left_bytes -= received
                    progress_s = time.monotonic()
                else:
                    self._pull(progress_s)
        return left_bytes

    def send(self, regions: Sequence[bytes | memoryview], is_stopped: Callable[[], bool] = never) -> int:
        if not self._send_rest(is_stopped):
            return sum(map(len, regions))
        left_bytes, waiting_bytes = sum(map(len, regions)), 0
        for region in regions:
            for start in range(0, len(region), _PIECE_BYTES):
                piece = region[start : start + _PIECE_BYTES]
                self._encrypt(piece)
                left_bytes -= len(piece)
                waiting_bytes += len(piece)
                if waiting_bytes >= _PIECE_BYTES or not left_bytes:
                    waiting_bytes = 0
                    self._unsent = memoryview(self._encrypted())
                    if not self._send_rest(is_stopped):
                        return left_bytes
        return left_bytes

    def send_now(self, data: bytes) -> None:
        self._encrypt(data)
        super().send_now(self._encrypted())

    def _receive_waiting(self, view: memoryview) -> int | None:
        while not (received := self._decrypted(view)):
            # Possibly not the payload's first byte, but part of a record, or one of TLS's own.
            arrived = super()._receive_waiting(self._arrived)
            if arrived is None:
                return None
            self._take(arrived)
        return received

    def _decrypted(self, view: memoryview) -> int:
        # Returns the number of bytes, 0 if the next record has not arrived.
        left = view
        try:
            with self._lock:
                while left:
                    # One record at a time. The stubs know only bytearrays, and not this return type.
                    received = cast(int, self._tls.read(len(left), cast(bytearray, left)))
                    if not received:
                        # The peer has ended its half. Data before that is read first.
                        if left is view:
                            raise LinkLost("the peer closed the connection")
                        break
                    left = left[received:]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise LinkLost(f"tls protocol: {_reason(error)}") from error
        return len(view) - len(left)

    def _encrypt(self, data: bytes | memoryview) -> None:
        try:
            with self._lock:
                while data:
                    if self._records >= self._key_records:
                        raise LinkLost(f"{self._records} records were encrypted with this connection's key")
                    # One record at a time.
                    data = data[self._tls.write(data) :]
                    self._records += 1
        except ssl.SSLError as error:
            raise LinkLost(f"tls protocol: {_reason(error)}") from error

    def _encrypted(self) -> bytes:
        with self._lock:
            return self._outgoing.read()

    def _send_rest(self, is_stopped: Callable[[], bool]) -> bool:
        if self._unsent:
            unsent_bytes = super().send([self._unsent], is_stopped)
            self._unsent = self._unsent[len(self._unsent) - unsent_bytes :]
        return not self._unsent

    def _pull(self, since_s: float) -> None:
        # Reads what is available, or waits a moment for it.
        try:
            received = self._socket.recv_into(self._arrived)
        except BlockingIOError:
            self._require_progress(since_s, "arrived")
            return
        except OSError as error:
            raise LinkLost(f"receiving: {error.strerror}") from error
        if received == 0:
            raise LinkLost("the peer closed the connection")
        self._take(received)

    def _take(self, byte_count: int) -> None:
        with self._lock:
            self._incoming.write(self._arrived[:byte_count])

    def _refuse(self) -> None:
        # Waits until the peer has read the reason: unread data from the peer would reset the connection and lose it.
        with contextlib.suppress(LinkLost):
            super().send([self._outgoing.read()])
        self.say_no_more()
        give_up_at_s = time.monotonic() + _REFUSAL_S
        with contextlib.suppress(OSError):
            while time.monotonic() < give_up_at_s:
                with contextlib.suppress(BlockingIOError):
                    if not self._socket.recv_into(self._arrived):
                        return


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate: {error.verify_message}"
    if error.reason is None:
        return str(error)
    words = error.reason.lower().replace("_", " ")
    if "ALERT" in error.reason:
        return f"the peer refused this side: {words}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer showed no certificate"
    return f"the peer does not speak TLS 1.3: {words}" if error.reason in _FOREIGN else words
