"""A process to stream to. It lands chunks and forgets them, stores KV lines in a pool of its own, and reads away what
comes over a bare socket."""

import contextlib
import multiprocessing
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.chunk_link import ChunkReceiver, ChunkSender
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_link import LineReceiver
from kaveri.kv.line_pool import LinePool
from kaveri.kv.pool import KvPool
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.telemetry.logs import configure_logs

STAGING_BYTES = 8 << 20
"""Most that is streamed at a time."""
LINE_CHUNK_BYTES = STAGING_BYTES + (1 << 16)
"""The same with the headers of the lines."""
_CHUNK_BLOCKS = 2048
_LENGTH = struct.Struct("<Q")
_WAIT_S = 60.0


class StreamingProcess:
    """The near side of it."""

    def __init__(self, control: Connection, transport: str, bare: socket.socket) -> None:
        self._control = control
        self._bare = bare
        self._lock = threading.Lock()
        transports = make_transports((transport,))
        self.chunks = ChunkSender(
            lambda *asked: self._grant("chunks", *asked), block_count=_CHUNK_BLOCKS // 2, transports=transports
        )
        """A place to flush to."""
        self.lines = ChunkSender(lambda *asked: self._grant("lines", *asked), block_count=512, transports=transports)
        """The place of LineSenders."""

    def send_bare(self, regions: Sequence[npt.NDArray[np.uint8]]) -> None:
        """One system call for each region; returns once all of it has been read."""
        self._bare.sendall(_LENGTH.pack(sum(region.nbytes for region in regions)))
        for region in regions:
            self._bare.sendall(region.data)
        assert self._bare.recv(1)

    def close(self) -> None:
        """Ends the connections and the process."""
        self.chunks.close()
        self.lines.close()
        self._bare.close()
        self._control.send(None)

    def _grant(self, which: str, name: str, byte_count: int, expires_in_s: float) -> Ticket:
        with self._lock:
            self._control.send((which, name, byte_count, expires_in_s))
            ticket = self._control.recv()
        assert isinstance(ticket, Ticket), ticket
        return ticket


@contextlib.contextmanager
def streaming_process(layout: KvLayout, pool_blocks: int, transport: str) -> Iterator[StreamingProcess]:
    """layout, pool_blocks: of the pool in which it stores lines. transport: of the chunks and the lines."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = str(Path(folder) / "bare.sock")
        listening.bind(path)
        listening.listen(1)
        control, their_control = spawn.Pipe()
        arguments = (their_control, Path(folder), path, layout, pool_blocks, transport)
        process = spawn.Process(target=_receive, args=arguments, daemon=True)
        process.start()
        their_control.close()
        listening.settimeout(_WAIT_S)
        bare, _ = listening.accept()
        other = StreamingProcess(control, transport, bare)
        try:
            yield other
        finally:
            other.close()
            process.join(_WAIT_S)
            control.close()


def _receive(
    control: Connection, folder: Path, bare_path: str, layout: KvLayout, pool_blocks: int, transport: str
) -> None:
    """The other process."""
    configure_logs("streaming", "receiver", level="error")
    bare = socket.socket(socket.AF_UNIX)
    bare.connect(bare_path)
    threading.Thread(target=_read_away, args=(bare,), daemon=True).start()
    pool = KvPool(layout, pool_blocks)
    allocator = BlockAllocator(pool.block_count)

    def blocks_of(request: str, token_count: int) -> Sequence[int]:
        missing = layout.block_count(token_count) - len(allocator.blocks_of(request))
        allocator.allocate(request, max(0, missing))
        return allocator.blocks_of(request)

    def release(request: str) -> None:
        allocator.release(request)

    def forget(name: str, byte_count: int) -> None:
        chunks.discard(name)

    def listen(name: str) -> list[KvEndpoint]:
        address = str(folder / f"{name}.sock") if transport in PATH_NAMES else "127.0.0.1:0"
        return [KvEndpoint(transport, address)]

    chunks = ChunkReceiver(listen=listen("chunks"), epoch=1, block_count=_CHUNK_BLOCKS, on_landed=forget)
    lines = LineReceiver(
        LinePool(pool, layout, blocks_of, release), listen=listen("lines"), epoch=2, chunk_bytes=LINE_CHUNK_BYTES
    )
    while (asked := control.recv()) is not None:
        which, *details = asked
        control.send((chunks if which == "chunks" else lines).grant(*details))
    chunks.close()
    lines.close()


def _read_away(bare: socket.socket) -> None:
    scratch = bytearray(1 << 20)
    while length := bare.recv(_LENGTH.size, socket.MSG_WAITALL):
        (left_bytes,) = _LENGTH.unpack(length)
        while left_bytes:
            left_bytes -= bare.recv_into(scratch, min(left_bytes, len(scratch)))
        bare.sendall(b"!")
