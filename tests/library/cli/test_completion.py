import os
import subprocess
import sys
from pathlib import Path

import pytest

from kaveri.config.settings import names_of
from kaveri.programs import settings_types

KAVERI = Path(sys.executable).parent / "kaveri"


def _completed(line: str) -> list[str]:
    words = line.split()
    asked = {
        "_KAVERI_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - (not line.endswith(" "))),
    }
    ended = subprocess.run(
        [KAVERI], check=False, capture_output=True, text=True, timeout=60, env={**os.environ, **asked}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_commands_and_their_flags_are_completed() -> None:
    assert _completed("kaveri und") == ["undrain"]
    assert "--target" in _completed("kaveri drain --t")


@pytest.mark.parametrize(("typed", "section"), [("decode --", "decode"), ("predictor serve --adv", "predictor")])
def test_all_flags_of_a_service_that_begin_with_what_was_typed_are_completed(typed: str, section: str) -> None:
    flags = {f"--{name.replace('_', '-')}" for name in names_of(settings_types()[section]).taken} | {"--config"}
    start = typed.split()[-1]
    assert set(_completed(f"kaveri {typed}")) == {flag for flag in flags if flag.startswith(start)} != set()


def test_the_shells_are_told_how_to_ask() -> None:
    shown = subprocess.run(
        [KAVERI, "--show-completion", "bash"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        # Else typer detects the shell from the parent processes.
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert "_KAVERI_COMPLETE=complete_bash" in shown.stdout
