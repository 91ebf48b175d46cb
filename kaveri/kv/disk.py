"""Chunks of KV on a local disk: one file each."""

import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kaveri.errors import DeadlineExceeded, NoCapacity, TransferFailed
from kaveri.kv.places import require_name

_MAGIC = b"KVCHUNK1"
_HEADER = struct.Struct("<8sQQ")  # magic, chunk bytes, xxh3_64 of the chunk
_POLL_S = 0.002


class LocalDisk:
    """Chunks in files of a folder, which is made when it is not there.

    A chunk appears whole or not at all: it is written beside its place (.<name>.part) and renamed. It survives the
    process, not a loss of power: nothing is synced. A damaged one is found by its digest when it is fetched.

    byte_limit: most that this object has flushed and not discarded. One object flushes into a folder; any number, in
    other processes too, fetch from it.
    """

    def __init__(self, folder: Path, byte_limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.byte_limit = byte_limit
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    def flush(self, name: str, chunk: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FlushPlace.flush. The page cache takes it: how long a write waits for the disk is the kernel's affair."""
        path = self._path(name)
        with self._lock:
            kept = sum(self._sizes.values()) - self._sizes.get(name, 0)
            if kept + chunk.nbytes > self.byte_limit:
                reason = f"{kept} of {self.byte_limit} bytes are in use, {chunk.nbytes} more are wanted"
                raise NoCapacity("local disk", 1.0, reason)
            self._sizes[name] = chunk.nbytes
        data = chunk.data
        buffers = [memoryview(_HEADER.pack(_MAGIC, chunk.nbytes, xxhash.xxh3_64_intdigest(data))), data]
        part = self._part(name)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_all(file, buffers)
            finally:
                os.close(file)
            part.rename(path)
        except OSError as error:
            with self._lock:
                self._sizes.pop(name, None)
            part.unlink(missing_ok=True)
            raise TransferFailed(f"{name} could not be written to {self.folder}: {error.strerror}") from error

    def settle(self, prefix: str, timeout_s: float) -> None:
        """See FlushPlace.settle: a chunk can be fetched as soon as flush() has returned."""

    def fetch(self, name: str, into: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """See FetchPlace.fetch."""
        path, deadline_s = self._path(name), time.monotonic() + timeout_s
        while True:
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(f"fetching {name}") from None
                time.sleep(_POLL_S)
        try:
            magic, byte_count, digest = _HEADER.unpack(os.read(file, _HEADER.size).ljust(_HEADER.size, b"\0"))
            if magic != _MAGIC or byte_count != into.nbytes:
                raise TransferFailed(f"{name} is no chunk of {into.nbytes} bytes")
            view, done = into.data, 0
            while done < byte_count and (read := os.readv(file, [view[done:]])):
                done += read
        finally:
            os.close(file)
        if done < byte_count or xxhash.xxh3_64_intdigest(view) != digest:
            raise TransferFailed(f"{name} is damaged on disk")

    def discard(self, name: str) -> None:
        """See FetchPlace.discard."""
        with self._lock:
            self._sizes.pop(name, None)
        self._path(name).unlink(missing_ok=True)
        self._part(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{require_name(name)}.chunk"

    def _part(self, name: str) -> Path:
        return self.folder / f".{require_name(name)}.part"


def write_all(file: int, buffers: list[memoryview]) -> None:
    """Writes the buffers, in order, at the file's position; the list is used up. Raises OSError."""
    while buffers:
        written = os.writev(file, buffers[:1024])
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]
