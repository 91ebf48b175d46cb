"""State that the threads of an engine share, the lock that guards it, and the queue of events. Knows no requests."""

import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kaveri.engine.blame import StepMember, last_events
from kaveri.engine.contract import EngineEvent, EngineListener, EngineStats, EngineStopped
from kaveri.errors import EngineError
from kaveri.telemetry.logs import get_logger

_RECENT = 0.999
"""Decay per step of the longest step's duration: half of it after 700 steps."""


@dataclass
class Turns:
    """Counters of the engine thread's iterations, as in EngineStats. Calls that give it work also set `is_busy`."""

    turn_count: int = 0
    is_busy: bool = False
    longest_step_s: float = 0.0
    computed_tokens: int = 0


class Shared:
    """Lock, event queue and stop state of an engine. `lock` is held for microseconds: no model, transfer, listener or
    future is called meanwhile.

    Events are queued under the lock, so they are in order. The thread that queued one publishes it after releasing the
    lock. No thread waits for the listener: whichever delivers does so for all.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """Condition that the engine thread sleeps on."""
        self.listener: EngineListener | None = None
        """Set before the first publish()."""
        self._events: deque[EngineEvent] = deque()
        self._delivering = threading.Lock()
        self.promises: set[Future[Any]] = set()
        """Futures that a caller waits for. The thread that removes one, under the lock, sets its result."""
        self.woken = False
        """True if there is news for the engine thread, which resets it."""
        self.turns = Turns()
        self.closing = False
        self.broken: str | None = None
        """Reason for which the engine has broken."""

    def put(self, event: EngineEvent) -> None:
        """Queue an event; ignored once the engine closes. The caller holds the lock, and later calls publish()."""
        if not self.closing:
            self._events.append(event)

    def publish(self) -> None:
        """Deliver queued events to the listener unless another thread does so. An exception in it stops the engine."""
        while self._events and self.listener is not None and self._delivering.acquire(blocking=False):
            try:
                if events := [self._events.popleft() for _ in range(len(self._events))]:
                    self.listener(events)
            except Exception as error:
                self.stop(f"the listener raised {error!r}")
                get_logger().error("engine_listener_failed", exc_info=error)
            finally:
                self._delivering.release()

    def promise(self) -> "Future[Any]":
        """Return a new future that cannot be cancelled and fails if the engine stops. The caller holds the lock."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.promises.add(future)
        return future

    def wake(self) -> None:
        """Wake the engine thread, as there may be something to compute. The caller holds the lock."""
        self.woken = self.turns.is_busy = True
        self.work.notify()

    def sleep(self, timeout_s: float | None = None) -> None:
        """Wait on the engine thread for wake() or close(). The caller holds the lock; waiting releases it."""
        if not (self.woken or self.closing):
            self.turns.is_busy = False
            self.work.wait(timeout_s)
            self.turns.is_busy = True

    def counted(self, stats: EngineStats) -> EngineStats:
        """Add the counters of the engine thread's iterations to the statistics. The caller holds the lock."""
        return stats._replace(**vars(self.turns))

    def stepped(self, took_s: float) -> None:
        """Record the duration of a step, in seconds. Called by the engine thread only."""
        self.turns.longest_step_s = max(took_s, _RECENT * self.turns.longest_step_s)

    def require_alive(self) -> None:
        """Raise EngineError once the engine has stopped. The caller holds the lock."""
        if self.broken is not None:
            raise EngineError(self.broken)
        if self.closing:
            raise EngineError("it is closed")

    def close(self) -> None:
        """End the engine thread; no event follows. Takes the lock."""
        with self.lock:
            if not self.closing:
                self._events.clear()
            self.closing = True
            self.work.notify()

    def stop(self, reason: str, members: Collection[StepMember] = ()) -> None:
        """Stop a broken engine: all requests are lost, EngineStopped is the last event. Takes the lock. members:
        requests of the step that raised; empty if the error was outside a step."""
        with self.lock:
            if self.closing:
                return
            self._events.extend(last_events(reason, members) if members else (EngineStopped(reason),))
            self.broken = reason
            self.closing = True
            self.work.notify()
        self.publish()
        self.fail_promises(reason)

    def fail_promises(self, reason: str) -> None:
        """Fail all pending futures of promise() with EngineError. Takes the lock."""
        with self.lock:
            promises, self.promises = self.promises, set()
        for future in promises:
            future.set_exception(EngineError(reason))
