import contextlib
import re

import pytest

from kaveri.cli.main import app
from kaveri.config.settings import read_settings
from kaveri.predictor.__main__ import app as predictor_app
from kaveri.programs import settings_types

_COMMANDS = (
    "up",
    "status",
    "generate",
    "chat",
    "bench",
    "health",
    "config",
    "config show",
    "predictor",
    "simulate",
    "key new",
    "plan",
    "plan pipeline",
)
_STEPS = ("label", "train", "evaluate")


def _help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    program = f"kaveri {command}"
    with contextlib.suppress(SystemExit):
        if command in settings_types() and command != "predictor":
            read_settings(settings_types()[command], program, ["--help"], {})
        elif command in _STEPS:
            predictor_app([command, "--help"], prog_name="kaveri")
        else:
            app([*command.split(), "--help"], prog_name="kaveri")
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*_COMMANDS, *_STEPS, "router", "prefill", "decode", "colocated", "profile"])
def test_every_command_has_the_same_style_of_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _help_of(command, capsys)
    assert re.match(rf"Usage: kaveri {command} \[OPTIONS\]", shown), shown[:80]
    assert "\nOptions:\n" in shown
    assert shown.rstrip().count("Show this message and exit.") == 1
    options = shown.partition("\nOptions:\n")[2].partition("\n\n")[0]
    flags = re.findall(r"^  (--\S+)(.*)$", options, re.MULTILINE)
    assert flags
    for flag, rest in flags:
        # An optional second name, an optional <value>, then the help.
        assert re.match(r"( --\S+)?( <[^>]+>|$| {2,}\S)", rest), flag
    assert "\x1b" not in shown
    assert not set("╭│╰") & set(shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_services_help_says_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(_help_of("decode", capsys).split())
    assert "--max-batch <batch> Most requests in one decode step. [env var: KAVERI_MAX_BATCH; default: 64]" in shown


def test_a_services_help_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _help_of("decode", capsys)
    headings = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert headings[0] == "Options"
    assert {"Decoding", "Engine and KV", "Process and cluster"} <= set(headings)
    # Flags of the fake engine stand last.
    assert shown.index("--engine ") < shown.index("--fake-step-s")
