"""An engine in a process of its own: its steps share no interpreter lock with the service's event loop and gRPC.

vLLM computes with Python between its kernels, so next to an event loop that writes a message per step it loses a fifth
of its tokens per second. The other end of the connection is own_process_server.py.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as AnswerTimeout
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kaveri import leash
from kaveri.engine.contract import (
    EngineEvent,
    EngineInfo,
    EngineKey,
    EngineListener,
    EngineRequest,
    EngineStats,
    EngineStopped,
)
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError, EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import Ticket
from kaveri.telemetry.logs import log_settings

_ANSWER_TIMEOUT_S = 10.0
"""A process that does not answer for this long is ended: it is presumed stuck."""
_INTEGRITY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 15.0
"""Longer than an engine takes to close."""


class StartedProcess(Protocol):
    """The part of subprocess.Popen that is used here."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_process() -> tuple["Connection[Any, Any]", StartedProcess]:
    """Start the process and return a connection to it. It dies with the thread that calls this."""
    ours, theirs = socket.socketpair()
    leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid())]
    command = [*leashed, sys.executable, "-P", "-m", "kaveri.engine.own_process_server", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    return Connection(ours.detach()), process


class OwnProcessEngine:
    """PrefillEngine and DecodeEngine of another process, which ends with this one.

    Calls are carried out in order. Calls that can be refused (prefill, push_to, admit, replicate) wait for the answer,
    a fraction of a millisecond; no other call waits. Statistics are those of the last message.
    """

    info: EngineInfo
    _connection: "Connection[Any, Any]"
    _process: StartedProcess
    _snapshot: tuple[EngineStats, KvFlow]

    def __init__(self, settings: EngineSettings) -> None:
        """Load the engine; takes seconds or minutes. Raises ConfigError as build_engine does."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._listener: EngineListener | None = None
        self._undelivered: deque[Sequence[EngineEvent]] = deque()
        self._is_over = self._closing = False
        opened: Future[EngineInfo] = Future()
        # It also starts the process: the kernel ends a process whose parent thread has ended.
        self._thread = threading.Thread(target=self._run, args=(settings, opened), name="engine-process", daemon=True)
        self._thread.start()
        self.info = opened.result()

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        if self._is_over:
            listener([_stopped()])
        else:
            # If it has just ended, the listener is called for that.
            with contextlib.suppress(EngineError):
                self._tell("start")

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            with contextlib.suppress(EngineError):
                self._answer("close", timeout_s=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def stats(self) -> EngineStats:
        return self._snapshot[0]

    def kv_flow(self) -> KvFlow:
        return self._snapshot[1]

    def check_integrity(self) -> None:
        if not self._is_over:
            self._answer("check_integrity", timeout_s=_INTEGRITY_TIMEOUT_S)

    def prefill(self, request: EngineRequest) -> None:
        self._answer("prefill", request)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        self._answer("push_to", key, ticket)

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        return self._ask("reserve", request, expires_in_s, source, held_tokens)

    def adopt(self, key: EngineKey) -> None:
        self._tell("adopt", key)

    def admit(self, key: EngineKey) -> None:
        self._answer("admit", key)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        self._answer("replicate", key, ticket)

    def release(self, key: EngineKey, timeout_s: float) -> None:
        self._tell("release", key, timeout_s)

    def abort(self, key: EngineKey) -> None:
        with contextlib.suppress(EngineError):
            self._tell("abort", key)

    def _tell(self, method: str, *arguments: object) -> None:
        """Send a call without an answer. Raises EngineError once the process has ended."""
        self._send((None, method, arguments))

    def _ask(self, method: str, *arguments: object) -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        number = next(self._numbers)
        with self._lock:
            self._answers[number] = answer
            is_over = self._is_over
        try:
            if is_over:
                raise _ended()
            self._send((number, method, arguments))
        except EngineError as error:
            if self._answers.pop(number, None) is not None:
                answer.set_exception(error)
        return answer

    def _answer(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        timeout_s = _ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        answer = self._ask(method, *arguments)
        if threading.current_thread() is self._thread:
            # Calls from the listener, on the reading thread. Events that come first are delivered when it has returned.
            while not answer.done():
                self._take(*self._connection.recv())
        try:
            return answer.result(timeout_s)
        except AnswerTimeout as error:
            self._process.kill()
            raise EngineError(f"its process has not answered {method} for {timeout_s:g} s") from error

    def _send(self, message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError as error:
            raise _ended() from error

    def _run(self, settings: EngineSettings, opened: "Future[EngineInfo]") -> None:
        """Start the process and read what it sends until it ends."""
        try:
            self._connection, self._process = start_process()
            self._connection.send((settings, log_settings()))
            outcome = self._connection.recv()
        # Settings that cannot be sent, too: the caller waits for the outcome.
        except Exception as error:
            opened.set_exception(ConfigError("engine", f"its process has ended while it was loaded: {error!r}"))
            return
        if isinstance(outcome, ConfigError):
            self._process.wait()
            opened.set_exception(outcome)
            return
        info, self._snapshot = outcome
        opened.set_result(info)
        try:
            self._read()
        finally:
            self._end()

    def _read(self) -> None:
        """Take messages and deliver events until the connection ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(*self._connection.recv())
                while self._undelivered:
                    assert self._listener is not None, "events come after start()"
                    self._listener(self._undelivered.popleft())

    def _take(self, number: int | None, result: Any, error: BaseException | None, snapshot: Any) -> None:
        if snapshot is not None:
            self._snapshot = snapshot
        if number is not None:
            with self._lock:
                answer = self._answers.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
        elif result:
            self._undelivered.append(result)

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            answers = tuple(self._answers.values())
            self._answers.clear()
        for answer in answers:
            answer.set_exception(_ended())
        if self._listener is not None and not self._closing:
            self._listener([_stopped()])
        # It has closed the connection, or cannot be reached any more.
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ended() -> EngineError:
    return EngineError("its process has ended")


def _stopped() -> EngineStopped:
    return EngineStopped("its process has ended")
