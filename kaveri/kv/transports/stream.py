"""A blocking socket whose every wait has a limit: gathers from and scatters into memory. Knows nothing of frames."""

import contextlib
import copy
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.transport import LinkLost

_BUFFERS_PER_CALL = 1024  # IOV_MAX on Linux
_CHECK_S = 0.05
"""Longest that a blocked call goes without asking whether it is still wanted; the price of revoke and abort."""

CACHED_BYTES = 1 << 19
"""What is in the second-level cache when it has been copied, so that a digest of it costs little."""

_BATCH_BYTES = 1 << 24
"""Of one call where nothing but the kernel looks at the bytes."""

# Discarded bytes go here: written by all threads, read by none.
_SCRATCH = memoryview(bytearray(1 << 16))
# What ends a frame whose payload was stopped half way.
_FILLER = memoryview(bytes(1 << 16))


def never() -> bool:
    """For operations that are never stopped."""
    return False


class ByteStream:
    """Used by one reading and one writing thread; the socket is closed by its owner, and broken by anyone."""

    def __init__(self, connected: socket.socket, progress_timeout_s: float) -> None:
        self._socket = connected
        self.progress_timeout_s = progress_timeout_s
        # A longer call costs the kernel and the interpreter less for each byte, a shorter one leaves its bytes in the
        # cache for their digest. On tcp, larger ones than these make the two ends wait for one another.
        is_unix = connected.family == socket.AF_UNIX
        self._send_batch_bytes = 4 * CACHED_BYTES if is_unix else 2 * CACHED_BYTES
        self._receive_batch_bytes = 2 * CACHED_BYTES if is_unix else CACHED_BYTES
        connected.settimeout(None)
        interval = struct.pack("ll", 0, int(_CHECK_S * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    @property
    def is_worn(self) -> bool:
        """See Link.is_worn."""
        return False

    def send_batch_bytes(self, digest: Digest | None) -> int:
        """What one sending call brings, that has its bytes from the cache where there is a digest of them."""
        return self._send_batch_bytes if digest is not None else _BATCH_BYTES

    def receive_batch_bytes(self, digest: Digest | None) -> int:
        """What one receiving call brings, that leaves its bytes in the cache where there is a digest of them."""
        return self._receive_batch_bytes if digest is not None else _BATCH_BYTES

    def start(self) -> None:
        """Settles with the peer how to speak; both ends do so first. Nothing is to be settled over a plain socket."""

    def within(self, progress_timeout_s: float) -> Self:
        """The same stream with another limit."""
        other = copy.copy(self)
        other.progress_timeout_s = progress_timeout_s
        return other

    def wait_readable(self, timeout_s: float | None = None) -> bool:
        """Waits for the first byte, the peer's end or break_off(), as a rule without a limit. Whether one is there."""
        return bool(self._readable.poll(None if timeout_s is None else timeout_s * 1e3))

    def is_readable(self) -> bool:
        """Whether wait_readable() would return at once."""
        return self.wait_readable(0.0)

    @property
    def local_host(self) -> str:
        """This end's address, over tcp."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """The other end's."""
        return str(self._socket.getpeername()[0])

    def receive(self, regions: Sequence[memoryview], is_stopped: Callable[[], bool] = never) -> int:
        """Fills the regions in order. Returns early once `is_stopped`; returns how many bytes have not arrived.

        Raises LinkLost on the end of the stream, and when nothing has arrived for the progress limit.
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
        """Like receive(), for small things."""
        data = bytearray(byte_count)
        self.receive([memoryview(data)])
        return data

    def receive_next(self, byte_count: int, within_s: float | None = None) -> bytearray:
        """Like receive_bytes(), but waits for the first byte for so long; None: without a limit."""
        data = bytearray(byte_count)
        view = memoryview(data)
        # In a stream that flows it is there already, and nothing but this call is needed.
        while (received := self._receive_waiting(view)) is None:
            if not self.wait_readable(within_s):
                raise LinkLost(f"nothing came for {within_s:g} s")
        self.receive([view[received:]])
        return data

    def fill(self, byte_count: int) -> None:
        """Sends zeros."""
        while byte_count:
            step = min(byte_count, len(_FILLER) * _BUFFERS_PER_CALL)
            self.send(_repeat(_FILLER, step))
            byte_count -= step

    def discard(self, byte_count: int) -> None:
        """Receives into nowhere."""
        while byte_count:
            step = min(byte_count, len(_SCRATCH) * _BUFFERS_PER_CALL)
            self.receive(_repeat(_SCRATCH, step))
            byte_count -= step

    def send(self, regions: Sequence[memoryview], is_stopped: Callable[[], bool] = never) -> int:
        """Sends the regions in order. Returns early once `is_stopped`; returns how many bytes were not sent.

        Raises LinkLost when the connection is broken, and when the peer has taken nothing for the progress limit.
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

    def send_bytes(self, data: bytes) -> None:
        """Like send(), for small things."""
        self.send([memoryview(data)])

    def send_now(self, data: bytes) -> None:
        """Sends a few bytes without waiting. Raises LinkLost when they do not fit: the peer does not read."""
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError as error:
            raise LinkLost(f"answering: {error.strerror}") from error
        if sent < len(data):
            raise LinkLost("answering: the peer does not read")

    def break_off(self) -> None:
        """Ends the connection, also for threads blocked in it. Any thread; idempotent."""
        # An error says that it has ended already.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send_descriptor(self, data: bytes, descriptor: int) -> None:
        """Sends a few bytes with a descriptor, over a Unix socket."""
        try:
            socket.send_fds(self._socket, [data], [descriptor])
        except OSError as error:
            raise LinkLost(f"sending: {error.strerror}") from error

    def receive_descriptor(self, byte_count: int) -> tuple[bytes, int]:
        """What send_descriptor() sent; the descriptor is the caller's. Raises LinkLost."""
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
        """Ends this side's half of the connection: the peer reads its end. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self) -> None:
        """Throws away what comes until the peer's end or break_off()."""
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
        """Gives the descriptor back, once no thread is in a call."""
        self._socket.close()

    def _receive_waiting(self, view: memoryview) -> int | None:
        """How many bytes were there, at least one; None: not even the end."""
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
    """The regions of these blocks of each layer, layer by layer, as many for one system call as batch_bytes has room
    for."""
    count = max(1, batch_bytes // pool.layout.block_bytes)
    room, regions = count, list[memoryview]()
    if len(layers) > 1 and len(layers) * len(blocks) <= count:
        # As short pushes mostly are: where the blocks are is looked for once.
        spans = pool.spans(blocks)
        for layer in layers:
            regions += pool.regions_at(layer, spans)
        layers = layers[:0]
    for layer in layers:
        start = 0
        while start < len(blocks):
            batch = blocks[start : start + room]
            regions += pool.regions(layer, batch)
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


def _drop(pending: list[memoryview], byte_count: int) -> None:
    """Takes the first bytes off a list of regions, in place."""
    done = 0
    for region in pending:
        if byte_count < len(region):
            break
        byte_count -= len(region)
        done += 1
    del pending[:done]
    if byte_count:
        pending[0] = pending[0][byte_count:]
