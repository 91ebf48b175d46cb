"""A blocking socket with a time limit on every wait, reading into and writing from memory regions. Knows no frames."""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.transport import LinkLost

RegionT = TypeVar("RegionT", memoryview, bytes | memoryview)

_BUFFERS_PER_CALL = 1024  # IOV_MAX on Linux
_CHECK_S = 0.05
"""Max blocking time between checks for a stop; the delay of revoke and abort."""

CACHED_BYTES = 1 << 19
"""Bytes that stay in the second-level cache after a copy, so that a digest of them is cheap."""

BATCH_BYTES = 1 << 24
"""Bytes per call if only the kernel reads them."""

# Sink for discarded bytes: written by all threads, read by none.
_SCRATCH = memoryview(bytearray(1 << 16))
# Padding for a frame whose payload was stopped half way.
_FILLER = memoryview(bytes(1 << 16))


def never() -> bool:
    """Return False: stop condition of operations that are never stopped."""
    return False


class ByteStream:
    """Connected socket with time limits, for one reading and one writing thread. The owner closes it."""

    def __init__(self, connected: socket.socket, progress_timeout_s: float) -> None:
        self._socket = connected
        self.progress_timeout_s = progress_timeout_s
        # A longer call costs the kernel and the interpreter less per byte, a shorter one leaves its bytes in the cache
        # for their digest. On tcp, larger ones than these make the two ends wait for one another.
        is_unix = connected.family == socket.AF_UNIX
        self.digested_send_bytes = 4 * CACHED_BYTES if is_unix else 2 * CACHED_BYTES
        """Bytes per sending call, few enough to be sent from the cache in which a digest has left them."""
        self.digested_receive_bytes = 2 * CACHED_BYTES if is_unix else CACHED_BYTES
        """Bytes per receiving call, few enough to stay in the cache for a digest."""
        connected.settimeout(None)
        interval = struct.pack("ll", 0, int(_CHECK_S * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    @property
    def is_worn(self) -> bool:
        return False

    def start(self) -> None:
        """Negotiate with the peer before all else: the TLS handshake; nothing over a plain socket."""

    def wait_readable(self, timeout_s: float | None = None) -> bool:
        """Wait until bytes or the stream's end can be read. Returns False after `timeout_s` seconds; None: no limit."""
        return bool(self._readable.poll(None if timeout_s is None else timeout_s * 1e3))

    def is_readable(self) -> bool:
        """True if bytes or the stream's end can be read without waiting."""
        return self.wait_readable(0.0)

    @property
    def local_host(self) -> str:
        """Host address of this end of a tcp connection."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """Host address of the other end of a tcp connection. Raises LinkLost once that has reset the connection."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError as error:
            raise LinkLost(f"the connection is gone: {error.strerror}") from error

    def receive(self, regions: Sequence[memoryview], is_stopped: Callable[[], bool] = never) -> int:
        """Fill the memory regions in order; stop early if is_stopped() turns true. Returns the number of missing bytes.

        Raises LinkLost at the end of the stream, and after progress_timeout_s seconds without a byte.
        """
        pending, left_bytes, progress_s = list(regions), sum(map(len, regions)), time.monotonic()
        while left_bytes and not is_stopped():
            try:
                received = self._socket.recvmsg_into(pending[:_BUFFERS_PER_CALL], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._require_progress(progress_s, "arrived")
                continue
            except OSError as error:
                raise LinkLost(f"receiving: {error.strerror}") from error
            if received == 0:
                raise LinkLost("the peer closed the connection")
            progress_s = time.monotonic()
            left_bytes -= received
            if left_bytes:
                _drop(pending, received)
        return left_bytes

    def receive_bytes(self, byte_count: int) -> bytearray:
        """Receive exactly `byte_count` bytes. Raises LinkLost."""
        data = bytearray(byte_count)
        self.receive([memoryview(data)])
        return data

    def receive_next(self, byte_count: int, within_s: float | None = None) -> bytearray:
        """Receive exactly `byte_count` bytes; the first may take `within_s` seconds, None: forever. Raises LinkLost."""
        data = bytearray(byte_count)
        view = memoryview(data)
        # In a flowing stream the byte is already there, and this call suffices.
        while (received := self._receive_waiting(view)) is None:
            if not self.wait_readable(within_s):
                raise LinkLost(f"nothing came for {within_s:g} s")
        self.receive([view[received:]])
        return data

    def fill(self, byte_count: int) -> None:
        """Send `byte_count` zero bytes."""
        while byte_count:
            step = min(byte_count, len(_FILLER) * _BUFFERS_PER_CALL)
            self.send(_repeat(_FILLER, step))
            byte_count -= step

    def discard(self, byte_count: int) -> None:
        """Receive and discard `byte_count` bytes."""
        while byte_count:
            step = min(byte_count, len(_SCRATCH) * _BUFFERS_PER_CALL)
            self.receive(_repeat(_SCRATCH, step))
            byte_count -= step

    def send(self, regions: Sequence[bytes | memoryview], is_stopped: Callable[[], bool] = never) -> int:
        """Send the memory regions in order; stop early if is_stopped() turns true. Returns the number of unsent bytes.

        Raises LinkLost when the connection is broken, and when the peer takes no byte for progress_timeout_s seconds.
        """
        pending, left_bytes, progress_s = list(regions), sum(map(len, regions)), time.monotonic()
        while left_bytes and not is_stopped():
            try:
                sent = self._socket.sendmsg(pending[:_BUFFERS_PER_CALL])
            except BlockingIOError:
                self._require_progress(progress_s, "was taken")
                continue
            except OSError as error:
                raise LinkLost(f"sending: {error.strerror}") from error
            progress_s = time.monotonic()
            left_bytes -= sent
            if left_bytes:
                _drop(pending, sent)
        return left_bytes

    def send_now(self, data: bytes) -> None:
        """Send a few bytes without waiting. Raises LinkLost if the socket's buffer is full: the peer does not read."""
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError as error:
            raise LinkLost(f"answering: {error.strerror}") from error
        if sent < len(data):
            raise LinkLost("answering: the peer does not read")

    def break_off(self) -> None:
        """Shut the connection down, which wakes threads blocked in it. Any thread; idempotent."""
        # An error means that it has already ended.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send_descriptor(self, data: bytes, descriptor: int) -> None:
        """Send a few bytes and a file descriptor, over a Unix socket. Raises LinkLost."""
        try:
            socket.send_fds(self._socket, [data], [descriptor])
        except OSError as error:
            raise LinkLost(f"sending: {error.strerror}") from error

    def receive_descriptor(self, byte_count: int) -> tuple[bytes, int]:
        """Receive the bytes and the file descriptor, owned by the caller, of send_descriptor(). Raises LinkLost."""
        data, left_bytes, since_s = b"", byte_count, time.monotonic()
        descriptors: list[int] = []
        try:
            while left_bytes:
                try:
                    part, received, _, _ = socket.recv_fds(self._socket, left_bytes, 1)
                except BlockingIOError:
                    self._require_progress(since_s, "arrived")
                    continue
                except OSError as error:
                    raise LinkLost(f"receiving: {error.strerror}") from error
                descriptors.extend(received)
                if not part:
                    raise LinkLost("the peer closed the connection")
                data, left_bytes = data + part, left_bytes - len(part)
            if len(descriptors) != 1:
                raise LinkLost(f"protocol error: {len(descriptors)} descriptors came")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return data, descriptors[0]

    def say_no_more(self) -> None:
        """Shut down the sending direction: the peer reads the stream's end. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self) -> None:
        """Receive and discard bytes until the stream's end or break_off()."""
        while True:
            self._readable.poll()
            try:
                if not self._socket.recv_into(_SCRATCH):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return

    def close(self) -> None:
        """Close the socket, once no thread is in a call."""
        self._socket.close()

    def _receive_waiting(self, view: memoryview) -> int | None:
        # None if nothing has arrived. Raises LinkLost at the end.
        try:
            received = self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkLost(f"receiving: {error.strerror}") from error
        if received == 0:
            raise LinkLost("the peer closed the connection")
        return received

    def _require_progress(self, since_s: float, what: str) -> None:
        if time.monotonic() - since_s > self.progress_timeout_s:
            raise LinkLost(f"nothing {what} for {self.progress_timeout_s:g} s")


def batches(pool: KvPool, layers: range, blocks: Sequence[int], batch_bytes: int) -> Iterator[list[memoryview]]:
    """Yield these blocks' memory, layer by layer, as lists of about batch_bytes, each for one system call."""
    count = max(1, batch_bytes // pool.layout.block_bytes)
    room, regions = count, list[memoryview]()
    if len(layers) > 1 and len(layers) * len(blocks) <= count:
        # Short pushes are mostly like this: their blocks are looked up once.
        spans = pool.spans(blocks)
        for layer in layers:
            regions += pool.regions_at(layer, spans)
        layers = layers[:0]
    for layer in layers:
        start = 0
        while start < len(blocks):
            batch = blocks[start : start + room]
            regions += pool.regions_at(layer, pool.spans(batch))
            start += len(batch)
            room -= len(batch)
            if not room:
                yield regions
                room, regions = count, []
    if regions:
        yield regions


def _repeat(buffer: memoryview, byte_count: int) -> list[memoryview]:
    whole, rest = divmod(byte_count, len(buffer))
    return [buffer] * whole + ([buffer[:rest]] if rest else [])


def _drop(pending: list[RegionT], byte_count: int) -> None:
    done = 0
    for region in pending:
        if byte_count < len(region):
            break
        byte_count -= len(region)
        done += 1
    del pending[:done]
    if byte_count:
        pending[0] = pending[0][byte_count:]
