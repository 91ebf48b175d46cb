"""The thread on which an engine copies KV to replicas, and the copies of a pool in this process.

copier.py decides the copies and their order; this thread waits before each block: for the rate limit, and to
leave CPU time and memory bandwidth to the requests.
"""

import threading
import time
from collections.abc import Sequence
from typing import Generic, Protocol

from kaveri.engine.copier import Copier, CopyAccount, OwnerT, ReplicaOptions
from kaveri.engine.shared import Shared
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.push import IsIntact, PushListener, PushSender
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import get_logger

_CLOSE_TIMEOUT_S = 5.0
_REST_BYTES_PER_S = 2.5e9
"""Bytes per second that set the pause before each block: about twice the time that copying the block takes."""
_LONGEST_REST_S = 0.02
"""Longest pause before a block without a rate limit, in seconds."""
_LONGEST_WAIT_S = 1.0
"""Longest wait before a block, in seconds: bounds how late holders learn that a request has ended."""
_LOOK_EVERY_S = 0.1
"""Interval, in seconds, at which time limits are checked while there are copies, even without other work."""


def slots_of(layout: KvLayout, options: ReplicaOptions) -> int:
    """Return the number of KV blocks that may be in flight: at least four."""
    return max(4, options.staging_bytes // (layout.layer_count * layout.block_bytes))


class CopyPlane(Protocol):
    """Creates the sender that pushes KV copies, and stages the blocks that the sender cannot read directly."""

    def start(self, listener: PushListener, is_intact: IsIntact) -> PushSender:
        """Return the sender of the copies. is_intact: for one that reads the engine's pool. Called once, first."""

    def stage(self, block_id: int, slot: int) -> int:
        """Return the block to push for a block of the engine's pool: itself, or the slot that it was copied to."""


class PoolCopyPlane:
    """CopyPlane of a KV pool in this process, from which its sender reads. transports: in order of preference."""

    def __init__(self, pool: KvPool, transports: Sequence[Transport]) -> None:
        self._pool, self._transports = pool, transports

    def start(self, listener: PushListener, is_intact: IsIntact) -> PushSender:
        return KvSender(self._pool, listener, transports=self._transports, is_intact=is_intact)

    def stage(self, block_id: int, slot: int) -> int:
        return block_id


class Pace:
    """Limits how fast blocks are copied. interval_s: min seconds between their starts. rest_s: pause before each."""

    def __init__(self, interval_s: float, rest_s: float) -> None:
        self._interval_s = interval_s
        self._rest_s = rest_s
        self._free_at_s = 0.0

    def wait_s(self, now_s: float, *, at_once: bool = False) -> float:
        """Return the seconds to wait before the next block, and count that block. Unused capacity is lost. at_once:
        leave out the rest; only the rate limit counts."""
        begin_s = max(now_s if at_once else now_s + self._rest_s, self._free_at_s)
        self._free_at_s = begin_s + self._interval_s
        return begin_s - now_s


class CopierThread(Generic[OwnerT]):
    """Runs a Copier (KV copies to other instances) on its own thread. layout: of the whole engine."""

    def __init__(
        self,
        layout: KvLayout,
        plane: CopyPlane,
        shared: Shared,
        account: CopyAccount[OwnerT],
        options: ReplicaOptions,
    ) -> None:
        self._plane = plane
        self._shared = shared
        block_bytes = layout.layer_count * layout.block_bytes
        interval_s = block_bytes / options.bytes_per_s if options.bytes_per_s else 0.0
        self._pace = Pace(interval_s, min(block_bytes / _REST_BYTES_PER_S, _LONGEST_REST_S))
        self._ending, self._work = threading.Event(), threading.Event()
        slot_count, on_work = slots_of(layout, options), self._work.set
        self.copier = Copier(
            layout, slot_count, shared, account, self._stage, plane.start, on_work=on_work, now_s=time.monotonic
        )
        self._thread = threading.Thread(target=self._run, name="kaveri-copier", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread after blocks were computed or requests ended. Callable from any thread and under any lock."""
        if self.copier.has_copies:
            self._work.set()

    def close(self) -> None:
        """End all copies and the thread. Idempotent."""
        self._ending.set()
        self._work.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.copier.close()

    def _stage(self, block_id: int, slot: int, at_once: bool) -> int:
        # The block may be given up meanwhile.
        wait_s = min(self._pace.wait_s(time.monotonic(), at_once=at_once), _LONGEST_WAIT_S)
        if wait_s > 0:
            self._ending.wait(wait_s)
        return self._plane.stage(block_id, slot)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._work.wait(_LOOK_EVERY_S if self.copier.has_copies else None)
            self._work.clear()
            try:
                while not self._ending.is_set() and self.copier.advance():
                    pass
                # A release that has failed without an answer of the holder.
                self._shared.publish()
            except Exception as error:  # As above.
                get_logger().exception("copier_failed", error=repr(error))
                self.copier.fail(f"the copier failed: {error!r}")
