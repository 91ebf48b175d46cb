"""Chunks of KV that are flushed here and fetched in another process: the remote place, over any transport.

A chunk is pushed from blocks of the ChunkSender's pool to blocks of the ChunkReceiver's, by a ticket for each chunk.
How tickets are asked for and brought over is the caller's: `grant` is ChunkReceiver.grant behind whatever RPC there is.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kaveri.errors import DeadlineExceeded, InvalidArgument, NoCapacity, TransferFailed
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.layout import KvLayout
from kaveri.kv.places import require_name
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport

CHUNK_BLOCK_BYTES = 64 * 1024
"""Chunks travel in blocks of this size; the last one goes whole."""
_FAILURES_MAX = 4096
"""Lost chunks that a sender remembers until somebody settles."""

GrantChunk = Callable[[str, int, float], Ticket]
"""(name, byte count, seconds until it expires) -> the ChunkReceiver's ticket. Raises NoCapacity, Unavailable, ..."""


class ChunkSender:
    """The flushing end: a FlushPlace. Its pool of `block_count` blocks is all the memory it takes.

    transports: None for all that there are, in the order of preference.
    """

    def __init__(
        self,
        grant: GrantChunk,
        *,
        block_count: int,
        block_bytes: int = CHUNK_BLOCK_BYTES,
        transports: Sequence[Transport] | None = None,
    ) -> None:
        self._grant = grant
        self._pool = KvPool(_chunk_layout(block_bytes), block_count)
        self._allocator = BlockAllocator(block_count)
        self._changed = threading.Condition()
        # Of each push under way: its chunk's name.
        self._names: dict[bytes, str] = {}
        # Of chunks that were lost, and not told of or flushed again: why. The oldest give way.
        self._failures: dict[str, str] = {}
        self._sender = KvSender(self._pool, self._on_event, transports=transports)

    def flush(self, name: str, chunk: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FlushPlace.flush. Waits for room in its own pool and in the receiver's; the push itself goes on behind.

        Raises NoCapacity when the receiver has no room in time.
        """
        deadline_s = time.monotonic() + timeout_s
        require_name(name)
        count = -(-chunk.nbytes // self._pool.layout.block_bytes)
        if not 1 <= count <= self._pool.block_count:
            most = self._pool.block_count * self._pool.layout.block_bytes
            raise InvalidArgument("chunk", chunk.nbytes, f"in [1, {most}] bytes")
        owner = secrets.token_bytes(16)
        with self._changed:
            while self._allocator.free_count < count:
                left_s = deadline_s - time.monotonic()
                if not self._changed.wait(left_s) and self._allocator.free_count < count:
                    raise DeadlineExceeded(f"flushing {name}")
            block_ids = self._allocator.allocate(owner, count)
        try:
            _copy(self._pool.regions(0, block_ids), chunk, into_regions=True)
            ticket = self._ask(name, chunk.nbytes, deadline_s)
            with self._changed:
                self._allocator.move(owner, ticket.transfer_id)
                owner = ticket.transfer_id
                self._names[owner] = name
                self._failures.pop(name, None)
            self._sender.open(ticket)
        except BaseException:
            with self._changed:
                self._names.pop(owner, None)
                self._allocator.release(owner)
                self._changed.notify_all()
            raise
        self._sender.write(owner, 0, 0, block_ids)
        self._sender.finish(owner, b"")

    def settle(self, prefix: str, timeout_s: float) -> None:
        """See FlushPlace.settle: the receiver has all of them, verified."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way(prefix), max(0.0, timeout_s)):
                raise DeadlineExceeded(f"{self._under_way(prefix)} chunks of {prefix} on their way")
            failed = [name for name in self._failures if name.startswith(prefix)]
            reasons = [self._failures.pop(name) for name in failed]
        if failed:
            raise TransferFailed(f"{failed[0]}: {reasons[0]}")

    def close(self) -> None:
        """Fails what is under way and ends the threads. Idempotent."""
        self._sender.close()

    def _ask(self, name: str, byte_count: int, deadline_s: float) -> Ticket:
        """A ticket, when the receiver has room for it: a slow receiver slows those who flush to it."""
        while True:
            try:
                return self._grant(name, byte_count, max(0.001, deadline_s - time.monotonic()))
            except NoCapacity as full:
                if time.monotonic() + full.retry_after_s >= deadline_s:
                    raise
                time.sleep(full.retry_after_s)

    def _under_way(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self._names.values())

    def _on_event(self, event: PushAccepted | PushFailed) -> None:
        with self._changed:
            name = self._names.pop(event.transfer_id)
            self._allocator.release(event.transfer_id)
            if isinstance(event, PushFailed):
                self._failures[name] = event.reason
                if len(self._failures) > _FAILURES_MAX:
                    del self._failures[next(iter(self._failures))]
            self._changed.notify_all()


class ChunkReceiver:
    """The fetching end: a FetchPlace. Its pool of `block_count` blocks is all the memory it takes; a chunk stays there
    until it is discarded, and whoever asks for a ticket meanwhile is told NoCapacity.

    epoch, listen, transports: as of KvReceiver. on_landed: called with the name and the size of each chunk, in the
    order of landing, on a thread of the receiver; it may fetch and discard, not close.
    """

    def __init__(
        self,
        *,
        listen: Sequence[KvEndpoint],
        epoch: int,
        block_count: int,
        block_bytes: int = CHUNK_BLOCK_BYTES,
        transports: Sequence[Transport] | None = None,
        on_landed: Callable[[str, int], None] = lambda name, byte_count: None,
    ) -> None:
        self._on_landed = on_landed
        self._pool = KvPool(_chunk_layout(block_bytes), block_count)
        self._allocator = BlockAllocator(block_count)
        self._changed = threading.Condition()
        # Of each granted transfer, and of each landed chunk: its name or its transfer, and its size.
        self._granted: dict[bytes, tuple[str, int]] = {}
        self._landed: dict[str, tuple[bytes, int]] = {}
        self._receiver = KvReceiver(self._pool, self._on_event, listen=listen, epoch=epoch, transports=transports)

    def grant(self, name: str, byte_count: int, expires_in_s: float) -> Ticket:
        """A ticket for one chunk. Raises NoCapacity, or TransferFailed when closed."""
        require_name(name)
        block_bytes = self._pool.layout.block_bytes
        if not 1 <= byte_count <= self._pool.block_count * block_bytes:
            raise InvalidArgument("byte_count", byte_count, f"in [1, {self._pool.block_count * block_bytes}]")
        with self._changed:
            owner = secrets.token_bytes(16)
            block_ids = self._allocator.allocate(owner, -(-byte_count // block_bytes))
            try:
                ticket = self._receiver.grant(block_ids, len(block_ids) * self._pool.layout.block_tokens, expires_in_s)
            except TransferFailed:
                self._allocator.release(owner)
                raise
            self._allocator.move(owner, ticket.transfer_id)
            self._granted[ticket.transfer_id] = name, byte_count
        return ticket

    def fetch(self, name: str, into: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FetchPlace.fetch."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while name not in self._landed:
                if not self._changed.wait(deadline_s - time.monotonic()) and name not in self._landed:
                    raise DeadlineExceeded(f"fetching {name}")
            transfer_id, byte_count = self._landed[name]
            if byte_count != into.nbytes:
                raise TransferFailed(f"{name} has {byte_count} bytes, {into.nbytes} were asked for")
            regions = self._pool.regions(0, self._allocator.blocks_of(transfer_id))
            # Under the lock, so that nobody discards it meanwhile.
            _copy(regions, into, into_regions=False)

    def discard(self, name: str) -> None:
        """See FetchPlace.discard."""
        with self._changed:
            transfer_id, _ = self._landed.pop(name, (b"", 0))
            self._allocator.release(transfer_id)

    def close(self) -> None:
        """Ends connections and threads. Idempotent."""
        self._receiver.close()

    def check_integrity(self) -> None:
        """Asserts that no block is held but by chunks that are on their way or have landed."""
        with self._changed:
            self._allocator.check_integrity({*self._granted, *(transfer for transfer, _ in self._landed.values())})

    def _on_event(self, event: TransferLanded | TransferReleased) -> None:
        with self._changed:
            name, byte_count = self._granted.pop(event.transfer_id)
            if isinstance(event, TransferReleased):
                self._allocator.release(event.transfer_id)
                return
            # The newest chunk of a name replaces the one before.
            replaced, _ = self._landed.pop(name, (b"", 0))
            self._allocator.release(replaced)
            self._landed[name] = event.transfer_id, byte_count
            self._changed.notify_all()
        self._on_landed(name, byte_count)


def _chunk_layout(block_bytes: int) -> KvLayout:
    """Blocks of plain bytes; the order's name keeps them apart from KV."""
    if block_bytes < 8 or block_bytes % 8:
        raise InvalidArgument("block_bytes", block_bytes, "a multiple of 8")
    return KvLayout("kaveri-chunks", 1, block_bytes // 8, 1, 1, "float32", order="bytes")


def _copy(regions: Sequence[memoryview], chunk: npt.NDArray[np.uint8], *, into_regions: bool) -> None:
    done = 0
    for region in regions:
        blocks = np.frombuffer(region, np.uint8)[: chunk.nbytes - done]
        piece = chunk[done : done + blocks.nbytes]
        if into_regions:
            np.copyto(blocks, piece)
        else:
            np.copyto(piece, blocks)
        done += blocks.nbytes
