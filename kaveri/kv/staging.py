"""Memory in which scattered pieces of KV become one contiguous piece before they travel, and the other way round.

Buffered copies (DéjàVu, section 4.1.1, optimisation 1): a token or a share of a prompt is many small pieces of the
cache, and what moves them pays for every piece. They are copied together here first, at the speed of memory.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kaveri.errors import DeadlineExceeded, InvalidArgument


class StagingBuffers:
    """`buffer_count` buffers of `buffer_bytes`, used again and again. Any thread.

    buffers: uint8, prefaulted: first touch of fresh memory is several times slower than copying. Page-aligned, as pools
    are: between places that differ by a few bytes within their pages a copy is half as fast. Never more memory than
    buffer_count * buffer_bytes, rounded up to pages; whoever finds none waits.
    """

    def __init__(self, buffer_bytes: int, buffer_count: int = 2) -> None:
        if buffer_bytes < 1:
            raise InvalidArgument("buffer_bytes", buffer_bytes, "at least 1")
        if buffer_count < 1:
            raise InvalidArgument("buffer_count", buffer_count, "at least 1")
        self.buffer_bytes = buffer_bytes
        self.buffer_count = buffer_count
        stride = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        raw = np.frombuffer(mmap.mmap(-1, stride * buffer_count), np.uint8)
        raw.fill(0)
        self._free = [raw[i * stride : i * stride + buffer_bytes] for i in range(buffer_count)]
        self._changed = threading.Condition()

    @property
    def free_count(self) -> int:
        """Buffers that nobody has."""
        return len(self._free)

    def acquire(self, timeout_s: float) -> npt.NDArray[np.uint8]:
        """A buffer, the caller's until release(); what stands in it is of no meaning. Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._free:
                if not self._changed.wait(deadline_s - time.monotonic()) and not self._free:
                    raise DeadlineExceeded(f"waiting for one of {self.buffer_count} staging buffers")
            return self._free.pop()

    def release(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Gives a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    @contextlib.contextmanager
    def lend(self, timeout_s: float) -> Iterator[npt.NDArray[np.uint8]]:
        """A buffer for the length of a `with`. Raises DeadlineExceeded."""
        buffer = self.acquire(timeout_s)
        try:
            yield buffer
        finally:
            self.release(buffer)
