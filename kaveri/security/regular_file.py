"""Reads and replaces regular files. Given a FIFO or a device, fails at once and never blocks."""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

MAX_FILE_BYTES = 4 * 2**20


def read_regular(path: str) -> bytes:
    """Read a whole file, following links. Raises OSError, also if it is not a regular file or over MAX_FILE_BYTES."""
    # Check first, since opening a FIFO or a device can have side effects.
    _check_regular(os.stat(path), path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        return _read_all(file, path)


@contextlib.contextmanager
def locked(path: str) -> Iterator[bytes]:
    """Lock a file against other replacers and yield its content. If missing, creates it owner-only. Raises OSError."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            _check_regular(os.stat(path), path)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        with open(opened, "rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The previous holder replaced the file, so this lock is on the old one.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                yield _read_all(file, path)
                return


def replace(path: str, content: bytes) -> None:
    """Replace a file atomically: readers find the old content or the new. Keeps mode, owner (if permitted) and a
    symbolic link to it. Raises OSError."""
    path = os.path.realpath(path)
    former = os.stat(path)
    handle, new_path = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, stat.S_IMODE(former.st_mode))
            with contextlib.suppress(PermissionError):
                os.fchown(handle, former.st_uid, former.st_gid)
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(new_path, path)
    except BaseException:
        os.unlink(new_path)
        raise


def _check_regular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if found.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"has {found.st_size} bytes; at most {MAX_FILE_BYTES} are read", path)


def _read_all(file: BinaryIO, path: str) -> bytes:
    _check_regular(os.fstat(file.fileno()), path)
    content = b""
    # The file may grow while it is read.
    while len(content) <= MAX_FILE_BYTES and (part := file.read(MAX_FILE_BYTES + 1 - len(content))):
        content += part
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes", path)
    return content
