"""The console script `kaveri`: its commands, and how their errors look."""

import importlib.metadata
from typing import Annotated, NoReturn

import typer

from kaveri.cli.bench import bench
from kaveri.cli.chat import chat
from kaveri.cli.config import config_app
from kaveri.cli.drain import drain, undrain
from kaveri.cli.generate import generate
from kaveri.cli.health import health
from kaveri.cli.key import key_app
from kaveri.cli.options import speaks_tls
from kaveri.cli.plan import plan_app
from kaveri.cli.plugins import plugins
from kaveri.cli.predictor import predictor_app
from kaveri.cli.profile import profile
from kaveri.cli.services import PASS_ON, ServiceCommand, launcher
from kaveri.cli.simulate import simulate
from kaveri.cli.status import status
from kaveri.cli.trace import trace
from kaveri.cli.up import FLAGS_HELP, up
from kaveri.config.commands import run_commands
from kaveri.config.services import ServiceKind

app = typer.Typer(
    name="kaveri",
    help="Serve large language models with prefill and decode on separate instances.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> NoReturn:
    """See run_commands."""
    run_commands(app, "kaveri")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("kaveri"))
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Flags that stand before any command."""


app.command(context_settings=PASS_ON, epilog=FLAGS_HELP)(up)
app.command()(speaks_tls(status))
app.command()(speaks_tls(trace))
app.command()(speaks_tls(drain))
app.command()(speaks_tls(undrain))
app.command()(speaks_tls(generate))
app.command()(speaks_tls(chat))
app.command()(speaks_tls(bench))
app.command()(simulate)
app.command()(plugins)
app.command()(speaks_tls(health))
app.command(cls=ServiceCommand, context_settings=PASS_ON, add_help_option=False)(profile)
app.add_typer(plan_app, name="plan")
app.add_typer(predictor_app, name="predictor")
app.add_typer(config_app, name="config")
app.add_typer(key_app, name="key")
for _role, _help in (
    (ServiceKind.GATEWAY, "Run one gateway for HTTP; `kaveri gateway --help` lists its flags."),
    (ServiceKind.ROUTER, "Run one router; `kaveri router --help` lists its flags."),
    (ServiceKind.PREFILL, "Run one prefill instance; `kaveri prefill --help` lists its flags."),
    (ServiceKind.DECODE, "Run one decode instance; `kaveri decode --help` lists its flags."),
    (ServiceKind.COLOCATED, "Run one instance of both phases; `kaveri colocated --help` lists its flags."),
):
    app.command(_role, cls=ServiceCommand, context_settings=PASS_ON, add_help_option=False)(launcher(_role, _help))
