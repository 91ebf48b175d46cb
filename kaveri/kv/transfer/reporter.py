"""Calls a listener with events, in order and one at a time, and runs timers. Owns no transfer."""

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kaveri.telemetry.logs import get_logger

EventT = TypeVar("EventT")

_LONGEST_WAIT_S = 3600.0
"""Longest single wait for a timer: a lock cannot be waited for much longer than a century."""


class Reporter(Generic[EventT]):
    """Calls `listener` with every reported event, while no caller's lock is held.

    The queue is bounded by its callers: a transfer reports its end once, and each of its blocks is marked at most once.
    """

    def __init__(self, name: str, listener: Callable[[EventT], None]) -> None:
        self._listener = listener
        self._changed = threading.Condition()
        self._events: deque[EventT] = deque()
        # A thread is calling the listener.
        self._is_telling = False
        # (due, tie-breaker, action); obsolete actions do nothing when run.
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def report(self, event: EventT) -> None:
        """Queue an event for the reporter's thread. Any thread, under any lock."""
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def tell(self, event: EventT) -> None:
        """Call the listener on this thread, which saves a thread switch; queue the event if others come first. Only for
        threads that the listener may occupy for a moment, and under no lock."""
        with self._changed:
            if self._events or self._is_telling:
                self._events.append(event)
                self._changed.notify()
                return
            self._is_telling = True
        try:
            self._call_listener(event)
        except Exception:
            get_logger().exception("kv_listener_failed")

    def call_after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` on the reporter's thread in `delay_s` seconds, unless it is closed before.

        delay_s: any number, but no NaN, which would put the others out of order.
        """
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
        """Deliver what was reported, drop the timers, end the thread. Not from the listener. Idempotent."""
        with self._changed:
            self._closing = True
            # They reference their owners, whose memory would wait for the garbage collector.
            self._timers.clear()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (work := self._take()) is None:
                    if self._closing and not self._events and not self._is_telling:
                        return
                    rest_s = min(self._timers[0][0] - time.monotonic(), _LONGEST_WAIT_S) if self._timers else None
                    self._changed.wait(rest_s)
            try:
                work()
            except Exception:
                # A listener's error must not end the reports of all other transfers.
                get_logger().exception("kv_listener_failed")
            # It keeps an event, or a timer's owner, alive.
            del work

    def _take(self) -> Callable[[], None] | None:
        if self._events and not self._is_telling:
            event = self._events.popleft()
            self._is_telling = True
            return lambda: self._call_listener(event)
        if self._timers and self._timers[0][0] <= time.monotonic():
            return heapq.heappop(self._timers)[2]
        return None

    def _call_listener(self, event: EventT) -> None:
        try:
            self._listener(event)
        finally:
            with self._changed:
                self._is_telling = False
                if self._events or self._closing:
                    self._changed.notify()
