"""Transports over a collective library's point-to-point calls: "gloo" between hosts, "nccl" between GPUs.

Each connection has a group of two ranks, built directly, without a global group, over a store that the receiver opens.
Rank 0 receives, rank 1 sends. A TCP connection carries the frames of frames.py and shows that the peer lives; the group
carries the bytes, in one direction only.

The libraries match sends with receives by order, and a send waits until its receive is posted. So a DATA frame
announces each message, whose content are its blocks: the receiver posts the receive at once, processes the available
frames, and only then waits for the message. GRANTED reports that a message has arrived and one more may be announced,
so the staging buffers of both sides bound the messages in flight.

Blocks are gathered into and scattered from those buffers, in messages of up to two mebibytes or one block. Neither
library accesses a pool: a late message only hits staging memory. Neither can cancel a message: a late one ends the
group and the connection, and the next transfer creates new ones.

Tested with "gloo". "nccl" has never run: it needs two GPUs. It copies staging buffers to or from the device, since
pools are host memory.
"""

import contextlib
import importlib
import itertools
import os
import socket
import struct
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kaveri.errors import ConfigError, TransferFailed
from kaveri.extras import install_command
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Landing, LinkListener, LinkLost, TransferIntake
from kaveri.kv.transports.frames import HELLO_BYTES, Header, Kind, pack_frame, pack_hello, unpack_hello
from kaveri.kv.transports.socket import SocketLink, SocketTransport
from kaveri.kv.transports.socket_listener import ReceivingConnection
from kaveri.kv.transports.stream import ByteStream
from kaveri.telemetry.logs import get_logger

_MEETING = struct.Struct("<H6x16s")
"""Follows the receiver's hello: the port of the store, and the prefix of the pair's keys in it."""
_MESSAGE_BYTES = 2 << 20
"""Message size. Half as much takes a quarter more processor time over loopback, twice as much hardly less."""
_BUFFER_COUNT = 4
"""Staging buffers per side of a connection, each of a message, or of one block if that is larger."""
_MEET_WITHIN_S = 5.0
_CHECK_S = 0.05
"""Max interval between checks for a stop while waiting for a buffer."""
_MOST_MEETINGS = 16
"""Max concurrent meetings in a process, including abandoned ones whose other process is stopped."""
_meetings = threading.BoundedSemaphore(_MOST_MEETINGS)
_RECEIVER, _SENDER = 0, 1
"""Ranks in the group."""


