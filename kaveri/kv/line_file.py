"""KV lines on a local disk: one append-only file per request, readable after a crash up to its last whole record."""

import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kaveri.errors import LayoutMismatch, NoCapacity, TransferFailed
from kaveri.kv.disk import write_all
from kaveri.kv.layout import KvLayout
from kaveri.kv.lines import LineRun, TornRecord, decode_record, encode_header
from kaveri.kv.places import require_request_name

_MAGIC = b"KVLINES1"
_HEADER = struct.Struct("<8sQQ")  # magic, bytes of the layout as JSON, xxh3_64 of it


@dataclass(frozen=True, slots=True)
class LineFile:
    """What a file holds."""

    layout: KvLayout
    """Of the pool that the lines come from."""
    runs: tuple[LineRun, ...]
    """In the order of writing; where tokens appear twice the later ones count. Views of one copy of the file."""
    whole_bytes: int
    """The file up to here is whole."""
    torn_bytes: int
    """What follows, of a record that its writer did not finish; 0 after an orderly end."""


def read_line_file(path: Path) -> LineFile:
    """Reads and verifies a file. A torn last record is left out and told of; raises TransferFailed when anything before
    it is damaged, or the file is none of ours; TornRecord when not even its header is whole."""
    data = np.fromfile(path, np.uint8)
    layout, position = _read_layout(path, data)
    runs = []
    while position < data.nbytes:
        try:
            run, position = decode_record(data, position)
        except TornRecord:
            break
        except TransferFailed as error:
            raise TransferFailed(f"{path.name}: {error.reason}") from error
        runs.append(run)
    return LineFile(layout, tuple(runs), position, data.nbytes - position)


class LineDisk:
    """A LineSink: requests' lines in `folder`, each request in <request>.kvlines, until the request ends.

    A file that is there already is gone on with: its torn last record is cut off first. Lines survive this process as
    soon as write() has returned, and a loss of power after settle(), which waits for the disk, however long it takes.

    byte_limit: of all files that this object writes; NoCapacity beyond it. One file is open per request.
    """

    def __init__(self, folder: Path, layout: KvLayout, byte_limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.layout = layout
        self.byte_limit = byte_limit
        self._lock = threading.Lock()
        # Of each request: its open file and how long it is.
        self._files: dict[str, tuple[int, int]] = {}
        self._written_bytes = 0
        self._unsynced: set[str] = set()

    def write(self, runs: Sequence[LineRun], timeout_s: float) -> None:
        """See LineSink.write. One call of the kernel per request."""
        with self._lock:
            for run in runs:
                self._append(run)

    def end(self, request: str) -> None:
        """See LineSink.end: the file is deleted."""
        with self._lock:
            file, size = self._files.pop(request, (-1, 0))
            self._unsynced.discard(request)
            if file >= 0:
                self._written_bytes -= size
                os.close(file)
            self._path(request).unlink(missing_ok=True)

    def settle(self, timeout_s: float) -> None:
        """See LineSink.settle. The disk knows no deadline."""
        with self._lock:
            for request in sorted(self._unsynced):
                try:
                    os.fdatasync(self._files[request][0])
                except OSError as error:
                    raise TransferFailed(f"{request}: {error.strerror}") from error
                self._unsynced.remove(request)

    def close(self) -> None:
        """Closes the files, which stay. Idempotent."""
        with self._lock:
            for file, _ in self._files.values():
                os.close(file)
            self._files.clear()
            self._written_bytes = 0
            self._unsynced.clear()

    def _append(self, run: LineRun) -> None:
        header = encode_header(run)
        record_bytes = len(header) + run.lines.nbytes
        if self._written_bytes + record_bytes > self.byte_limit:
            reason = f"{self._written_bytes} of {self.byte_limit} bytes are written, {record_bytes} more are wanted"
            raise NoCapacity("line disk", 1.0, reason)
        file = size = -1
        try:
            file, size = self._files.get(run.request) or self._open(run.request)
            write_all(file, [memoryview(header), run.lines.data])
        except OSError as error:
            if size >= 0:
                # Else the next record would follow half a one.
                os.ftruncate(file, size)
            raise TransferFailed(f"{run.request}: {error.strerror}") from error
        self._files[run.request] = file, size + record_bytes
        self._written_bytes += record_bytes
        self._unsynced.add(run.request)

    def _open(self, request: str) -> tuple[int, int]:
        path = self._path(request)
        size = 0
        if path.exists():
            try:
                found = read_line_file(path)
                found.layout.require_same(self.layout)
                size = found.whole_bytes
            except TornRecord:
                pass
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            if not size:
                described = json.dumps(asdict(self.layout)).encode()
                # Filled up, so that records begin at words.
                described += b" " * (-len(described) % 8)
                header = _HEADER.pack(_MAGIC, len(described), xxhash.xxh3_64_intdigest(described)) + described
                write_all(file, [memoryview(header)])
                size = len(header)
        except BaseException:
            os.close(file)
            raise
        self._files[request] = file, size
        self._written_bytes += size
        return file, size

    def _path(self, request: str) -> Path:
        return self.folder / f"{require_request_name(request)}.kvlines"


def _read_layout(path: Path, data: npt.NDArray[np.uint8]) -> tuple[KvLayout, int]:
    """The layout at the beginning of a file, and where it ends."""
    if data.nbytes < _HEADER.size or not data.any():
        raise TornRecord(f"{path.name} has no whole header")
    magic, described_bytes, digest = _HEADER.unpack_from(data.data)
    if magic != _MAGIC:
        raise TransferFailed(f"{path.name} holds no KV lines")
    described = data[_HEADER.size : _HEADER.size + described_bytes].tobytes()
    if len(described) < described_bytes:
        raise TornRecord(f"{path.name} has no whole header")
    if xxhash.xxh3_64_intdigest(described) != digest:
        raise TransferFailed(f"{path.name}: its header is damaged")
    try:
        return KvLayout(**json.loads(described)), _HEADER.size + described_bytes
    except (ValueError, TypeError) as error:
        # A field more or less: written by another version.
        raise LayoutMismatch("fields", sorted(KvLayout.__slots__), described.decode(errors="replace")) from error
