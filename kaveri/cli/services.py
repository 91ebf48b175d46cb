"""Commands that are replaced by a service's process, such as `kaveri router`. The service parses their flags."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from kaveri.config.commands import command_group
from kaveri.config.services import ServiceKind, program_of
from kaveri.config.settings import names_of
from kaveri.config.sources import CONFIG_FLAG, flag_of
from kaveri.programs import settings_types

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer context settings that collect all flags, known or not, in `context.args`."""


def launcher(arguments: Sequence[str], help_text: str) -> Callable[[typer.Context], NoReturn]:
    """Create a command that replaces this process with `python ARGUMENTS FLAGS`; FLAGS are all flags it is given."""

    def launch(context: typer.Context) -> NoReturn:
        os.execv(sys.executable, [sys.executable, *arguments, *context.args])

    launch.__doc__ = help_text
    return launch


@dataclass(frozen=True, slots=True)
class ServiceFlag:
    """Completion that a shell offers for a flag, with the attributes that typer expects."""

    value: str
    type: str = "plain"
    help: str | None = None


class ServiceCommand(TyperCommand):
    """Command that starts a service. Shells complete the service's flags, although typer does not know them."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the service's flags that begin with `incomplete`. Slow: imports all settings."""
        settings = settings_types().get("predictor" if self.name == "serve" else self.name or "")
        if settings is None or not incomplete.startswith("-"):
            return []
        flags = (CONFIG_FLAG, *sorted(map(flag_of, names_of(settings).taken)))
        return [ServiceFlag(flag) for flag in flags if flag.startswith(incomplete)]


predictor_app = command_group("Make, judge and serve a length predictor for a served model.")
for _step, _help in (
    ("label", "Run prompts through a served model and note how long its answers are."),
    ("train", "Fine-tune a sequence classifier on labels and save it as a predictor."),
    ("evaluate", "Measure a predictor's accuracy, calibration and latency on labels."),
):
    predictor_app.command(_step, context_settings=PASS_ON, add_help_option=False)(
        # A separate process, since the command line must not import torch.
        launcher(("-P", "-m", "kaveri.predictor", _step), _help)
    )
predictor_app.command("serve", cls=ServiceCommand, context_settings=PASS_ON, add_help_option=False)(
    launcher(program_of(ServiceKind.PREDICTOR), "Run one predictor; `kaveri predictor serve --help` lists its flags.")
)
