"""kaveri predictor label | train | evaluate | serve: become that step's process. Knows nothing about their flags."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from kaveri.cli.services import PASS_ON, ServiceCommand, launcher
from kaveri.config.commands import command_group
from kaveri.config.services import ServiceKind

predictor_app = command_group("Make, judge and serve a length predictor for a served model.")


def _launcher(step: str, help_text: str) -> Callable[[typer.Context], NoReturn]:
    def launch(context: typer.Context) -> NoReturn:
        # A process of its own, since the command line must not import torch.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "kaveri.predictor", step, *context.args])

    launch.__doc__ = help_text
    return launch


for _step, _help in (
    ("label", "Run prompts through a served model and note how long its answers are."),
    ("train", "Fine-tune a sequence classifier on labels and save it as a predictor."),
    ("evaluate", "Measure a predictor's accuracy, calibration and latency on labels."),
):
    predictor_app.command(_step, context_settings=PASS_ON, add_help_option=False)(_launcher(_step, _help))
predictor_app.command("serve", cls=ServiceCommand, context_settings=PASS_ON, add_help_option=False)(
    launcher(ServiceKind.PREDICTOR, "Run one predictor; `kaveri predictor serve --help` lists its flags.")
)
