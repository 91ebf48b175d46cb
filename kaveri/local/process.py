"""Child process that cannot outlive this process: start, log to a file, stop, reap."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kaveri import leash

_KILLED_WITHIN_S = 10.0
_TAIL_BYTES = 16_384


class ChildProcess:
    """Running child in its own process group. The kernel kills it when the thread that started it ends."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._exited = asyncio.Event()
        # Readable once the child has exited: no thread, no signal handler, no polling.
        self._pid_fd = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pid_fd, self._reap)

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> "ChildProcess":
        """Start `command`, appending its output to log_path. environment: replaces this process's own."""
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                leashed, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while it runs, the negative signal number if a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the child's exit; return the exit status."""
        await self._exited.wait()
        status = self.exit_status
        assert status is not None, "reaped without a status"
        return status

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal; no-op after the child's exit."""
        self._process.send_signal(signal_number)

    async def stop(self, grace_s: float) -> int:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds or on cancellation. Reaps the child."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            return await self.kill()
        except asyncio.CancelledError:
            self.send_signal(signal.SIGKILL)
            raise

    async def kill(self) -> int:
        """Send SIGKILL, then reap the child."""
        self.send_signal(signal.SIGKILL)
        async with asyncio.timeout(_KILLED_WITHIN_S):
            return await self.wait()

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` non-empty lines of the child's log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def log_problem(self) -> str:
        """Reason why the child's log cannot be written, such as a full disk; empty if it can be."""
        try:
            with self.log_path.open("ab", buffering=0) as log:
                log.write(b"\n")
        except OSError as error:
            return f"its log {self.log_path} cannot be written: {error.strerror}"
        return ""

    def _reap(self) -> None:
        if self._process.poll() is None:
            return
        self._loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self._exited.set()
