"""State that the threads of an engine share, the lock that guards it, and the events to deliver. Knows no request."""

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from kaveri.engine.blame import StepMember, last_events
from kaveri.engine.contract import EngineEvent, EngineListener, EngineStats, EngineStopped
from kaveri.errors import EngineError
from kaveri.telemetry.logs import get_logger

_RECENT = 0.999
"""Decay per step of the longest step's duration: half of it after 700 steps."""


class Outbox:
    """Undelivered events, in the order in which they were put. No thread waits: the one that delivers does so for all.

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


class Shared:
    """`lock` is held for microseconds: no model, transfer, listener or future is called meanwhile.

    Events are put in the outbox under the lock, so they are in order. The thread that put one publishes it after
    releasing the lock.

    on_stopped: called once, without the lock, when the engine has broken.
    """

    def __init__(self, on_stopped: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """Condition that the engine thread sleeps on."""
        self.outbox = Outbox(self._on_listener_error)
        self.promises: set[Future[Any]] = set()
        """Futures that a caller waits for. The thread that removes one, under the lock, sets its result."""
        self.woken = False
        """True if there is news for the engine thread, which resets it."""
        self.turn_count = 0
        """Turns that the engine thread has begun; it counts them itself, under the lock."""
        self.longest_step_s = 0.0
        """Seconds of the longest recent step; the engine thread writes it."""
        self.computed_tokens = 0
        """Tokens computed by all steps; the engine thread counts them, under the lock."""
        self.is_busy = False
        """True unless the engine thread sleeps and has not been woken."""
        self.closing = False
        self.broken: str | None = None
        """Reason for which the engine has broken."""
        self._on_stopped = on_stopped

    def promise(self) -> "Future[Any]":
        """Return a new future that the caller cannot cancel. The caller holds the lock."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.promises.add(future)
        return future

    def wake(self) -> None:
        """Record news for the engine thread. The caller holds the lock."""
        self.woken = True
        self.notify()

    def notify(self) -> None:
        """Wake the engine thread, which may have something to do. The caller holds the lock."""
        self.is_busy = True
        self.work.notify()

    def sleep(self, timeout_s: float | None = None) -> None:
        """Wait for notify() on the engine thread. The caller holds the lock; waiting releases it."""
        self.is_busy = False
        self.work.wait(timeout_s)
        self.is_busy = True

    def counted(self, stats: EngineStats) -> EngineStats:
        """Add the counts of the engine thread's turns to the statistics. The caller holds the lock."""
        return stats._replace(
            computed_tokens=self.computed_tokens,
            turn_count=self.turn_count,
            is_busy=self.is_busy,
            longest_step_s=self.longest_step_s,
        )

    def stepped(self, took_s: float) -> None:
        """Record the duration of a step. For the engine thread."""
        self.longest_step_s = max(took_s, _RECENT * self.longest_step_s)

    def require_alive(self) -> None:
        """Raise EngineError once the engine has stopped. The caller holds the lock."""
        if self.broken is not None:
            raise EngineError(self.broken)
        if self.closing:
            raise EngineError("it is closed")

    def close(self) -> None:
        """End the engine thread; no event follows. Takes the lock."""
        with self.lock:
            self.closing = True
            self.outbox.close()
            self.work.notify()

    def stop(self, reason: str, members: Collection[StepMember] = ()) -> None:
        """Break the engine: every request is lost, and EngineStopped is the last event. Takes the lock.

        members: the requests of the step that has raised; none: it broke outside of a step.
        """
        with self.lock:
            if self.broken is not None or self.closing:
                return
            self.outbox.close(*(last_events(reason, members) if members else (EngineStopped(reason),)))
            self.broken = reason
            self.closing = True
            self.work.notify()
        self.outbox.publish()
        self.fail_promises(reason)
        self._on_stopped()

    def fail_promises(self, reason: str) -> None:
        """Fail every future that a caller waits for with EngineError. Takes the lock."""
        with self.lock:
            promises, self.promises = self.promises, set()
        for future in promises:
            future.set_exception(EngineError(reason))

    def _on_listener_error(self, error: Exception) -> None:
        self.stop(f"the listener raised {error!r}")
        get_logger().error("engine_listener_failed", exc_info=error)
