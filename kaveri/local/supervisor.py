"""Keeps one child running: restarts it with exponential back-off when it ends unexpectedly."""

import asyncio
import signal
import time
from collections.abc import Callable

from kaveri.local.process import ChildProcess

_BACKOFF_MIN_S = 0.25
_BACKOFF_MAX_S = 15.0
_STEADY_AFTER_S = 30.0
"""Uptime in seconds after which a restarted child is stable, so that the back-off starts again at its minimum."""


class Supervisor:
    """Keeps one child process running, restarting it with back-off. Not thread-safe."""

    def __init__(
        self,
        name: str,
        launch: Callable[[], ChildProcess],
        process: ChildProcess,
        report: Callable[[str], None],
        *,
        restart: bool,
    ) -> None:
        """launch: starts a process. process: the first one. report: called with a line of text for users."""
        self.name = name
        self.process = process
        self.first_exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._launch = launch
        self._report = report
        self._restarts = restart
        self._watching = asyncio.create_task(self._watch(), name=f"supervisor of {name}")

    async def stop(self, grace_s: float) -> None:
        """Stop the child with ChildProcess.stop(), and do not restart it. Reaps it even if cancelled."""
        await self._let_go()
        try:
            await self.process.stop(grace_s)
        except asyncio.CancelledError:
            await self.process.kill()
            raise

    async def kill_for_good(self) -> None:
        """Kill and reap the child, and do not restart it."""
        await self._let_go()
        await self.process.kill()

    async def restart(self) -> None:
        """Restart a killed child when automatic restarts are off."""
        assert not self._restarts, f"{self.name} is restarted by itself"
        await self.process.wait()
        self.process = self._launch()

    async def _let_go(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        delay_s = _BACKOFF_MIN_S
        while True:
            started_at_s = time.monotonic()
            status = await self.process.wait()
            if not self.first_exit.done():
                self.first_exit.set_result(status)
            if not self._restarts:
                return
            if time.monotonic() - started_at_s > _STEADY_AFTER_S:
                delay_s = _BACKOFF_MIN_S
            problem = self.process.log_problem()
            why = f" ({problem})" if problem else ""
            self._report(f"{self.name} {describe_exit(status)}{why}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)
            try:
                self.process = self._launch()
            except OSError as error:
                # Most likely out of processes or descriptors. Keep the dead process and retry in the next round.
                self._report(f"{self.name} could not be started: {error.strerror}")


def describe_exit(status: int) -> str:
    """Describe how a process ended: "exited with status 2", or "was ended by SIGKILL" for a negative status."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
