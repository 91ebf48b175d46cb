"""State that the threads of an engine share, the lock that guards it, and the events to deliver. Knows no request."""

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
    """Counts of the engine thread's turns, as in EngineStats. That thread writes them, under the lock."""

    turn_count: int = 0
    is_busy: bool = False
    longest_step_s: float = 0.0
    computed_tokens: int = 0


class Shared:
    """`lock` is held for microseconds: no model, transfer, listener or future is called meanwhile.

    Events are put under the lock, so they are in order. The thread that put one publishes it after releasing the lock.
    No thread waits for the listener: the one that delivers does so for all.
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
        """Queue an event; none once the engine closes. The caller holds the lock, and publishes after releasing it."""
        if not self.closing:
            self._events.append(event)

    def publish(self) -> None:
        """Deliver the queue to the listener in one call, unless another thread is delivering: that one continues. An
        exception of the listener breaks the engine."""
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
        """Return a new future that the caller cannot cancel. The caller holds the lock."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.promises.add(future)
        return future

    def wake(self) -> None:
        """Record news for the engine thread, and wake it. The caller holds the lock."""
        self.woken = self.turns.is_busy = True
        self.work.notify()

    def sleep(self, timeout_s: float | None = None) -> None:
        """Wait for news on the engine thread. The caller holds the lock; waiting releases it."""
        if not (self.woken or self.closing):
            self.turns.is_busy = False
            self.work.wait(timeout_s)
            self.turns.is_busy = True

    def counted(self, stats: EngineStats) -> EngineStats:
        """Add the counts of the engine thread's turns to the statistics. The caller holds the lock."""
        return stats._replace(**vars(self.turns))

    def stepped(self, took_s: float) -> None:
        """Record the duration of a step. For the engine thread."""
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
        """Break the engine: every request is lost, and EngineStopped is the last event. Takes the lock.

        members: the requests of the step that has raised; none: it broke outside of a step.
        """
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
        """Fail every future that a caller waits for with EngineError. Takes the lock."""
        with self.lock:
            promises, self.promises = self.promises, set()
        for future in promises:
            future.set_exception(EngineError(reason))
