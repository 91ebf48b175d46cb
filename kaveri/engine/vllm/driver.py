"""The engine thread: sleeps until there is something to do, then runs a turn. The only one that calls vLLM."""

import threading
import time
from concurrent.futures import Future

from kaveri.engine.shared import Shared
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm.request import VllmRequest
from kaveri.engine.vllm.requests import Requests
from kaveri.engine.vllm.steps import Steps
from kaveri.telemetry.logs import get_logger

_STALLED_S = 0.05
"""Longest sleep of the thread when nothing in vLLM can run: whatever changes that wakes it."""
_CHECK_TIMEOUT_S = 30.0


class Driver:
    """Owns the engine thread."""

    def __init__(self, shared: Shared, requests: Requests, steps: Steps, transfers: Transfers[VllmRequest]) -> None:
        self.thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)
        self._shared = shared
        self._requests = requests
        self._steps = steps
        self._transfers = transfers
        # Integrity checks that wait for the thread.
        self._checks: list[Future[None]] = []

    def check_integrity(self) -> None:
        """See Steps.check_integrity(). Waits for the step under way, if any."""
        check: Future[None] | None = None
        with self._shared.lock:
            if self._shared.closing:
                return
            if self.thread.is_alive():
                check = self._shared.promise()
                self._checks.append(check)
                self._shared.wake()
        if check is not None:
            check.result(_CHECK_TIMEOUT_S)
        else:
            self._steps.check_integrity()

    def _loop(self) -> None:
        stalled = False
        try:
            while True:
                with self._shared.lock:
                    self._sleep(stalled)
                    if self._shared.closing:
                        return
                    self._shared.woken = False
                    self._shared.turn_count += 1
                    added = self._requests.take_added()
                    checks, self._checks = self._checks, []
                began_s = time.monotonic()
                stalled = not self._steps.turn(added, stalled)
                if not stalled:
                    self._shared.stepped(time.monotonic() - began_s)
                for check in checks:
                    self._answer(check)
        # After any exception in a step, even SystemExit, the state of model and cache is unknown: no request may be
        # left waiting for tokens.
        except BaseException as error:
            self._shared.stop(repr(error), self._steps.members())
            get_logger().exception("engine_failed", error=repr(error))
        finally:
            if self._shared.broken is not None:
                self._transfers.close()

    def _sleep(self, stalled: bool) -> None:
        """Sleep until there is something to do. The caller holds the lock."""
        while not (self._shared.closing or self._shared.woken or self._steps.has_reports):
            runnable = self._steps.can_compute(self._steps.held())
            if runnable and not stalled:
                return
            self._shared.sleep(_STALLED_S if runnable else None)
            stalled = False

    def _answer(self, check: "Future[None]") -> None:
        failure: AssertionError | None = None
        try:
            self._steps.check_integrity()
        except AssertionError as error:
            failure = error
        with self._shared.lock:
            if check not in self._shared.promises:
                return
            self._shared.promises.remove(check)
        if failure is not None:
            check.set_exception(failure)
        else:
            check.set_result(None)
