"""What the threads of a vLLM engine share, and the lock that guards it. Knows neither vLLM nor transfers."""

import threading
from concurrent.futures import Future
from typing import Any

from kaveri.engine.contract import EngineStopped
from kaveri.engine.outbox import Outbox
from kaveri.engine.vllm.account import Account
from kaveri.engine.vllm.hosted import Hosted
from kaveri.errors import EngineError
from kaveri.telemetry.logs import get_logger


class Board:
    """Everything here is read and changed with `lock` held, which is for microseconds: neither vLLM nor the transfers
    nor the listener are called meanwhile. Methods that say so take it themselves.

    Events are put in the outbox under the lock, so their order is the order in which things happened, and whoever put
    one there publishes it after letting the lock go.
    """

    def __init__(self, total_blocks: int) -> None:
        self.lock = threading.Lock()
        self.account = Account(total_blocks)
        self.outbox = Outbox(self._on_listener_error)
        self.added: list[Hosted] = []
        """Requests that vLLM has not been told of."""
        self.checks: list[Future[None]] = []
        """Who waits for a check of integrity."""
        self.woken = False
        """Something is new for the engine thread."""
        self.closing = False
        self.broken: str | None = None
        """Why nothing can be trusted any more."""
        self.work = threading.Condition(self.lock)
        """What the engine thread sleeps on."""

    def open(self, hosted: Hosted) -> None:
        """Takes a new request. Raises RequestAlreadyExists and NoCapacity, and EngineError once the engine has
        stopped."""
        self.require_alive()
        self.account.open(hosted)
        self.added.append(hosted)
        self.wake()

    def end(self, hosted: Hosted) -> None:
        """The request is done: nothing more is heard of it."""
        self.account.end(hosted)
        self.wake()

    def wake(self) -> None:
        """The engine thread has something to do."""
        self.woken = True
        self.work.notify()

    def require_alive(self) -> None:
        """Raises EngineError once the engine has stopped."""
        if self.broken is not None:
            raise EngineError(self.broken)
        if self.closing:
            raise EngineError("it is closed")

    def stop(self, reason: str) -> None:
        """The engine is broken: every request is lost, and EngineStopped is the last event. Takes the lock."""
        with self.lock:
            if self.broken is not None or self.closing:
                return
            self.outbox.close(EngineStopped(reason))
            self.broken = reason
            self.closing = True
            self.wake()
        self.outbox.publish()
        self.fail_waiting(reason)

    def fail_waiting(self, reason: str) -> None:
        """Whoever waits for a ticket or a check waits no longer. Takes the lock."""
        with self.lock:
            waiting: list[Future[Any]] = [*self.checks]
            self.checks.clear()
            for hosted in self.account.decodes.values():
                if hosted.granted is not None:
                    waiting.append(hosted.granted)
                    hosted.granted = None
        for future in waiting:
            future.set_exception(EngineError(reason))

    def _on_listener_error(self, error: Exception) -> None:
        self.stop(f"the listener raised {error!r}")
        get_logger().error("the engine stops: its listener raised", exc_info=error)
