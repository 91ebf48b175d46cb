"""Runs an engine in another process, with the engine interface here, for engines of which a process can hold only one.
The process loads the library and model once, and makes one engine after another. Calls are answered in order; events
arrive in the engine's order."""

import itertools
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kaveri.domain.grammar import Grammar
from kaveri.engine.contract import EngineEvent, EngineInfo, EngineListener, EngineRequest
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket

_ANSWER_TIMEOUT_S = 120.0
_OPEN_TIMEOUT_S = 240.0
"""Long, because the first engine waits for the library and the model to load."""

MakeEngine = Callable[..., Any]
"""Makes an engine, not started, from the arguments of EngineProcess.open()."""


class EngineProcess:
    """Process that holds at most one engine at a time. prepare: module-level function, called there once with
    `arguments`; loads what takes long, and returns the function that makes engines. preload: modules loaded once for
    all such processes. has_children: its engines start processes; close() is required then."""

    def __init__(
        self,
        prepare: Callable[..., MakeEngine],
        *arguments: object,
        preload: Sequence[str] = (),
        has_children: bool = False,
        **environment: str,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=not has_children)
            self._process.start()
            theirs.close()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._engine: RemoteEngine | None = None
        self._reader = threading.Thread(target=self._read, name="engine-process", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._reader.is_alive()

    def kill(self) -> None:
        """Kill the process with SIGKILL. Pending calls fail with ConnectionError."""
        self._process.kill()
        self._process.join()
        self._reader.join()

    @property
    def is_free(self) -> bool:
        return self._engine is None or self._engine.closed

    def open(self, **arguments: object) -> "RemoteEngine":
        """Make the next engine, not started; the previous one must be closed. Raises what making it raises."""
        assert self.is_free, "the engine before is not closed"
        self._engine = None
        info = self.call("open", arguments).result(_OPEN_TIMEOUT_S)
        self._engine = RemoteEngine(self, info)
        return self._engine

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def call(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the engine in the process; the future receives its result or error. Used by RemoteEngine."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            try:
                self._connection.send((number, method, arguments))
            except OSError as error:
                del self._answers[number]
                answer.set_exception(error)
        return answer

    def _read(self) -> None:
        while True:
            try:
                number, result, packed = self._connection.recv()
            except (EOFError, OSError):
                break
            if number is None:
                if self._engine is not None:
                    self._engine.events.put(result)
                continue
            answer = self._answers.pop(number)
            if packed is None:
                answer.set_result(result)
            else:
                answer.set_exception(_unpack(*packed))
        with self._lock:
            answers = tuple(self._answers.values())
            self._answers.clear()
        for answer in answers:
            answer.set_exception(ConnectionError("the process of the engine has ended"))


def vllm_process(model: Path, *, has_children: bool = False, **loading: Any) -> EngineProcess:
    """Start a process with a small vLLM. loading: as for tests.support.vllm_engines.prepare()."""
    # Only where vLLM is installed.
    from tests.support.vllm_engines import prepare

    return EngineProcess(
        prepare,
        str(model),
        {"dtype": "float32", "block_tokens": 32, "chunk_tokens": 16, **loading},
        preload=["tests.support.imported_vllm", "tests.support.vllm_engines"],
        has_children=has_children,
        # Ranks may share a core here.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )


class RemoteEngine:
    """PrefillEngine and DecodeEngine that forwards to the engine in an EngineProcess."""

    def __init__(self, process: EngineProcess, info: EngineInfo) -> None:
        self.info = info
        self.closed = False
        self.events: queue.Queue[Sequence[EngineEvent]] = queue.Queue()
        self.process = process
        self._listener: EngineListener | None = None

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        threading.Thread(target=self._tell, name="remote-engine", daemon=True).start()
        self._call("start")

    def close(self) -> None:
        if self.process.is_alive:
            self._call("close")
            self.events.join()
        self.closed = True

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a function that calls this method of the engine and waits for its result."""
        return partial(self._call, method)

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        return self.process.call("reserve", request, expires_in_s, source, held_tokens)

    def prepare(self, grammar: Grammar) -> "Future[None]":
        return self.process.call("prepare", grammar)

    def _call(self, method: str, *arguments: object) -> Any:
        return self.process.call(method, *arguments).result(_ANSWER_TIMEOUT_S)

    def _tell(self) -> None:
        assert self._listener is not None
        while True:
            events = self.events.get()
            try:
                self._listener(events)
            finally:
                self.events.task_done()


def _serve(connection: Connection, prepare: Callable[..., MakeEngine], arguments: Sequence[object]) -> None:
    lock = threading.Lock()

    def send(number: int | None, result: object, error: BaseException | None) -> None:
        packed = None if error is None else (type(error), str(error), vars(error), traceback.format_exception(error))
        with lock:
            connection.send((number, result, packed))

    def send_outcome(number: int, done: "Future[Any]") -> None:
        error = done.exception()
        send(number, None if error is not None else done.result(), error)

    make = prepare(*arguments)
    engine: Any = None
    while True:
        try:
            number, method, given = connection.recv()
        except EOFError:
            return
        try:
            if method == "open":
                engine = make(**given[0])
                result = engine.info
            elif method == "start":
                result = engine.start(lambda events: send(None, tuple(events), None))
            elif method in ("reserve", "prepare"):
                getattr(engine, method)(*given).add_done_callback(partial(send_outcome, number))
                continue
            else:
                result = getattr(engine, method)(*given)
        except BaseException as error:  # whatever it is, the caller is to see it
            send(number, None, error)
        else:
            send(number, result, None)


def _unpack(kind: type[BaseException], text: str, data: dict[str, object], told: Sequence[str]) -> BaseException:
    """Rebuild an error of the process. Kaveri's errors take data, not a text, and so cannot be pickled as usual."""
    error = kind.__new__(kind)
    error.args = (text,)
    vars(error).update(data)
    error.add_note("".join(told))
    return error
