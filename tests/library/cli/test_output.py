import os
import subprocess
import sys
from pathlib import Path

import pytest

from kaveri.cli.main import ListedCommand, app

KAVERI = str(Path(sys.executable).parent / "kaveri")


@pytest.mark.parametrize("arguments", [["--help"], ["decode", "--help"], ["config", "show", "decode"]])
def test_a_reader_that_is_gone_ends_a_command_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [KAVERI, *arguments], check=False, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=140
        )
    finally:
        os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode in (1, 141)


def test_a_character_that_stdout_cannot_encode_is_escaped() -> None:
    script = "from kaveri.config.output import quiet_output\nwith quiet_output():\n    print('caf\\xe9 \\u6cb3')"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "caf\\xe9 \\u6cb3\n", "")


def test_every_listed_command_can_be_loaded() -> None:
    import typer

    group = typer.main.get_command(app)
    listed = group.commands  # type: ignore[attr-defined]
    assert "up" in listed
    for name, command in listed.items():
        assert isinstance(command, ListedCommand)
        assert command.load().name == name


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], {"grpc", "numpy", "kaveri.client", "kaveri.simulator"}),
        (["generate", "--help"], {"grpc", "numpy", "kaveri.simulator"}),
        (["status", "--help"], {"grpc", "numpy", "kaveri.simulator"}),
    ],
)
def test_help_imports_neither_grpc_nor_other_commands(arguments: list[str], unneeded: set[str]) -> None:
    script = (
        "import sys\nfrom kaveri.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert not unneeded & set(ended.stderr.splitlines())


def test_importing_the_sdk_loads_no_grpc_until_a_name_is_used() -> None:
    script = (
        "import sys, kaveri\nassert 'grpc' not in sys.modules\nassert kaveri.__version__\n"
        "assert kaveri.Client.__name__ == 'Client'\nassert 'grpc' in sys.modules\nprint('Client' in dir(kaveri))"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
