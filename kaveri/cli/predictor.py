"""kaveri predictor label, train, evaluate and serve: replaced by that step's process, which parses the flags."""

from kaveri.cli.services import PASS_ON, ServiceCommand, launcher
from kaveri.config.commands import command_group
from kaveri.config.services import ServiceKind, program_of

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
