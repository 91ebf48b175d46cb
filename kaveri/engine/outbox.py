"""Delivers events in the order in which they were put, one call of the listener at a time. Knows no request."""

import threading
from collections import deque
from collections.abc import Callable

from kaveri.engine.contract import EngineEvent, EngineListener


class Outbox:
    """Undelivered events. No thread waits here: the one that delivers does so for all.

    on_error: called, on the delivering thread, with the listener's exception.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self.listener: EngineListener | None = None
        """Set before the first publish()."""
        self.put_count = 0
        """Events taken so far, delivered or not."""
        self._on_error = on_error
        self._events: deque[EngineEvent] = deque()
        self._delivering = threading.Lock()
        self._closed = False

    def put(self, event: EngineEvent) -> None:
        """Queue an event. The caller's lock defines the order; the caller publishes after releasing it."""
        if not self._closed:
            self.put_count += 1
            self._events.append(event)

    def close(self, *last_events: EngineEvent) -> None:
        """Accept no more events. With `last_events`, the queue and then these are delivered; otherwise nothing is."""
        if self._closed:
            return
        self._closed = True
        if not last_events:
            self._events.clear()
        self._events.extend(last_events)

    def publish(self) -> None:
        """Deliver the queue to the listener in one call, unless another thread is delivering: that one continues."""
        while self._events and self.listener is not None and self._delivering.acquire(blocking=False):
            try:
                if events := [self._events.popleft() for _ in range(len(self._events))]:
                    self.listener(events)
            except Exception as error:
                self._on_error(error)
            finally:
                self._delivering.release()
