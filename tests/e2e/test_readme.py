"""What the README and docs/index.md tell a new user to type works as printed, on the bundled model."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.local_cluster import run_cluster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FIRST_STEPS = (ROOT / "docs" / "index.md").read_text()
PRINTED_TARGET = "127.0.0.1:50051"
KAVERI = str(Path(sys.executable).parent / "kaveri")


def _run(command: list[str], text: str = "") -> str:
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, input=text)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.shows_no_certificate
@pytest.mark.timeout(180)
async def test_the_example_and_the_commands_work_as_printed() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert PRINTED_TARGET in example
    async with run_cluster(model="kaveri-tiny", engine="transformers") as cluster:
        shown = _run([sys.executable, "-c", example.replace(PRINTED_TARGET, cluster.target)])
        assert "10, 11, 12" in shown
        assert re.search(r" stop \d+\n", shown)
        assert re.search(r"0\.\d{3} s to the first token, [1-9]\d* bytes of KV pushed", shown)
        for page in (README, FIRST_STEPS):
            assert "10, 11, 12" in _run([KAVERI, *_printed("kaveri generate ", page), "--target", cluster.target])
        assert _run([KAVERI, "chat", "--target", cluster.target], "Count from 1 to 12:\n").strip()
        assert "decode-0" in _run([KAVERI, "status", "--target", cluster.target])
        assert "20 of 20" in _run([KAVERI, *_printed("kaveri bench ", FIRST_STEPS), "--target", cluster.target])


def test_the_first_plan_works_as_printed() -> None:
    assert "kaveri plan: opt-13b on " in _run([KAVERI, *_printed("kaveri plan ", FIRST_STEPS)])


def _printed(command: str, page: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(command))
    return shlex.split(line, comments=True)[1:]