class CollectiveTransport(SocketTransport):
    """Transport over torch.distributed's point-to-point calls, "gloo" or "nccl". Endpoints are TCP addresses.

    Raises ConfigError when torch, or the backend in it, or a required GPU is missing.
    """

    connect_timeout_s = 5.0
    """Also limits the meeting of the two ranks."""
    progress_timeout_s = 10.0
    """Also limits a message, from its announcement on."""
    connection_limit = 64

    def __init__(self, backend: str, *, advertise_host: str | None = None) -> None:
        _require_backend(backend)
        super().__init__("tcp", advertise_host=advertise_host)
        self.name = self.label = backend
        self.connection_type = GlooReceivingConnection if backend == "gloo" else NcclReceivingConnection
        self.capabilities = replace(
            self.capabilities, is_byte_stream=backend == "gloo", write_bytes=_BUFFER_COUNT * _MESSAGE_BYTES
        )

    def _link(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> "CollectiveLink":
        port, prefix = _MEETING.unpack(stream.receive_bytes(_MEETING.size))
        # The receiver does not wait for a peer that has disconnected.
        stream.send([pack_hello()])
        # Holds no reference to the connection, which is closed when the meeting is abandoned.
        there, here, block_bytes = stream.peer_host, stream.local_host, pool.layout.block_bytes

        def meet() -> _Pair:
            store = _joined_store(there, port)
            return _Pair(self.name, _SENDER, store, prefix, here, self.progress_timeout_s, block_bytes)

        pair = _met_within(self.connect_timeout_s, meet)
        try:
            return CollectiveLink(stream, pool, listener, endpoint, pair)
        except BaseException:
            pair.close()
            raise


class CollectiveLink(SocketLink):
    """A sender's connection over gloo or NCCL; implements transport.Link. The process group is used by the writing
    thread only."""

    def __init__(
        self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint, pair: "_Pair"
    ) -> None:
        self._pair = pair
        self._changed = threading.Condition()
        # Number of messages since the connection began.
        self._sent_count = 0
        self._arrived_count = 0
        self._is_broken = False
        super().__init__(stream, pool, listener, endpoint)

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Gather blocks into staging buffers and send these as messages; return once all blocks are gathered. See
        Link.write."""
        block_bytes = self._pool.layout.block_bytes
        step = self._pair.buffer_bytes // block_bytes
        starts = range(0, len(source_blocks), step)
        for layer, start in itertools.product(layers, starts):
            blocks = source_blocks[start : start + step]
            if not self._wait_for_buffer(is_stopped):
                return (layer - layers.start) * len(source_blocks) + start
            staged = self._pair.buffer(self._sent_count, len(blocks) * block_bytes)
            # Indices are known to be valid; any mode but "clip" makes numpy copy twice.
            np.take(self._pool.memory[layer], blocks, axis=0, out=staged.reshape(len(blocks), block_bytes), mode="clip")
            if digest is not None:
                digest.update(staged.data)
            place = range(layer, layer + 1), first_index + start, len(blocks)
            self._send(Header(Kind.DATA, ticket.transfer_id, 0, *place))
            self._pair.send(self._sent_count, staged.nbytes)
            self._sent_count += 1
        return len(layers) * len(source_blocks)

    def break_off(self) -> None:
        self._is_broken = True
        super().break_off()
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def close(self) -> None:
        self._is_broken = True
        super().close()
        self._pair.close()

    def _take_answer(self, header: Header, payload: bytes | bytearray) -> None:
        if header.kind != Kind.GRANTED:
            super()._take_answer(header, payload)
            return
        with self._changed:
            self._arrived_count += 1
            self._changed.notify_all()

    def _wait_for_buffer(self, is_stopped: Callable[[], bool]) -> bool:
        timeout_s = self._stream.progress_timeout_s
        give_up_at_s = time.monotonic() + timeout_s
        with self._changed:
            while not is_stopped():
                if self._is_broken:
                    raise LinkLost("the connection was closed")
                if self._sent_count - self._arrived_count < _BUFFER_COUNT:
                    return True
                if time.monotonic() > give_up_at_s:
                    raise LinkLost(f"no message was taken for {timeout_s:g} s")
                self._changed.wait(_CHECK_S)
        return False


class GlooReceivingConnection(ReceivingConnection):
    """Receiving side of one sender's gloo connection. Only its thread uses the group and writes into the pool."""

    backend: ClassVar[str] = "gloo"
    _pair: "_Pair | None" = None

    def __init__(self, stream: ByteStream, pool: KvPool, intake: TransferIntake, with_digests: bool) -> None:
        super().__init__(stream, pool, intake, with_digests)
        # Announced messages not waited for yet, in order: their receives are posted.
        self._coming: deque[Header] = deque()
        self._announced_count = 0

    def take_coming(self) -> None:
        """Receive all announced messages and store their blocks."""
        while self._coming:
            self._take_message()

    def _greet(self, hello: bytes) -> None:
        store, port = _opened_store(self._stream.local_host)
        prefix = uuid.uuid4().bytes
        self._stream.send([hello + _MEETING.pack(port, prefix)])
        unpack_hello(self._stream.receive_bytes(HELLO_BYTES))
        block_bytes = self._pool.layout.block_bytes
        host, timeout_s = self._stream.local_host, self._stream.progress_timeout_s
        self._pair = _Pair(self.backend, _RECEIVER, store, prefix, host, timeout_s, block_bytes)

    def _opened(self, transfer_id: bytes, landing: Landing) -> None:
        super()._opened(transfer_id, _OrderedLanding(landing, self))

    def _take_frame(self) -> None:
        super()._take_frame()
        # Post receives first: the sender waits for them.
        while self._coming and not self._stream.is_readable():
            self._take_message()

    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        self._stream.discard(header.payload_bytes)
        assert self._pair is not None
        message_bytes = header.block_count * self._pool.layout.block_bytes
        if len(header.layers) != 1:
            raise LinkLost(f"protocol error: a message of {len(header.layers)} layers")
        if not 0 < message_bytes <= self._pair.buffer_bytes or len(self._coming) == _BUFFER_COUNT:
            raise LinkLost(f"protocol error: a message of {message_bytes} bytes behind {len(self._coming)} others")
        self._pair.post_receive(self._announced_count, message_bytes)
        self._announced_count += 1
        self._coming.append(header)

    def _take_data(self, header: Header, landing: Landing | None) -> None:
        # Settled when the message has arrived.
        assert self._credit is not None
        self._credit.spend(self._cost_bytes(header))
        self._take_blocks(header, landing)

    def _take_message(self) -> None:
        assert self._pair is not None
        message = self._announced_count - len(self._coming)
        header = self._coming.popleft()
        staged = self._pair.received(message, header.block_count * self._pool.layout.block_bytes)
        landing = self._landings.get(header.transfer_id)
        if landing is not None:
            try:
                self._scatter(header, landing, staged)
            except TransferFailed:
                self._failed(header.transfer_id)
        assert self._credit is not None
        self._credit.settle(self._cost_bytes(header))
        self._send(pack_frame(Header(Kind.GRANTED, header.transfer_id)))

    def _scatter(self, header: Header, landing: Landing, staged: npt.NDArray[np.uint8]) -> None:
        blocks, digest = landing.begin_write(header.layers, header.first_index, header.block_count)
        if digest is not None:
            digest.update(staged.data)
        self._pool.memory[header.layers.start][list(blocks)] = staged.reshape(len(blocks), -1)
        landing.end_write()

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._coming.clear()
        # Done here, where no lock is held: it takes a while.
        if self._pair is not None:
            self._pair.close()


class NcclReceivingConnection(GlooReceivingConnection):
    """Receiving side of one sender's NCCL connection."""

    backend = "nccl"


class _OrderedLanding:
    """Receiving side of a transfer whose marks and end wait until the messages announced before them have arrived."""

    def __init__(self, inner: Landing, connection: GlooReceivingConnection) -> None:
        self._inner = inner
        self._connection = connection
        self.pool = inner.pool
        self.begin_write, self.end_write = inner.begin_write, inner.end_write
        self.hold, self.fence = inner.hold, inner.fence
        self.is_stopped, self.abort = inner.is_stopped, inner.abort

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        self._connection.take_coming()
        self._inner.mark(block_count, note, sender_digest)

    def finish(self, note: bytes, sender_digest: int) -> None:
        self._connection.take_coming()
        self._inner.finish(note, sender_digest)


class _Pair:
    """Process group of two ranks, with this rank's staging buffers. Used and closed by one thread.

    Message n, counted from the connection's start, uses buffer n modulo _BUFFER_COUNT. All methods but close() raise
    LinkLost; the pair is unusable afterwards.
    """

    def __init__(
        self, backend: str, rank: int, store: Any, prefix: bytes, host: str, timeout_s: float, block_bytes: int
    ) -> None:
        # Waits until the other rank has joined.
        self._other_rank = _SENDER if rank == _RECEIVER else _RECEIVER
        self._timeout_s = timeout_s
        self.buffer_bytes = max(1, _MESSAGE_BYTES // block_bytes) * block_bytes
        self._memory = np.zeros((_BUFFER_COUNT, self.buffer_bytes), np.uint8)
        self._works: list[Any] = [None] * _BUFFER_COUNT
        torch, distributed = _import_torch()
        with _group_errors("meeting the other side"):
            prefixed = distributed.PrefixStore(prefix.hex(), store)
            self._tensors = torch.from_numpy(self._memory)
            # Tensors that the group moves: the staging buffers, or their copies on the device.
            self._moved = self._tensors
            if backend == "gloo":
                self._group = _gloo_group(distributed, prefixed, rank, host)
            else:
                self._group = _nccl_group(distributed, prefixed, rank)
                self._moved = torch.zeros_like(self._tensors, device="cuda")

    def buffer(self, message: int, byte_count: int) -> npt.NDArray[np.uint8]:
        """Staging buffer of message number `message`, [byte_count], uint8; free once its previous message has
        arrived."""
        return self._memory[message % _BUFFER_COUNT, :byte_count]

    def send(self, message: int, byte_count: int) -> None:
        """Start sending the message in its staging buffer."""
        with _group_errors("sending"):
            slot = message % _BUFFER_COUNT
            if self._works[slot] is not None:
                # Complete, since the receiver has it; this frees its resources.
                self._finish(slot)
            moved = self._moved[slot, :byte_count]
            if self._moved is not self._tensors:
                moved.copy_(self._tensors[slot, :byte_count])
            self._works[slot] = self._group.send([moved], self._other_rank, 0)

    def post_receive(self, message: int, byte_count: int) -> None:
        """Post the receive of a message into its staging buffer."""
        with _group_errors("receiving"):
            slot = message % _BUFFER_COUNT
            self._works[slot] = self._group.recv([self._moved[slot, :byte_count]], self._other_rank, 0)

    def received(self, message: int, byte_count: int) -> npt.NDArray[np.uint8]:
        """Wait for a message and return its staging buffer, [byte_count], uint8."""
        with _group_errors("receiving"):
            slot = message % _BUFFER_COUNT
            self._finish(slot)
            if self._moved is not self._tensors:
                self._tensors[slot, :byte_count].copy_(self._moved[slot, :byte_count])
        return self._memory[slot, :byte_count]

    def close(self) -> None:
        """Destroy the process group: the other rank's calls fail soon. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._moved is not self._tensors:
            # NCCL's kernels wait for the other side forever. gloo's threads and sockets are freed with its last
            # reference.
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._works = [None] * _BUFFER_COUNT
        # The group's threads write into the buffers, so it goes first.
        del group
        # Free now: links and their listeners form cycles that last until the next garbage collection.
        self._memory = np.empty((0, 0), np.uint8)
        self._tensors = self._moved = None

    def _finish(self, slot: int) -> None:
        work, self._works[slot] = self._works[slot], None
        if self._moved is self._tensors:
            work.wait(timedelta(seconds=self._timeout_s))
            return
        # NCCL's wait() has no deadline: it makes the stream wait, and a wait for the stream never ends.
        give_up_at_s = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > give_up_at_s:
                raise RuntimeError(f"no message within {self._timeout_s:g} s")
            time.sleep(0)
        work.wait()


def _met_within(timeout_s: float, meet: Callable[[], _Pair]) -> _Pair:
    # On a thread of its own: torch's store has no deadline while the process at its other end is stopped. The thread
    # then stays until that process continues or is gone, and undoes a late result.
    if not _meetings.acquire(blocking=False):
        raise LinkLost(f"{_MOST_MEETINGS} other meetings have not ended")
    met: Future[_Pair] = Future()
    try:
        threading.Thread(target=_meet_other, args=(met, meet), name="kv-meet", daemon=True).start()
    except RuntimeError as error:
        _meetings.release()
        raise LinkLost(f"no thread for meeting the other side: {error}") from error
    with contextlib.suppress(TimeoutError):
        return met.result(timeout_s)
    if met.cancel():
        raise LinkLost(f"meeting the other side: not within {timeout_s:g} s")
    return met.result()


def _meet_other(met: "Future[_Pair]", meet: Callable[[], _Pair]) -> None:
    pair, problem = None, ""
    try:
        pair = meet()
    except LinkLost as error:
        # Without its traceback, which refers to the store and the group.
        problem = error.reason
    except Exception as error:
        problem = f"meeting the other side: {error!r}"
        get_logger().exception("kv_pair_failed")
    finally:
        _meetings.release()
    is_awaited = met.set_running_or_notify_cancel()
    if is_awaited and pair is not None:
        met.set_result(pair)
    elif is_awaited:
        met.set_exception(LinkLost(problem))
    elif pair is not None:
        pair.close()


def _gloo_group(distributed: Any, store: Any, rank: int, host: str) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=_MEET_WITHIN_S)
    options._threads = 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(distributed: Any, store: Any, rank: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_MEET_WITHIN_S)
    options.config.blocking = 0
    return distributed.ProcessGroupNCCL(store, rank, 2, options)


def _opened_store(host: str) -> tuple[Any, int]:
    _, distributed = _import_torch()
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Bound here: by itself the store would listen on every address of the machine.
        listening.bind((host, 0))
        listening.listen()
        port = int(listening.getsockname()[1])
        with _group_errors("opening the store"):
            store = distributed.TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=_MEET_WITHIN_S),
                wait_for_workers=False,
                master_listen_fd=listening.fileno(),
                # libuv leaks a pipe in the process.
                use_libuv=False,
            )
        listening.detach()
    finally:
        listening.close()
    return store, port


def _joined_store(host: str, port: int) -> Any:
    _, distributed = _import_torch()
    with _group_errors("joining the store"):
        timeout = timedelta(seconds=_MEET_WITHIN_S)
        return distributed.TCPStore(
            host, port, is_master=False, timeout=timeout, wait_for_workers=False, use_libuv=False
        )


@contextlib.contextmanager
def _group_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Their references to the group would outlive close() while the error is handled.
        traceback.clear_frames(error.__traceback__)
        raise LinkLost(f"{doing}: {str(error).splitlines()[0][:200]}") from error


def _require_backend(backend: str) -> None:
    try:
        torch, distributed = _import_torch()
    except ImportError as error:
        raise ConfigError(
            "kv_transports", f"{backend} needs torch: {install_command('transformers')} ({error})"
        ) from error
    if backend == "nccl":
        if not distributed.is_nccl_available() or not torch.cuda.is_available():
            raise ConfigError("kv_transports", "nccl needs a build of torch with NCCL, and a GPU")
        # A late message must cost its connection, not the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    elif not distributed.is_gloo_available():
        raise ConfigError("kv_transports", f"this build of torch has no {backend}")


def _import_torch() -> tuple[Any, Any]:
    # On demand: it takes seconds, and other transports do not need it.
    return importlib.import_module("torch"), importlib.import_module("torch.distributed")
