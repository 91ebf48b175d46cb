"""Which settings each service declares. The library imports no service: their declarations are found by name."""

import enum
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaveri.config.settings import taken_names

UP_SECTION = "up"


class ServiceKind(enum.StrEnum):
    """What a process runs: the name of its command, of its section, and of its instances in a local stack.

    In the order in which a stack stops: those that send work before those that take it."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Both phases."""
    PREDICTOR = "predictor"


INSTANCES = (ServiceKind.PREFILL, ServiceKind.DECODE, ServiceKind.COLOCATED)
"""Those with an engine: one service, of which the role says what it serves first."""


_INSTALLED = Path(__file__).resolve().parents[1] / "installed"
"""Where a wheel has the package `services`: in site-packages its name could be an application's. A source tree has it
beside `kaveri`, and not here."""


def find_services() -> None:
    """Makes `import services` find those of this package, ahead of any other package of that name."""
    if _INSTALLED.is_dir() and str(_INSTALLED) not in sys.path:
        sys.path.insert(0, str(_INSTALLED))


def program_of(role: ServiceKind) -> tuple[str, ...]:
    """What follows the interpreter on the command line of a role's service; its flags follow."""
    module = ("services.instance", role) if role in INSTANCES else (f"services.{role}",)
    # -P: a folder named "services" in the working directory is none of ours.
    return ("-P", "-m", "kaveri.config.run_service", *module)


def settings_types() -> Mapping[str, type[Any]]:
    """Section of a configuration file to the dataclass of its settings. The first call takes a tenth of a second."""
    find_services()
    found: Mapping[str, type[Any]] = importlib.import_module("services.settings").SETTINGS
    return found


def setting_sections() -> dict[str, frozenset[str]]:
    """Section to the names that it can hold; see kaveri.config.sources.Names. Those of `kaveri up` only it knows."""
    return {section: taken_names(declared) for section, declared in settings_types().items()} | {
        UP_SECTION: frozenset()
    }
