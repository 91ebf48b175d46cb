import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kaveri.local import supervisor as supervisor_module
from kaveri.local.process import ChildProcess
from kaveri.local.supervisor import Supervisor


class _Lives:
    def __init__(self, command: list[str], log_path: Path) -> None:
        self.started_at_s: list[float] = []
        self.pids: list[int] = []
        self.lines: list[str] = []
        self._command = command
        self._log_path = log_path

    def launch(self) -> ChildProcess:
        child = ChildProcess.start("child", self._command, self._log_path)
        self.started_at_s.append(time.monotonic())
        self.pids.append(child.pid)
        return child

    def supervise(self, *, restart: bool) -> Supervisor:
        return Supervisor("child", self.launch, self.launch(), self.lines.append, restart=restart)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - any condition at all
                await asyncio.sleep(0.01)


async def test_child_that_keeps_dying_comes_back_with_longer_and_longer_pauses(tmp_path: Path) -> None:
    lives = _Lives(["sh", "-c", "exit 7"], tmp_path / "child.log")
    supervisor = lives.supervise(restart=True)
    await lives.until(lambda: len(lives.started_at_s) == 4)
    await supervisor.kill_for_good()
    pauses = [later - earlier for earlier, later in zip(lives.started_at_s, lives.started_at_s[1:], strict=False)]
    assert [pause >= least for pause, least in zip(pauses, (0.25, 0.5, 1.0), strict=True)] == [True] * 3
    assert lives.lines[0] == "child exited with status 7; starting it again in 0.25 s"
    assert lives.lines[2] == "child exited with status 7; starting it again in 1 s"
    assert supervisor.first_exit.result() == 7


async def test_pauses_have_a_longest_one_and_a_steady_life_makes_them_short_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_BACKOFF_MAX_S", 0.03)
    lives = _Lives(["sh", "-c", "exit 7"], tmp_path / "child.log")
    supervisor = lives.supervise(restart=True)
    await lives.until(lambda: len(lives.lines) >= 5)
    said = [line.rpartition(" in ")[2] for line in lives.lines]
    assert said[:5] == ["0.01 s", "0.02 s", "0.03 s", "0.03 s", "0.03 s"]
    monkeypatch.setattr(supervisor_module, "_STEADY_AFTER_S", 0.0)
    lives.lines.clear()
    await lives.until(lambda: len(lives.lines) >= 3)
    await supervisor.kill_for_good()
    assert lives.lines[-1].endswith(" in 0.01 s")


async def test_killed_child_is_replaced_and_the_replacement_can_be_stopped(tmp_path: Path) -> None:
    lives = _Lives(["sleep", "600"], tmp_path / "child.log")
    supervisor = lives.supervise(restart=True)
    await supervisor.process.kill()
    await lives.until(lambda: len(lives.pids) == 2)
    assert lives.lines == ["child was ended by SIGKILL; starting it again in 0.25 s"]
    await supervisor.stop(grace_s=20.0)
    assert not any(psutil.pid_exists(pid) for pid in lives.pids)
    assert len(lives.pids) == 2


async def test_child_that_could_not_be_started_again_is_tried_once_more(tmp_path: Path) -> None:
    lives = _Lives(["sleep", "600"], tmp_path / "child.log")
    failures = [OSError(errno.EAGAIN, "no more processes")]

    def launch() -> ChildProcess:
        if lives.pids and failures:
            raise failures.pop()
        return lives.launch()

    supervisor = Supervisor("child", launch, launch(), lives.lines.append, restart=True)
    await supervisor.process.kill()
    await lives.until(lambda: len(lives.pids) == 2)
    assert "child could not be started: no more processes" in lives.lines
    await supervisor.kill_for_good()
    assert not any(psutil.pid_exists(pid) for pid in lives.pids)


async def test_child_told_to_end_during_the_pause_does_not_come_back(tmp_path: Path) -> None:
    lives = _Lives(["sh", "-c", "exit 1"], tmp_path / "child.log")
    supervisor = lives.supervise(restart=True)
    await lives.until(lambda: len(lives.lines) == 2)
    count = len(lives.pids)
    await supervisor.stop(grace_s=20.0)
    assert supervisor._watching.done()
    assert len(lives.pids) == count


async def test_child_that_is_not_to_be_restarted_stays_dead_until_asked(tmp_path: Path) -> None:
    lives = _Lives(["sleep", "600"], tmp_path / "child.log")
    supervisor = lives.supervise(restart=False)
    await supervisor.process.kill()
    await lives.until(supervisor._watching.done)
    assert len(lives.pids) == 1
    await supervisor.restart()
    assert psutil.pid_exists(lives.pids[1])
    await supervisor.kill_for_good()
    assert not psutil.pid_exists(lives.pids[1])
