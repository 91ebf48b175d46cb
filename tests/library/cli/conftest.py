"""Runs the command line in this process, because its imports take seconds."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from kaveri.cli.main import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kaveri(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "argv", ["kaveri", *arguments])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    return run
