"""Console script `kaveri`: its commands, and the format of their errors."""

import importlib
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import kaveri
from kaveri.cli.options import option, speaks_tls
from kaveri.cli.services import PASS_ON, ServiceCommand, launcher
from kaveri.config.commands import run_commands
from kaveri.config.services import ServiceKind, program_of

_UP_EPILOG = (
    "Any flag of a service is passed on, see `kaveri decode --help`: --engine fake to all services that have it, "
    "--prefill.chunk-tokens 512 to those of one role."
)
_OF_SERVICE: dict[str, Any] = {"cls": ServiceCommand, "context_settings": PASS_ON, "add_help_option": False}
"""Typer settings of commands whose flags, even --help, another process parses."""


class ListedCommand(TyperCommand):
    """Command known by name and summary; its module is imported when it is called, not when it is listed in help."""

    def __init__(self, name: str, summary: str, target: str, *, tls: bool = False, **settings: Any) -> None:
        """target: MODULE:NAME within kaveri.cli, a function or a Typer. tls: add TLS flags. settings: of command()."""
        super().__init__(name, help=summary)
        self._target, self._tls, self._settings = target, tls, settings

    def load(self) -> Any:
        app = self._find()
        if not isinstance(app, typer.Typer):
            function = speaks_tls(app) if self._tls else app
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            app.command(self.name, **self._settings)(function)
        command = typer.main.get_command(app)
        command.name = self.name
        return command

    def _find(self) -> Any:
        module, _, attribute = self._target.partition(":")
        return getattr(importlib.import_module(f"kaveri.cli.{module}"), attribute)


class _ServiceEntry(ListedCommand):
    """Command such as `kaveri router`, which replaces this process with that of a service."""

    def __init__(self, role: ServiceKind, noun: str) -> None:
        super().__init__(role, f"Run one {noun}.", "", **_OF_SERVICE)
        self._role = role

    def _find(self) -> Any:
        return launcher(program_of(self._role), self.help or "")


_COMMANDS = (
    ListedCommand("up", "Run a whole cluster on this machine.", "up:up", context_settings=PASS_ON, epilog=_UP_EPILOG),
    ListedCommand("status", "Show instances, phases, load and KV blocks.", "status:status", tls=True),
    ListedCommand("trace", "Show where a request spent its time.", "trace:trace", tls=True),
    ListedCommand("drain", "Let an instance take no new requests.", "drain:drain", tls=True),
    ListedCommand("undrain", "Let a drained instance take requests again.", "drain:undrain", tls=True),
    ListedCommand("flip", "Change the phases that an instance serves.", "flip:flip", tls=True),
    ListedCommand("generate", "Generate an answer to one prompt.", "generate:generate", tls=True),
    ListedCommand("chat", "Talk with a model.", "chat:chat", tls=True),
    ListedCommand("bench", "Drive a cluster with a workload, and report.", "bench:bench", tls=True),
    ListedCommand("simulate", "Simulate a cluster under a workload.", "simulate:simulate"),
    ListedCommand("plan", "Plan a cluster by simulation.", "plan:plan_app"),
    ListedCommand("profile", "Measure an engine's steps on this machine.", "profile:profile", **_OF_SERVICE),
    ListedCommand("predictor", "Make, judge and serve a length predictor.", "services:predictor_app"),
    ListedCommand("plugins", "List transports, engines and policies.", "plugins:plugins"),
    ListedCommand("config", "Show a service's settings.", "config:config_app"),
    ListedCommand("key", "Make API keys.", "key:key_app"),
    ListedCommand("health", "Ask a server whether it serves.", "status:health", tls=True),
    _ServiceEntry(ServiceKind.GATEWAY, "gateway for HTTP"),
    _ServiceEntry(ServiceKind.ROUTER, "router"),
    _ServiceEntry(ServiceKind.PREFILL, "prefill instance"),
    _ServiceEntry(ServiceKind.DECODE, "decode instance"),
    _ServiceEntry(ServiceKind.COLOCATED, "instance of both phases"),
)


class _CommandList(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {command.name: command for command in _COMMANDS if command.name}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ListedCommand) else command, rest


app = typer.Typer(
    name="kaveri",
    cls=_CommandList,
    help="Serve large language models with prefill and decode on separate instances.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> NoReturn:
    run_commands(app, "kaveri")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(kaveri.__version__)
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Flags that stand before any command."""
