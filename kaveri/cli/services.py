"""kaveri router | prefill | decode | colocated: become that service's process. Knows nothing about their flags."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings under which every flag, known or not, ends up in `context.args`."""


def launcher(service: str, help_text: str) -> Callable[[typer.Context], NoReturn]:
    """A command that replaces this process with `services.<service>` and hands all its flags on."""

    def launch(context: typer.Context) -> NoReturn:
        # -P: a folder named "services" in the working directory is none of ours.
        os.execv(sys.executable, [sys.executable, "-P", "-m", f"services.{service}", *context.args])

    launch.__doc__ = help_text
    return launch
