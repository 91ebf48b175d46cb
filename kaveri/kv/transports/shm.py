"""The shared-memory transport, "shm": the sender maps the receiver's pool and copies blocks into it.

The payload is copied once, by the sender, and not through the kernel. After its hello the receiver sends the descriptor
of the memory file at whose start its pool lies, and a layer's size. All else is the protocol of one_sided.py, over a
Unix socket accessible to the same user only.
"""

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kaveri.kv.tiers.pool import KvPool, is_run
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkListener, LinkLost, TransferIntake
from kaveri.kv.transports.one_sided import OneSidedLink, OneSidedReceivingConnection
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.socket_listener import SocketListener
from kaveri.kv.transports.stream import CACHED_BYTES, ByteStream

_OFFER = struct.Struct("<Q")
"""Bytes of a layer of the receiver's pool. Sent together with its descriptor."""
_PERMITTED_BYTES = 2 << 20
"""Bytes copied under one permission; a revocation waits for one such copy, a fraction of a millisecond. Asking for it
every 512 KiB costs a tenth of the speed."""


class ShmTransport(SocketTransport):
    """Transport by shared memory between processes of one host and user. Addresses are paths of Unix sockets."""

    def __init__(self) -> None:
        super().__init__("unix")
        self.name = self.label = "shm"
        self.connection_type = ShmReceivingConnection
        self.capabilities = replace(self.capabilities, can_revoke=False, is_byte_stream=False)

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> SocketListener:
        """Listen for senders, which map `pool`. Raises ConfigError for a bad path or a pool without a memory file."""
        _ = pool.descriptor
        return super().listen(address, pool, intake)

    def _link(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> "ShmLink":
        offer, descriptor = stream.receive_descriptor(_OFFER.size)
        try:
            (layer_bytes,) = _OFFER.unpack(offer)
            target = _map_pool(descriptor, layer_bytes, pool)
        finally:
            os.close(descriptor)
        return ShmLink(stream, pool, listener, endpoint, target)


class ShmLink(OneSidedLink):
    """A sender's shared-memory connection; implements transport.Link.

    target: the receiver's pool, mapped: [layer_count, block_count, block_bytes], uint8.
    """

    def __init__(
        self,
        stream: ByteStream,
        pool: KvPool,
        listener: LinkListener,
        endpoint: KvEndpoint,
        target: npt.NDArray[np.uint8],
    ) -> None:
        self._target = target
        super().__init__(stream, pool, listener, endpoint, target.shape[1])

    def close(self) -> None:
        super().close()
        # Unmap now, not at the next garbage collection: it is another process's whole pool.
        self._target = np.empty((0, 0, 0), np.uint8)

    def _put(
        self,
        ticket: Ticket,
        layers: range,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> bool:
        block_bytes = self._pool.layout.block_bytes
        permitted_blocks, piece_blocks = max(1, _PERMITTED_BYTES // block_bytes), max(1, CACHED_BYTES // block_bytes)
        runs = _runs(source_blocks, target_blocks, piece_blocks)
        if digest is None and len(runs) == 1:
            return self._put_run(ticket, layers, runs[0], permitted_blocks, is_stopped)
        for layer in layers:
            source, target = self._pool.memory[layer], self._target[layer]
            for permitted in _portions(runs, permitted_blocks):
                with self._permission(ticket, is_stopped) as is_permitted:
                    if not is_permitted:
                        return False
                    for from_block, to_block, count in permitted:
                        copied = source[from_block : from_block + count]
                        np.copyto(target[to_block : to_block + count], copied)
                        if digest is not None:
                            digest.update(copied.data)
        return True

    def _put_run(
        self,
        ticket: Ticket,
        layers: range,
        run: tuple[int, int, int],
        permitted_blocks: int,
        is_stopped: Callable[[], bool],
    ) -> bool:
        # Few adjacent blocks, as a replica's push usually writes: several layers in one call. A call for each layer
        # would take longer than its bytes, and block the engine's other threads.
        from_block, to_block, count = run
        layer_count = max(1, permitted_blocks // count)
        for first in range(layers.start, layers.stop, layer_count):
            last = min(first + layer_count, layers.stop)
            with self._permission(ticket, is_stopped) as is_permitted:
                if not is_permitted:
                    return False
                copied = self._pool.memory[first:last, from_block : from_block + count]
                np.copyto(self._target[first:last, to_block : to_block + count], copied)
        return True


class ShmReceivingConnection(OneSidedReceivingConnection):
    """Receiving side of one sender's shared-memory connection."""

    def _greet(self, hello: bytes) -> None:
        super()._greet(hello)
        self._stream.send_descriptor(_OFFER.pack(self._pool.memory[0].nbytes), self._pool.descriptor)


def _map_pool(descriptor: int, layer_bytes: int, own: KvPool) -> npt.NDArray[np.uint8]:
    # Blocks of the size of this side's, whatever the receiver's own.
    block_count, rest = divmod(layer_bytes, own.layout.block_bytes)
    shape = (own.layout.layer_count, block_count, own.layout.block_bytes)
    pool_bytes, file_bytes = math.prod(shape), os.fstat(descriptor).st_size
    if rest or not 0 < pool_bytes <= file_bytes:
        raise LinkLost(f"a pool of {layer_bytes} bytes a layer is not in the receiver's {file_bytes} bytes")
    try:
        # Its pages are there, and each faults once here when it is first written. Mapping them all now would take that
        # off the first requests, and count another process's whole pool as resident in this one.
        return np.frombuffer(mmap.mmap(descriptor, pool_bytes), np.uint8).reshape(shape)
    except OSError as error:
        raise LinkLost(f"the receiver's pool cannot be mapped: {error.strerror}") from error


def _runs(sources: Sequence[int], targets: Sequence[int], piece_blocks: int) -> list[tuple[int, int, int]]:
    """Split into runs contiguous on both sides: (first source block, first target block, count). If all blocks form
    one run, it is cut into pieces of piece_blocks."""
    total = len(sources)
    if is_run(sources) and is_run(targets):
        first, place = sources[0], targets[0]
        return [(first + i, place + i, min(piece_blocks, total - i)) for i in range(0, total, piece_blocks)]
    runs: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, total + 1):
        if i == total or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            runs.append((sources[start], targets[start], i - start))
            start = i
    return runs


def _portions(runs: Sequence[tuple[int, int, int]], block_count: int) -> Iterator[list[tuple[int, int, int]]]:
    portion: list[tuple[int, int, int]] = []
    portion_blocks = 0
    for run in runs:
        portion.append(run)
        portion_blocks += run[2]
        if portion_blocks >= block_count:
            yield portion
            portion, portion_blocks = [], 0
    if portion:
        yield portion
