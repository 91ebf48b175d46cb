"""Path of a listening Unix socket: never taken from a live listener, removed by its owner only."""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator

_LOCK_WITHIN_S = 2.0
_LOCK_POLL_S = 0.01
_PROBE_WITHIN_S = 1.0
_PATH_BYTES_MAX = 107
"""Max path length: sockaddr_un without the final zero. Clients cannot connect to a longer one."""


class UnixPath:
    """Path at which the socket `listening` listens, for this user only, from construction until remove().

    The socket is bound under another name and renamed when it listens: a path whose socket refuses connections belongs
    to a dead process, never to one that is just starting. Processes check and take a path under a lock of its folder.
    Raises OSError if another process listens there, the path is no socket, or the folder is unwritable or stays locked.
    """

    def __init__(self, listening: socket.socket, path: str, backlog: int) -> None:
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, f"longer than {_PATH_BYTES_MAX} bytes")
        self._path = path
        name, base = f".{secrets.token_hex(8)}", os.path.basename(path)
        with _folder(path) as folder:
            _lock(folder)
            _require_free(path)
            # Relative to the folder, however long its own path is.
            listening.bind(f"/proc/self/fd/{folder}/{name}")
            try:
                os.chmod(name, 0o600, dir_fd=folder)
                listening.listen(backlog)
                self._inode = _inode(os.stat(name, dir_fd=folder))
                os.rename(name, base, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(name, dir_fd=folder)
                raise

    def remove(self) -> None:
        """Remove the path, unless another process owns it. Call before closing the socket. Never raises; idempotent."""
        with contextlib.suppress(OSError), _folder(self._path) as folder:
            # Without the lock, a successor that takes the path just now would lose it: two rare events at once.
            with contextlib.suppress(TimeoutError):
                _lock(folder)
            # The inode is not reused while the socket is open.
            if _inode(os.stat(self._path)) == self._inode:
                os.unlink(self._path)


@contextlib.contextmanager
def _folder(path: str) -> Iterator[int]:
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        # Also releases the lock.
        os.close(folder)


def _lock(folder: int) -> None:
    give_up_at_s = time.monotonic() + _LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the folder's lock") from None
            time.sleep(_LOCK_POLL_S)


def _require_free(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_WITHIN_S)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                return
            except OSError:
                # A slow listener is there, or another user's.
                pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
