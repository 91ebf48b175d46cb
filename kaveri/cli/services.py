"""kaveri router | prefill | decode | colocated: become that service's process. Knows nothing about their flags."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from kaveri.config.services import ServiceKind, program_of

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings under which every flag, known or not, ends up in `context.args`."""


def launcher(role: ServiceKind, help_text: str) -> Callable[[typer.Context], NoReturn]:
    """A command that replaces this process with the role's service and hands all its flags on."""

    def launch(context: typer.Context) -> NoReturn:
        os.execv(sys.executable, [sys.executable, *program_of(role), *context.args])

    launch.__doc__ = help_text
    return launch
