"""Groups and runs a program's commands: every failure becomes one line on stderr and an exit status."""

import sys
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from kaveri.config.output import quiet_output
from kaveri.errors import ConfigError, KaveriError


def command_group(help: str, **settings: Any) -> typer.Typer:
    """Create a group of commands; without arguments it prints its help. settings: for typer.Typer."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        **settings,
    )


def run_commands(app: typer.Typer, program: str) -> NoReturn:
    """Run a typer app, then exit: 0; 1 for a KaveriError; 2 for wrong flags or settings; 130 after Ctrl-C; 141 when the
    reader of stdout has exited."""
    try:
        with quiet_output():
            status = app(prog_name=program, standalone_mode=False)
    except TyperException as error:
        _refuse(error, program)
    except typer.Abort:
        sys.exit(1)
    except KaveriError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    sys.exit(status if isinstance(status, int) else 0)


def _refuse(error: TyperException, program: str) -> NoReturn:
    reason = error.format_message()
    if not reason.startswith("Usage:"):
        context = getattr(error, "ctx", None)
        command = program if context is None else context.command_path
        reason = f"{command}: {' '.join(reason.split())}; see `{command} --help`"
    # Otherwise a command was called without arguments, and the reason is its help.
    print(reason, file=sys.stderr)
    sys.exit(2)
