"""KV lines into another pool: a copy of requests' KV that is kept current, in blocks of its own."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kaveri.errors import LayoutMismatch, TransferFailed
from kaveri.kv.layout import KvLayout
from kaveri.kv.lines import LineRun, PoolLines
from kaveri.kv.pool import KvPool


class LinePool:
    """A LineSink: stores lines in `pool`, whose blocks may have another size and order than the lines' origin has.

    layout: of the pool that the lines come from. blocks_of: (request, token count) -> the request's blocks in this
    pool, enough for so many tokens; raises NoCapacity. release: the request's blocks are of no use any more. Both are
    called on the writer's thread. Raises LayoutMismatch.
    """

    def __init__(
        self,
        pool: KvPool,
        layout: KvLayout,
        blocks_of: Callable[[str, int], Sequence[int]],
        release: Callable[[str], None],
    ) -> None:
        pool.layout.require_same(replace(layout, block_tokens=pool.layout.block_tokens, order=pool.layout.order))
        self._lines = PoolLines(pool)
        self._blocks_of = blocks_of
        self._release = release
        self._lock = threading.Lock()
        self._held: dict[str, range] = {}

    def held(self, request: str) -> range:
        """The tokens whose KV is here, without a gap; empty for an unknown request."""
        with self._lock:
            return self._held.get(request, range(0))

    def write(self, runs: Sequence[LineRun], timeout_s: float) -> None:
        """See LineSink.write. Raises TransferFailed where lines are missing before a run."""
        for run in runs:
            if run.lines.nbytes != len(run.tokens) * self._lines.line_bytes:
                raise LayoutMismatch("line_bytes", self._lines.line_bytes, run.lines.nbytes // len(run.tokens))
            held = self.held(run.request) or range(run.tokens.start, run.tokens.start)
            if not held.start <= run.tokens.start <= held.stop:
                raise TransferFailed(f"{run.request}: {held} is here, {run.tokens} does not go on from there")
            block_ids = self._blocks_of(run.request, run.tokens.stop)
            self._lines.require_room(block_ids, run.tokens.stop)
            self._lines.store(block_ids, run)
            with self._lock:
                self._held[run.request] = range(held.start, max(held.stop, run.tokens.stop))

    def end(self, request: str) -> None:
        """See LineSink.end."""
        with self._lock:
            known = self._held.pop(request, None) is not None
        if known:
            self._release(request)

    def settle(self, timeout_s: float) -> None:
        """See LineSink.settle: memory is as safe as it gets."""

    def close(self) -> None:
        """See LineSink.close: the pool is its owner's."""
