"""run_service as a process: settings, signals, exit status."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

WAIT_S = 30.0

SCRIPT = """
import asyncio, sys
from dataclasses import dataclass
from kaveri.config import setting
from kaveri.errors import ConfigError
from kaveri.rpc.process import ServiceConfig, run_service

@dataclass(frozen=True, kw_only=True)
class Config(ServiceConfig):
    '''A service for tests.'''
    act: str = setting("what to do")

async def serve(config, stopping):
    print("serving", config.instance_id, flush=True)
    if config.act == "refuse":
        raise ConfigError("--model", "is not to be found")
    if config.act == "fail":
        raise ZeroDivisionError("a defect")
    if config.act == "end":
        return 5
    await stopping.wait()
    print("draining", flush=True)
    if config.act == "drain":
        return 0
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

sys.exit(run_service("test", Config, serve))
"""


@contextmanager
def service(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(signal_number: signal.Signals) -> None:
    with service("--act", "drain", "--instance-id", "test-0") as process:
        assert said(process) == "serving test-0"
        process.send_signal(signal_number)
        output, logs = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output) == (0, "draining\n")
    (line,) = logs.splitlines()
    assert json.loads(line)["event"] == "stopping"


def test_a_second_signal_cancels_and_still_cleans_up() -> None:
    with service("--act", "linger") as process:
        assert said(process).startswith("serving test-")
        process.send_signal(signal.SIGTERM)
        assert said(process) == "draining"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=WAIT_S)
    assert output == "cleaned up\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--act", "refuse"], "kaveri test: --model: is not to be found"),
        (["--act", "end", "--port", "many"], "kaveri test: --port: 'many' is no whole number"),
        ([], "kaveri test: --act: is required (what to do)"),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_exit_status_2(flags: list[str], line: str) -> None:
    with service(*flags) as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert told.splitlines() == [line]


def test_a_service_that_ends_by_itself_chooses_its_status() -> None:
    with service("--act", "end") as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 5


def test_a_defect_is_shown_in_full() -> None:
    with service("--act", "fail") as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "ZeroDivisionError: a defect" in told
