"""What the threads of an engine share, and the lock that guards it. Knows no request and no transfer."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kaveri.engine.blame import StepMember, last_events
from kaveri.engine.contract import EngineStats, EngineStopped
from kaveri.engine.outbox import Outbox
from kaveri.errors import EngineError
from kaveri.telemetry.logs import get_logger

_RECENT = 0.999
"""What a step keeps of the longest one before it: half of it after 700 steps."""


class Shared:
    """`lock` is held for microseconds: no model, transfer, listener or future is called meanwhile.

    Events are put in the outbox under the lock, so their order is the order in which things happened. The thread that
    put one publishes it after releasing the lock.

    on_stopped: called once, without the lock, when the engine has stopped by itself.
    """

    def __init__(self, on_stopped: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """What the engine thread sleeps on."""
        self.outbox = Outbox(self._on_listener_error)
        self.promises: set[Future[Any]] = set()
        """Futures that a caller waits for. The thread that removes one, under the lock, sets its outcome."""
        self.woken = False
        """Something is new for the engine thread, which resets it."""
        self.turn_count = 0
        """Turns that the engine thread has begun; it counts them itself, under the lock."""
        self.longest_step_s = 0.0
        self.computed_tokens = 0
        """Of all steps; the engine thread counts them, under the lock."""
        """Of the engine thread's recent steps; it writes this itself."""
        self.is_busy = False
        """The engine thread does not sleep, or has been woken."""
        self.closing = False
        self.broken: str | None = None
        """Why the engine has stopped by itself."""
        self._on_stopped = on_stopped

    def promise(self) -> "Future[Any]":
        """A new future that the caller cannot cancel. Under the lock."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.promises.add(future)
        return future

    def wake(self) -> None:
        """Something is new for the engine thread. Under the lock."""
        self.woken = True
        self.notify()

    def notify(self) -> None:
        """The engine thread may have something to do. Under the lock."""
        self.is_busy = True
        self.work.notify()

    def sleep(self, timeout_s: float | None = None) -> None:
        """The engine thread waits for notify(). Under the lock, which it releases meanwhile."""
        self.is_busy = False
        self.work.wait(timeout_s)
        self.is_busy = True

    def counted(self, stats: EngineStats) -> EngineStats:
        """The statistics with those of the thread's turns. Under the lock."""
        return replace(
            stats,
            computed_tokens=self.computed_tokens,
            turn_count=self.turn_count,
            is_busy=self.is_busy,
            longest_step_s=self.longest_step_s,
        )

    def stepped(self, took_s: float) -> None:
        """Takes in how long a step took. For the engine thread."""
        self.longest_step_s = max(took_s, _RECENT * self.longest_step_s)

    def require_alive(self) -> None:
        """Raises EngineError once the engine has stopped. Under the lock."""
        if self.broken is not None:
            raise EngineError(self.broken)
        if self.closing:
            raise EngineError("it is closed")

    def close(self) -> None:
        """No event follows, and the engine thread ends. Takes the lock."""
        with self.lock:
            self.closing = True
            self.outbox.close()
            self.work.notify()

    def stop(self, reason: str, members: Collection[StepMember] = ()) -> None:
        """The engine is broken: every request is lost, and EngineStopped is the last event. Takes the lock.

        members: the requests of the step that has raised; none: it broke outside of a step."""
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
        """Every future that a caller waits for fails with EngineError. Takes the lock."""
        with self.lock:
            promises, self.promises = self.promises, set()
        for future in promises:
            future.set_exception(EngineError(reason))

    def _on_listener_error(self, error: Exception) -> None:
        self.stop(f"the listener raised {error!r}")
        get_logger().error("engine_listener_failed", exc_info=error)
