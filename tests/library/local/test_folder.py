import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kaveri.local.folder import stack_folder

_HOLDER = """
import sys
from kaveri.local.folder import stack_folder
with stack_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_folder_goes_with_its_stack_and_stays_while_another_starts(temporary: Path) -> None:
    with stack_folder() as first:
        (first / "router-0.log").write_text("a line")
        with stack_folder() as second:
            assert first != second
            assert (first / "router-0.log").exists()
        assert set(temporary.iterdir()) == {first}
    assert not list(temporary.iterdir())


def test_folder_of_a_killed_process_goes_when_the_next_stack_starts(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        abandoned = Path(holder.stdout.readline().strip())
        with stack_folder():
            assert abandoned.is_dir(), "taken from a living process"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert abandoned.is_dir()
    with stack_folder() as folder:
        assert set(temporary.iterdir()) == {folder}
