"""Where contiguous chunks of KV are flushed to and fetched from: DéjàVuLib's lowest layer (DéjàVu, table 1).

    place                                   memory kind         who fetches
    HostMemory                              host                this process
    kaveri.kv.disk.LocalDisk                local disk          any process that sees the folder
    kaveri.kv.chunk_link.ChunkSender        host of another     the process with the ChunkReceiver
                                            process or machine

There is no place in device memory: the pools of this library are host memory (kaveri.kv.pool), and an engine on a GPU
brings its blocks there first.
"""

import re
import threading
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kaveri.errors import DeadlineExceeded, InvalidArgument, NoCapacity, TransferFailed
from kaveri.kv.staging import StagingBuffers

REQUEST_NAME_MAX = 120
NAME_SEPARATOR = "~"
"""Stands in names of chunks behind the request, or whatever else they belong to, and in no name of a request."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._~-]{0,199}")


class FlushPlace(Protocol):
    """Takes chunks. Any thread."""

    def flush(self, name: str, chunk: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Copies one contiguous chunk; on return its memory may be used again, but it need not have arrived yet.

        chunk: uint8, C-contiguous. name: see require_name; a chunk of that name is replaced. Raises NoCapacity when
        the place is full, DeadlineExceeded, TransferFailed.
        """

    def settle(self, prefix: str, timeout_s: float) -> None:
        """Waits until all flushed chunks whose names begin with `prefix` can be fetched.

        Raises DeadlineExceeded, or TransferFailed, once, when one of them was lost on its way.
        """


class FetchPlace(Protocol):
    """Gives chunks back. Any thread."""

    def fetch(self, name: str, into: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Copies a chunk, waiting until it is there. `into` has the chunk's size. The chunk stays.

        Raises DeadlineExceeded, TransferFailed when the chunk is damaged or of another size.
        """

    def discard(self, name: str) -> None:
        """Forgets a chunk; unknown names are ignored."""


def require_name(name: str) -> str:
    """Raises InvalidArgument unless the name is 1 to 200 of A-Z a-z 0-9 . _ - ~ and begins with neither . nor ~."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument("name", name, "1 to 200 of A-Z a-z 0-9 . _ - ~, and begin with neither . nor ~")
    return name


def require_request_name(request: str) -> str:
    """Raises InvalidArgument unless chunks and files can be named after the request: 1 to 120 of A-Z a-z 0-9 . _ -."""
    if len(request) > REQUEST_NAME_MAX or NAME_SEPARATOR in request or not _NAME.fullmatch(request):
        limit = f"1 to {REQUEST_NAME_MAX} of A-Z a-z 0-9 . _ -, and not begin with ."
        raise InvalidArgument("request", request, limit)
    return request


class HostMemory:
    """Chunks in memory of this process: at most `chunk_count` of at most `chunk_bytes`, all of it taken at once.

    >>> place = HostMemory(chunk_bytes=4096, chunk_count=2)
    >>> place.flush("greeting", np.frombuffer(b"hello", np.uint8), timeout_s=1.0)
    >>> into = np.empty(5, np.uint8)
    >>> place.fetch("greeting", into, timeout_s=1.0)
    >>> into.tobytes()
    b'hello'
    """

    def __init__(self, chunk_bytes: int, chunk_count: int) -> None:
        self._slots = StagingBuffers(chunk_bytes, chunk_count)
        # The buffer and how much of it is the chunk.
        self._chunks: dict[str, tuple[npt.NDArray[np.uint8], int]] = {}
        self._changed = threading.Condition()

    def flush(self, name: str, chunk: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FlushPlace.flush. Does not wait for room."""
        if chunk.nbytes > self._slots.buffer_bytes:
            raise InvalidArgument("chunk", chunk.nbytes, f"at most {self._slots.buffer_bytes} bytes")
        with self._changed:
            slot, _ = self._chunks.pop(require_name(name), (None, 0))
            if slot is None:
                if not self._slots.free_count:
                    raise NoCapacity("host memory", 0.1, f"all of {self._slots.buffer_count} chunks are in use")
                slot = self._slots.acquire(0.0)
            np.copyto(slot[: chunk.nbytes], chunk)
            self._chunks[name] = slot, chunk.nbytes
            self._changed.notify_all()

    def settle(self, prefix: str, timeout_s: float) -> None:
        """See FlushPlace.settle: nothing is ever under way."""

    def fetch(self, name: str, into: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FetchPlace.fetch."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while name not in self._chunks:
                if not self._changed.wait(deadline_s - time.monotonic()) and name not in self._chunks:
                    raise DeadlineExceeded(f"fetching {name}")
            slot, chunk_bytes = self._chunks[name]
            if chunk_bytes != into.nbytes:
                raise TransferFailed(f"{name} has {chunk_bytes} bytes, {into.nbytes} were asked for")
            np.copyto(into, slot[:chunk_bytes])

    def discard(self, name: str) -> None:
        """See FetchPlace.discard."""
        with self._changed:
            slot, _ = self._chunks.pop(name, (None, 0))
            if slot is not None:
                self._slots.release(slot)
