"""Delivers events in the order in which they were put, one call of the listener at a time. Knows no request."""

import threading
from collections import deque
from collections.abc import Callable

from kaveri.engine.contract import EngineEvent, EngineListener


class Outbox:
    """Events that the listener has not heard. No thread waits here: the one that delivers does so for all.

    on_error: told, on the delivering thread, what the listener has raised.
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
        """Queues an event. The caller's lock makes the order, and the caller publishes once it has let that lock go."""
        if not self._closed:
            self.put_count += 1
            self._events.append(event)

    def close(self, *last_events: EngineEvent) -> None:
        """Takes no more events. With `last_events` what is queued still goes out, and those behind it; else nothing."""
        if self._closed:
            return
        self._closed = True
        if not last_events:
            self._events.clear()
        self._events.extend(last_events)

    def publish(self) -> None:
        """Hands everything queued to the listener in one call, unless another thread is at it: that one goes on."""
        while self._events and self.listener is not None and self._delivering.acquire(blocking=False):
            try:
                if events := [self._events.popleft() for _ in range(len(self._events))]:
                    self.listener(events)
            except Exception as error:
                self._on_error(error)
            finally:
                self._delivering.release()
