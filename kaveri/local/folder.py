"""Temporary folder of a local cluster, removed with it; if its owner was killed, by the next one."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kaveri-stack-"
_LOCK = "in-use.lock"


@contextlib.contextmanager
def stack_folder() -> Iterator[Path]:
    """Create a temporary folder for the duration of the context. Also removes folders whose owners were killed."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        lock = folder / "locking"
        with lock.open("w") as held:
            # The kernel releases the lock with this process, however it ends; children do not inherit it.
            fcntl.flock(held, fcntl.LOCK_EX)
            # Renamed only now: a folder of this name without a held lock is abandoned.
            lock.rename(folder / _LOCK)
            yield folder
    finally:
        # A killed child may have been writing there.
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # The folder is in use, another user's, or was removed meanwhile.
        with contextlib.suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
