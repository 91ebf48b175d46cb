"""The thread on which an engine copies KV to replicas, and the staging slots of a pool in this process.

copier.py decides the copies and their order; this thread waits before each block: for the rate limit, and to
leave CPU time and memory bandwidth to the requests.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Generic, Protocol

from kaveri.engine.copier import Copier, CopyAccount, OwnerT, ReplicaOptions
from kaveri.engine.shared import Shared
from kaveri.errors import EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.push import PushListener, PushSender
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import get_logger

_CLOSE_TIMEOUT_S = 5.0
_REST = 2.0
"""Pause before each block, as a multiple of the time that staging the last one took: longer on a busy machine. It also
keeps copies away from the end of a step, when tokens are sent."""
_LONGEST_REST_S = 0.02
"""Longest pause before a block without a rate limit, in seconds."""
_LONGEST_WAIT_S = 1.0
"""Longest wait before a block, in seconds: bounds how late holders learn that a request has ended."""
_LOOK_EVERY_S = 0.1
"""Interval, in seconds, at which time limits are checked while there are copies, even without other work."""


def slots_of(layout: KvLayout, options: ReplicaOptions) -> int:
    """Return the number of slots in the staging pool, each for one KV block: at least four."""
    return max(4, options.staging_bytes // (layout.layer_count * layout.block_bytes))


class CopyPlane(Protocol):
    """Data path of KV copies to other instances: staging slots for blocks, and the sender that pushes them."""

    def start(self, listener: PushListener) -> PushSender:
        """Allocate the staging slots and return the sender that pushes them. Called once, before stage()."""

    def stage(self, block_id: int, slot: int) -> None:
        """Copy a block of the engine's pool to a staging slot, without a lock: the caller discards torn copies."""


class PoolCopyPlane:
    """CopyPlane of a KV pool in this process. transports: KV transports for copies, in order of preference."""

    def __init__(self, pool: KvPool, slot_count: int, transports: Sequence[Transport]) -> None:
        self._pool = pool
        self._slot_count = slot_count
        self._transports = transports
        self._staging: KvPool

    def start(self, listener: PushListener) -> PushSender:
        self._staging = KvPool(self._pool.layout, self._slot_count)
        return KvSender(self._staging, listener, transports=self._transports)

    def stage(self, block_id: int, slot: int) -> None:
        self._staging.memory[:, slot] = self._pool.memory[:, block_id]


class Pace:
    """Limits how fast blocks are staged. interval_s: min seconds between the starts of two blocks; 0: no limit."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._free_at_s = 0.0
        self._rest_s = 0.0

    def wait_s(self, now_s: float, *, at_once: bool = False) -> float:
        """Return the seconds to wait before the next block, and count that block. Unused capacity is lost. at_once:
        leave out the rest; only the rate limit counts."""
        begin_s = max(now_s if at_once else now_s + self._rest_s, self._free_at_s)
        self._free_at_s = begin_s + self._interval_s
        return begin_s - now_s

    def staged(self, took_s: float) -> None:
        """Record how many seconds staging a block took."""
        self._rest_s = min(_REST * took_s, _LONGEST_REST_S)


class CopierThread(Generic[OwnerT]):
    """Runs a Copier (KV copies to other instances) on its own thread. Nothing is allocated before the first copy.

    layout: of the whole engine.
    """

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
        self._pace = Pace(block_bytes / options.bytes_per_s if options.bytes_per_s else 0.0)
        self._ending = threading.Event()
        self._starting = threading.Lock()
        self._work = threading.Event()
        self._make_copier = partial(
            Copier[OwnerT],
            layout,
            slots_of(layout, options),
            shared,
            account,
            self._stage,
            plane.start,
            on_work=self._work.set,
            now_s=time.monotonic,
        )
        self._copier: Copier[OwnerT] | None = None
        self._thread: threading.Thread | None = None

    def started(self) -> Copier[OwnerT]:
        """Return the copier; the first call starts its thread. Raises EngineError once the engine has stopped."""
        with self._shared.lock:
            self._shared.require_alive()
        with self._starting:
            if self._copier is None and not self._ending.is_set():
                self._copier = self._make_copier()
                self._thread = threading.Thread(target=self._run, name="kaveri-copier", daemon=True)
                self._thread.start()
            if self._copier is None:
                raise EngineError("it is closed")
            return self._copier

    def wake(self) -> None:
        """Wake the thread after blocks were computed or requests ended. Callable from any thread and under any lock."""
        if self._copier is not None and self._copier.has_copies:
            self._work.set()

    def close(self) -> None:
        """End all copies and the thread. Idempotent."""
        with self._starting:
            self._ending.set()
            copier, thread = self._copier, self._thread
        self._work.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_TIMEOUT_S)
        if copier is not None:
            copier.close()

    def check_integrity(self) -> None:
        """Assert that staging slots are neither leaked nor shared. The caller holds the engine's lock."""
        if self._copier is not None:
            self._copier.check_integrity()

    def _stage(self, block_id: int, slot: int, at_once: bool) -> None:
        # The block may be given up meanwhile.
        wait_s = min(self._pace.wait_s(time.monotonic(), at_once=at_once), _LONGEST_WAIT_S)
        if wait_s > 0:
            self._ending.wait(wait_s)
        began_s = time.monotonic()
        self._plane.stage(block_id, slot)
        self._pace.staged(time.monotonic() - began_s)

    def _run(self) -> None:
        assert self._copier is not None
        while not self._ending.is_set():
            self._work.wait(_LOOK_EVERY_S if self._copier.has_copies else None)
            self._work.clear()
            try:
                while not self._ending.is_set() and self._copier.advance():
                    pass
                # A release that has failed without an answer of the holder.
                self._shared.publish()
            except Exception as error:  # As above.
                get_logger().exception("copier_failed", error=repr(error))
                self._copier.fail(f"the copier failed: {error!r}")
