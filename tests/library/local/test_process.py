import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kaveri import leash
from kaveri.local.process import ChildProcess

_PYTHON = (sys.executable, "-I", "-S", "-u", "-c")
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stubborn', flush=True); time.sleep(600)"
)
_PARENT = """
import asyncio, sys
from pathlib import Path
from kaveri.local.process import ChildProcess

async def main():
    child = ChildProcess.start("child", ["sleep", "600"], Path(sys.argv[1]))
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def _prints(child: ChildProcess, line: str) -> None:
    async with asyncio.timeout(20):
        while line not in child.last_lines(5):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_child_ends_with_its_own_status_and_its_output_is_kept(tmp_path: Path) -> None:
    log_path = tmp_path / "child.log"
    child = ChildProcess.start(
        "child", [*_PYTHON, "print('one\\n\\ntwo'); print('three'); raise SystemExit(3)"], log_path
    )
    assert await asyncio.wait_for(child.wait(), 20) == 3
    assert child.exit_status == 3
    assert child.last_lines(2) == ["two", "three"]


async def test_last_lines_of_a_long_log_are_the_last_ones(tmp_path: Path) -> None:
    program = "print(*(f'line {number}' for number in range(9000)), sep='\\n')"
    child = ChildProcess.start("child", [*_PYTHON, program], tmp_path / "child.log")
    await asyncio.wait_for(child.wait(), 20)
    assert child.last_lines(2) == ["line 8998", "line 8999"]


async def test_next_life_appends_to_the_log(tmp_path: Path) -> None:
    for number in range(2):
        child = ChildProcess.start("child", ["echo", f"life {number}"], tmp_path / "child.log")
        await asyncio.wait_for(child.wait(), 20)
    assert child.last_lines(9) == ["life 0", "life 1"]


async def test_program_that_does_not_exist_is_said_in_the_log(tmp_path: Path) -> None:
    child = ChildProcess.start("child", ["/no/such/program"], tmp_path / "child.log")
    assert await asyncio.wait_for(child.wait(), 20) == 127
    assert child.last_lines(1) == ["cannot run /no/such/program: No such file or directory"]


async def test_stop_lets_a_child_end_by_itself(tmp_path: Path) -> None:
    child = ChildProcess.start("child", ["sleep", "600"], tmp_path / "child.log")
    assert await child.stop(grace_s=20.0) == -signal.SIGTERM
    assert await child.stop(grace_s=20.0) == -signal.SIGTERM, "a second stop finds it ended"


async def test_stop_kills_a_child_that_ignores_it(tmp_path: Path) -> None:
    child = ChildProcess.start("child", [*_PYTHON, _STUBBORN], tmp_path / "child.log")
    await _prints(child, "stubborn")
    started_at_s = time.monotonic()
    assert await child.stop(grace_s=0.2) == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - started_at_s < 10
    assert not psutil.pid_exists(child.pid), "not reaped"


async def test_cancelled_stop_still_ends_the_child(tmp_path: Path) -> None:
    child = ChildProcess.start("child", [*_PYTHON, _STUBBORN], tmp_path / "child.log")
    await _prints(child, "stubborn")
    stopping = asyncio.create_task(child.stop(grace_s=600.0))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await asyncio.wait_for(child.wait(), 20) == -signal.SIGKILL


async def test_ctrl_c_on_the_terminal_does_not_reach_children(tmp_path: Path) -> None:
    child = ChildProcess.start("child", ["sleep", "600"], tmp_path / "child.log")
    # A terminal signals the foreground process group.
    assert os.getpgid(child.pid) != os.getpgrp()
    await child.kill()


def test_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "child.log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert _is_running(child_pid)
        parent.kill()
    give_up_at_s = time.monotonic() + 10
    while _is_running(child_pid):
        assert time.monotonic() < give_up_at_s, "it outlived its parent"
        time.sleep(0.01)


def test_program_is_not_run_when_the_parent_died_before_the_leash_was_on(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    command = [sys.executable, "-I", "-S", leash.__file__, "1", "touch", str(trace)]
    assert subprocess.run(command, check=False).returncode == 127
    assert not trace.exists()
