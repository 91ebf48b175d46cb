"""Looks up the settings that each service declares, by name: the library imports no service."""

import enum
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaveri.config.settings import taken_names

UP_SECTION = "up"


class ServiceKind(enum.StrEnum):
    """Kind of a process: the name of its command, of its section, and of its instances in a local stack.

    In a stack's stop order: senders of work before receivers.
    """

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Both phases."""
    PREDICTOR = "predictor"


INSTANCES = (ServiceKind.PREFILL, ServiceKind.DECODE, ServiceKind.COLOCATED)
"""Kinds with an engine: one service, whose role sets its initial phases."""


_INSTALLED = Path(__file__).resolve().parents[1] / "installed"
"""Location of the package `services` in a wheel: in site-packages its name could clash with an application's. A source
tree has it beside `kaveri`, and not here."""


def find_services() -> None:
    """Make `import services` find this package's services, ahead of any other package of that name."""
    if _INSTALLED.is_dir() and str(_INSTALLED) not in sys.path:
        sys.path.insert(0, str(_INSTALLED))


def program_of(role: ServiceKind) -> tuple[str, ...]:
    """Interpreter arguments that start a role's service; its flags follow."""
    module = ("services.instance", role) if role in INSTANCES else (f"services.{role}",)
    # -P: a folder named "services" in the working directory is not ours.
    return ("-P", "-m", "kaveri.config.run_service", *module)


def settings_types() -> Mapping[str, type[Any]]:
    """Settings dataclasses by section of a configuration file. The first call takes a tenth of a second."""
    find_services()
    found: Mapping[str, type[Any]] = importlib.import_module("services.settings").SETTINGS
    return found


def setting_sections() -> dict[str, frozenset[str]]:
    """Valid names by section; see kaveri.config.sources.Names. Those of `kaveri up` are not included."""
    return {section: taken_names(declared) for section, declared in settings_types().items()} | {
        UP_SECTION: frozenset()
    }
