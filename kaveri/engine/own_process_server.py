"""Main module of the engine process that own_process.py starts: carries out calls and sends events.

Messages from the service: lists of calls (number, method, arguments), carried out in order; number is None if no answer
is expected. Messages to the service: (calls carried out, number, result, error, stats, KvFlow): an answer to the call
`number` or, if it is None, packed events as result. stats: fields of EngineStats. KvFlow: None if about as before, or
if it follows within _AFTER_CALL_S.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kaveri.config.services import find_services
from kaveri.engine.contract import EngineEvent, RequestFailed, StepTokens
from kaveri.engine.own_process import pack, receive, send
from kaveri.errors import ConfigError, EngineError, RequestAlreadyExists
from kaveri.telemetry.logs import configure_logs, get_logger

if TYPE_CHECKING:
    from concurrent.futures import Future

_IDLE_S = 0.25
"""Interval, in seconds, at which an engine is checked for statistics that changed without an event."""
_AFTER_CALL_S = 0.01
"""Seconds after a call until its effects that raise no event are looked for, such as blocks freed by abort()."""
_KV_FLOW_EVERY_S = 0.05
"""Most seconds between two KvFlows while tokens are generated."""
_SWITCH_INTERVAL_S = 0.0005
"""Longest wait of a call, in seconds, for the engine's thread while that runs Python."""


class EngineServer:
    """Carries out, in order, the engine calls that arrive on a connection."""

    def __init__(self, connection: "Connection[Any, Any]", engine: Any) -> None:
        self._connection = connection
        self._engine = engine
        self._lock = threading.RLock()
        self._taken_count = 0
        self._sent_state = 0, engine.stats()
        self._flow_sent_s = 0.0
        self._owes_flow = False
        """True if an answer was sent without a KvFlow, and none has been sent since."""
        self._check_at_s = 0.0
        """Time of the next check for changed statistics, by time.monotonic()."""
        self._called_s = 0.0
        """Time at which the latest calls arrived, by time.monotonic()."""
        self._is_soon = False
        """True if calls have arrived since the last check, so that the next is at most _AFTER_CALL_S away."""

    def serve(self) -> None:
        """Serve calls until close() is called or the connection ends."""
        # Reused: Connection.poll() builds a selector each time.
        arriving = select.poll()
        arriving.register(self._connection, select.POLLIN)
        while True:
            if arriving.poll(1e3 * max(0.0, self._check_at_s - time.monotonic())):
                calls = receive(self._connection)
                self._called_s = time.monotonic()
                if not self._is_soon:
                    # A regular check that is due now is postponed: it would delay the answer.
                    self._is_soon, self._check_at_s = True, self._called_s + _AFTER_CALL_S
                for number, method, arguments in calls:
                    if method == "start":
                        self._engine.start(self._send_events)
                    elif method in ("reserve", "prepare"):
                        answer: Future[Any] = getattr(self._engine, method)(*arguments)
                        answer.add_done_callback(partial(self._answer_later, number))
                    else:
                        self._call(number, method, arguments)
                        if method == "close":
                            return
                        continue
                    self._taken_count += 1
            if time.monotonic() >= self._check_at_s:
                self._send_changes()

    def _send_changes(self) -> None:
        """Send the statistics if they have changed since the last message, and the KvFlow that an answer lacked."""
        with self._lock:
            now_s, after_calls_s = time.monotonic(), self._called_s + _AFTER_CALL_S
            # Calls that have just arrived may still change the statistics: check again after them.
            self._is_soon = now_s < after_calls_s
            self._check_at_s = after_calls_s if self._is_soon else now_s + _IDLE_S
            if self._owes_flow or (self._taken_count, self._engine.stats()) != self._sent_state:
                self._send(None, ())

    def _call(self, number: int | None, method: str, arguments: Sequence[Any]) -> None:
        result, error = None, None
        try:
            result = getattr(self._engine, method)(*arguments)
        except Exception as raised:
            # A call other than prefill that has no answer fails only if the engine has stopped: see EngineStopped.
            error = raised
        self._taken_count += 1
        if number is not None:
            self._send(number, result, error)
        # A key that is live is a fault of the caller, whose first request with it goes on.
        elif method == "prefill" and error is not None and not isinstance(error, RequestAlreadyExists | EngineError):
            self._send(None, [RequestFailed(arguments[0].key, str(error))])

    def _answer_later(self, number: int, done: "Future[Any]") -> None:
        error = done.exception()
        with self._lock:
            result = None if error is not None else done.result()
            # Computing a KvFlow would delay the answer. If a check is due soon, its message has the KvFlow instead.
            self._send(number, result, error, with_kv_flow=not self._is_soon)
            is_idle = not self._sent_state[1].running_requests
        if is_idle:
            # The process that reads the answer runs under SCHED_BATCH: it does not preempt this thread on its core.
            os.sched_yield()

    def _send_events(self, events: Sequence[EngineEvent]) -> None:
        is_due = time.monotonic() >= self._flow_sent_s + _KV_FLOW_EVERY_S
        only_continue = all(
            isinstance(event, StepTokens) and all(step.finish is None for step in event.steps) for event in events
        )
        self._send(None, pack(events), with_kv_flow=is_due or not only_continue)

    def _send(
        self, number: int | None, result: object, error: BaseException | None = None, *, with_kv_flow: bool = True
    ) -> None:
        # One thread after the other: newer statistics come later, and cover the calls carried out.
        with self._lock:
            taken_count = self._taken_count
            stats = self._engine.stats()
            self._sent_state = taken_count, stats
            kv_flow = None
            if with_kv_flow:
                kv_flow, self._flow_sent_s = self._engine.kv_flow(), time.monotonic()
            self._owes_flow = not with_kv_flow and (self._owes_flow or number is not None)
            send(self._connection, (taken_count, number, result, error, tuple(stats), kv_flow))


def serve(connection: "Connection[Any, Any]") -> None:
    """Build an engine from the settings in the first message, and serve the connection's calls on it."""
    # Signals to the whole process group are the service's: it closes the engine.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    find_services()
    settings, logs = receive(connection)
    if logs is not None:
        configure_logs(logs.service, logs.instance_id, logs.level)
    from kaveri.engine.factory import build_engine

    try:
        engine = build_engine(settings)
    except ConfigError as error:
        send(connection, error)
        return
    except BaseException as error:
        get_logger().exception("engine_not_built")
        send(connection, ConfigError("engine", f"ended while it was loaded: {error!r}"))
        return
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    send(connection, (engine.info, engine.stats(), engine.kv_flow()))
    EngineServer(connection, engine).serve()


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    # The instance that started this process runs under SCHED_BATCH (load_engine()), which children inherit.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        # The service has gone.
        os._exit(1)
    # Threads of libraries do not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
