"""An engine in a process of its own: its steps share no interpreter lock with the service's event loop and gRPC.

vLLM computes with Python between its kernels, so next to an event loop that writes a message per step it loses a fifth
of its tokens per second. The other end of the connection is own_process_server.py.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as AnswerTimeout
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kaveri import leash
from kaveri.domain.grammar import Grammar
from kaveri.engine.contract import (
    EngineEvent,
    EngineInfo,
    EngineKey,
    EngineListener,
    EngineRequest,
    EngineStats,
    EngineStopped,
    StepTokens,
    TokenStep,
)
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError, EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import Ticket
from kaveri.telemetry.logs import log_settings

_Packed = list[tuple[Any, ...]] | EngineEvent
_ANSWER_TIMEOUT_S = 10.0
"""A process that does not answer for this many seconds is presumed stuck and killed."""
_INTEGRITY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 15.0
"""Longer than an engine takes to close."""
_STOPPED = EngineStopped("its process has ended")


class StartedProcess(Protocol):
    """The methods of subprocess.Popen that this module uses."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def send(connection: "Connection[Any, Any]", message: object) -> None:
    """Send a pickled message, several times as fast as Connection.send. Raises OSError."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: "Connection[Any, Any]") -> Any:
    """Return the next message. Raises EOFError and OSError."""
    return pickle.loads(connection.recv_bytes())


def pack(events: Sequence[EngineEvent]) -> list[_Packed]:
    """Convert events to a form that pickles fast: StepTokens become plain tuples, in a thirtieth of the time."""
    return [
        [(*step.key, step.index, step.token_id, step.logprobs, step.finish) for step in event.steps]
        if isinstance(event, StepTokens)
        else event
        for event in events
    ]


def unpack(packed: Sequence[_Packed]) -> list[EngineEvent]:
    """Undo pack(): convert packed events back."""
    return [
        StepTokens(tuple(TokenStep(EngineKey(request_id, serial), *drawn) for request_id, serial, *drawn in event))
        if isinstance(event, list)
        else event
        for event in packed
    ]


def start_process() -> tuple["Connection[Any, Any]", StartedProcess]:
    """Start the engine's process; return the connection to it and its handle. It dies with the calling thread."""
    ours, theirs = socket.socketpair()
    leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid())]
    command = [*leashed, sys.executable, "-P", "-m", "kaveri.engine.own_process_server", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    return Connection(ours.detach()), process


class OwnProcessEngine:
    """Proxy of an engine for prefill and decode in a child process, which ends with this one.

    Calls are carried out in order. Calls that can be refused (push_to, replicate, prefill if blocks may be short) wait
    for the answer, a fraction of a millisecond; no other call waits. Calls without an answer from one event loop
    iteration are sent together in the next one. A prompt that is refused later becomes a RequestFailed. stats() are
    those of the last message; kv_flow() may be 50 ms older while tokens are generated, and 10 ms older after an answer.
    """

    info: EngineInfo
    _connection: "Connection[Any, Any]"
    _process: StartedProcess
    _stats: EngineStats
    _kv_flow: KvFlow

    def __init__(self, settings: EngineSettings) -> None:
        """Start the process and load the engine; takes seconds or minutes. Raises ConfigError."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._listener: EngineListener | None = None
        self._undelivered: deque[Sequence[EngineEvent]] = deque()
        self._told: list[object] = []
        """Calls without an answer, to be sent in the event loop's next iteration."""
        self._sent_count = 0
        """Calls sent."""
        self._untaken: deque[tuple[int, int]] = deque()
        """(number of the call, blocks) of prompts that the process has not reported as carried out."""
        self._is_over = self._closing = False
        opened: Future[EngineInfo] = Future()
        # It also starts the process: the kernel ends a process whose parent thread has ended.
        self._thread = threading.Thread(target=self._run, args=(settings, opened), name="engine-process", daemon=True)
        self._thread.start()
        # Copies in its pool would be in another process than their holder.
        self.info = replace(opened.result(), can_keep=False)

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        if self._is_over:
            listener([_STOPPED])
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
        stats = self._stats
        # A process that stands still answers nothing more, and is found to be stuck.
        return stats._replace(is_busy=True) if self._answers or self._untaken else stats

    def kv_flow(self) -> KvFlow:
        return self._kv_flow

    def check_integrity(self) -> None:
        if not self._is_over:
            self._answer("check_integrity", timeout_s=_INTEGRITY_TIMEOUT_S)

    def prefill(self, request: EngineRequest) -> None:
        self.info.require_servable(request)
        block_count = self.info.layout.block_count(len(request.token_ids))
        if self._sure_free_blocks() < block_count:
            self._answer("prefill", request)
            return
        self._tell("prefill", request, blocks=block_count)

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

    def prepare(self, grammar: Grammar) -> "Future[None]":
        return self._ask("prepare", grammar)

    def adopt(self, key: EngineKey) -> None:
        self._tell("adopt", key)

    def admit(self, key: EngineKey) -> None:
        self._tell("admit", key)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        self._answer("replicate", key, ticket)

    def release(self, key: EngineKey, timeout_s: float) -> None:
        self._tell("release", key, timeout_s)

    def abort(self, key: EngineKey) -> None:
        with contextlib.suppress(EngineError):
            self._tell("abort", key)

    def _sure_free_blocks(self) -> int:
        """Return a lower bound of free blocks: each running request may have taken one since the last message, and each
        prompt that is not confirmed all of its own."""
        with self._lock:
            stats = self._stats
            return stats.free_blocks - stats.running_requests - sum(blocks for _, blocks in self._untaken)

    def _tell(self, method: str, *arguments: object, blocks: int = 0) -> None:
        """Send a call that has no answer. blocks: KV blocks it takes. Raises EngineError once the process has ended."""
        try:
            in_its_next_turn = asyncio.get_running_loop().call_soon
        except RuntimeError:
            in_its_next_turn = None
        with self._lock:
            if self._is_over:
                raise _ended()
            is_first = not self._told
            self._told.append((None, method, arguments))
            if blocks:
                self._untaken.append((self._sent_count + len(self._told), blocks))
        if in_its_next_turn is None:
            self._send()
        elif is_first:
            in_its_next_turn(self._send_told)

    def _send_told(self) -> None:
        # If the process has just ended, the listener receives EngineStopped.
        with contextlib.suppress(EngineError):
            self._send()

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
                self._take(*receive(self._connection))
        try:
            return answer.result(timeout_s)
        except AnswerTimeout as error:
            self._process.kill()
            raise EngineError(f"its process has not answered {method} for {timeout_s:g} s") from error

    def _send(self, *calls: object) -> None:
        try:
            with self._lock:
                calls, self._told = (*self._told, *calls), []
                if calls:
                    self._sent_count += len(calls)
                    send(self._connection, calls)
        except OSError as error:
            raise _ended() from error

    def _run(self, settings: EngineSettings, opened: "Future[EngineInfo]") -> None:
        try:
            self._connection, self._process = start_process()
            send(self._connection, (settings, log_settings()))
            outcome = receive(self._connection)
        # Settings that cannot be sent, too: the caller waits for the outcome.
        except Exception as error:
            opened.set_exception(ConfigError("engine", f"its process has ended while it was loaded: {error!r}"))
            return
        if isinstance(outcome, ConfigError):
            self._process.wait()
            opened.set_exception(outcome)
            return
        info, self._stats, self._kv_flow = outcome
        opened.set_result(info)
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._take(*receive(self._connection))
                    while self._undelivered:
                        assert self._listener is not None, "events come after start()"
                        self._listener(self._undelivered.popleft())
        finally:
            self._end()

    def _take(
        self,
        taken_count: int,
        number: int | None,
        result: Any,
        error: BaseException | None,
        stats: Sequence[Any],
        kv_flow: KvFlow | None,
    ) -> None:
        with self._lock:
            self._stats, self._kv_flow = EngineStats(*stats), kv_flow or self._kv_flow
            while self._untaken and self._untaken[0][0] <= taken_count:
                self._untaken.popleft()
        if number is not None:
            with self._lock:
                answer = self._answers.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
        elif result:
            self._undelivered.append(unpack(result))

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            answers = tuple(self._answers.values())
            self._answers.clear()
        for answer in answers:
            answer.set_exception(_ended())
        if self._listener is not None and not self._closing:
            self._listener([_STOPPED])
        # It has closed the connection, or cannot be reached any more.
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ended() -> EngineError:
    return EngineError("its process has ended")
