"""Starts service processes without import time, by forking a process that has imported everything.

A copy is otherwise as LocalStack starts it: with a pid, a log file, and killed when the test process ends. Its parent
is the forked process, which reports its exit status.

    with warm_processes() as start, mock.patch.object(ChildProcess, "start", staticmethod(start)):
        async with run_cluster(): ...
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from kaveri import leash
from kaveri.engine import own_process, own_process_server
from kaveri.local.process import ChildProcess
from tests.support.forked_ranks import fork_ranks

_DOORS = ("-torch", "services.router.service", "services.gateway.service")
"""Routers hide torch ("-torch") before they import anything."""
_INSTANCES = ("services.instance.service", "kaveri.engine.transformers.loading")
_VLLM = ("tests.support.imported_vllm", "services.instance.service")
_PREDICTORS = ("services.predictor.service", "transformers.models.llama.modeling_llama")
_WARM_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""One thread each: a process with threads cannot be forked safely."""
_RUN = "kaveri.config.run_service"
"""Module that runs the service named by the next argument."""
_START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def warm_processes() -> Iterator[Callable[..., ChildProcess]]:
    """Yield a replacement for ChildProcess.start that forks a warm process: one each for routers and gateways,
    instances, vLLM instances, and predictors."""
    started: dict[tuple[str, ...], _WarmProcess] = {}
    start_cold = ChildProcess.start

    def start(
        name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        modules = _modules_of(command)
        if not modules:
            return start_cold(name, command, log_path, environment)
        if modules not in started:
            started[modules] = _WarmProcess(modules)
        copy = started[modules].copy(command, log_path, environment)
        child = ChildProcess(name, copy, log_path)  # type: ignore[arg-type]
        copy.let_go()
        return child

    try:
        yield start
    finally:
        for process in started.values():
            process.close()


def _modules_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to import before the fork; empty if the command is no service, or rarely started."""
    service = command[command.index(_RUN) + 1] if _RUN in command else ""
    if service == "services.instance":
        return _VLLM if ("--engine", "vllm") in itertools.pairwise(command) else _INSTANCES
    if service == "services.predictor":
        return _PREDICTORS
    return _DOORS if service in ("services.router", "services.gateway") else ()


class _WarmProcess:
    """Handle of a process that has imported `modules`, to fork copies from. It dies with the test process."""

    def __init__(self, modules: Sequence[str]) -> None:
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid())]
        command = [*leashed, sys.executable, "-P", "-m", __name__, *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _WARM_ENVIRONMENT
        )
        self._buffer = b""
        self._pids: list[int] = []
        self._statuses: dict[int, int] = {}

    def copy(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None) -> "_WarmCopy":
        """Fork a copy that runs `command`, and wait for its pid."""
        module, *arguments = command[command.index(_RUN) + 1 :]
        order = {
            "module": module,
            "arguments": arguments,
            "log": str(log_path),
            "environment": dict(os.environ if environment is None else environment),
        }
        self._order({"start": order})
        while not self._pids:
            self._read(_START_TIMEOUT_S)
        return _WarmCopy(self, self._pids.pop())

    def let_go(self, pid: int) -> None:
        """Allow the pid of a copy to be used again once the copy has ended."""
        self._order({"let_go": pid})

    def _order(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def status_of(self, pid: int) -> int | None:
        """Return the exit status of a copy; None while it runs."""
        while pid not in self._statuses and self._read(0.0):
            pass
        return self._statuses.get(pid)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self, timeout_s: float) -> bool:
        """Process messages from the warm process. Returns False if there are none within `timeout_s` seconds."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            assert not timeout_s, f"the warm process said nothing for {timeout_s} s"
            return False
        received = os.read(self._process.stdout.fileno(), 65_536)
        assert received, "the warm process has ended"
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "started" in said:
                self._pids.append(said["started"])
            else:
                self._statuses[said["ended"]] = said["status"]
        return True


class _WarmCopy:
    """Replacement for the subprocess.Popen of a ChildProcess."""

    def __init__(self, source: _WarmProcess, pid: int) -> None:
        self._source = source
        self.pid = pid
        self.returncode: int | None = None

    def let_go(self) -> None:
        self._source.let_go(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._source.status_of(self.pid)
        return self.returncode

    def send_signal(self, signal_number: signal.Signals) -> None:
        # It is reaped by its parent as soon as it ends, so its pid may be gone, which the parent has said by then.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


def _serve() -> None:
    """Run the warm process: one thread that reads orders, forks copies, and reports their ends."""

    for module in sys.argv[1:]:
        if module == "-torch":
            cast(dict[str, ModuleType | None], sys.modules)["torch"] = None
        else:
            importlib.import_module(module)
    # Copies neither visit what was imported when they collect garbage, nor get pages of their own by it.
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    buffer = b""
    # A copy that ends at once must keep its pid until the test process has opened a pidfd.
    let_go: set[int] = set()
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        if 0 in readable:
            received = os.read(0, 65_536)
            if not received:
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for message in map(json.loads, lines):
                if "start" in message:
                    _say({"started": _start_copy(message["start"])})
                else:
                    let_go.add(message["let_go"])
        _reap(let_go)


def _reap(let_go: set[int]) -> None:
    for pid in tuple(let_go):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            let_go.remove(pid)
            _say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _start_copy(order: dict[str, Any]) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        leash.fasten(parent_pid)
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if ("--engine", "vllm") in itertools.pairwise(order["arguments"]):
            _fork_engine()
        sys.argv = [order["module"], *order["arguments"]]
        main = importlib.import_module(f"{order['module']}.__main__").main
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fork_engine() -> None:
    """Make the service fork this process for its engine, instead of starting one that imports vLLM again."""
    ours, theirs = socket.socketpair()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        leash.fasten(parent_pid)
        fork_ranks()
        with contextlib.suppress(EOFError, OSError):
            own_process_server.serve(Connection(theirs.detach()))
        sys.stderr.flush()
        os._exit(0)
    theirs.close()
    connection: Connection[Any, Any] = Connection(ours.detach())
    own_process.start_process = lambda: (connection, _EngineCopy(pid))  # type: ignore[assignment]


class _EngineCopy:
    """Handle of a forked engine process, as own_process.StartedProcess."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self, timeout: float | None = None) -> int:
        return os.waitpid(self._pid, 0)[1]

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
