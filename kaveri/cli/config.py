"""kaveri config show: prints the settings that a service would have if started here and now with these flags."""

import os
from typing import Annotated

import typer

from kaveri.cli.services import PASS_ON
from kaveri.config.commands import command_group
from kaveri.config.settings import read_settings
from kaveri.config.sources import SERVICE_LINKS_ADVICE, nearest
from kaveri.errors import ConfigError

config_app = command_group("Look at settings.")


@config_app.callback()
def _config() -> None:
    """Look at settings."""


@config_app.command(context_settings=PASS_ON)
def show(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="gateway, router, prefill, decode, colocated, predictor or profile.")],
) -> None:
    """Print every setting of a service, its value and where it comes from. Secrets are masked.

    It takes the service's flags, --config among them, and reads the same variables and the same file.
    """
    from kaveri.programs import setting_sections, settings_types

    types = settings_types()
    if role not in types:
        raise ConfigError("ROLE", f"is {role!r}; choose {', '.join(types)}{nearest(role, types)}")
    read = read_settings(types[role], f"kaveri {role}", context.args, os.environ, setting_sections)
    rows = [("setting", "value", "from"), *read.rows()]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:{name_width}}  {value:{min(value_width, 40)}}  {origin}")
    for variable in read.service_links:
        print(f"{variable} is ignored: Kubernetes made it for a Service; {SERVICE_LINKS_ADVICE}")
