"""Runs listeners' calls in order and one at a time, and timers, on a thread of its own. Owns no transfer."""

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kaveri.telemetry.logs import get_logger

_LONGEST_WAIT_S = 3600.0
"""Longest single wait for a timer: a lock cannot be waited for much longer than a century."""


class Reporter:
    """Runs queued calls (of a listener, with an event) one at a time, in order, while no caller's lock is held.

    The queue is bounded by its callers: a transfer reports its end once, and marks each of its blocks at most once.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        # A thread is within a reported call.
        self._is_telling = False
        # (due, tie-breaker, action); obsolete actions do nothing when run.
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def report(self, call: Callable[[], None]) -> None:
        """Queue a call for the reporter's thread. Any thread, under any lock."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def tell(self, call: Callable[[], None]) -> None:
        """Run a call on the calling thread, to save a thread switch, or queue it if others come first. Hold no lock,
        and call only from threads that a listener may occupy for a moment."""
        with self._changed:
            if self._calls or self._is_telling:
                self._calls.append(call)
                self._changed.notify()
                return
            self._is_telling = True
        try:
            self._run_call(call)
        except Exception:
            get_logger().exception("kv_listener_failed")

    def call_after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` on the reporter's thread after `delay_s` seconds (not NaN), unless closed before."""
        assert not math.isnan(delay_s), "a timer that is never due"
        due_s = time.monotonic() + delay_s
        with self._changed:
            if self._closing:
                return
            is_first = not self._timers or due_s < self._timers[0][0]
            heapq.heappush(self._timers, (due_s, next(self._order), action))
            if is_first:
                self._changed.notify()

    def close(self) -> None:
        """Run the queued calls, drop the timers, end the thread. Not from a listener. Idempotent."""
        with self._changed:
            self._closing = True
            # They reference their owners, whose memory would wait for the garbage collector.
            self._timers.clear()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            work: Callable[[], None] | None = None
            with self._changed:
                while work is None:
                    if self._calls and not self._is_telling:
                        self._is_telling = True
                        work = partial(self._run_call, self._calls.popleft())
                    elif self._timers and self._timers[0][0] <= time.monotonic():
                        work = heapq.heappop(self._timers)[2]
                    elif self._closing and not self._calls and not self._is_telling:
                        return
                    else:
                        rest_s = min(self._timers[0][0] - time.monotonic(), _LONGEST_WAIT_S) if self._timers else None
                        self._changed.wait(rest_s)
            try:
                work()
            except Exception:
                # A listener's error must not end the reports of all other transfers.
                get_logger().exception("kv_listener_failed")
            # It keeps an event, or a timer's owner, alive.
            del work

    def _run_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            with self._changed:
                self._is_telling = False
                if self._calls or self._closing:
                    self._changed.notify()
