"""Kinds of services, and how their programs are found: the library imports no service."""

import enum
import sys
from pathlib import Path

UP_SECTION = "up"


class ServiceKind(enum.StrEnum):
    """Kind of a service: also the name of its command, settings section and local instances. Members are in the order
    in which a local cluster stops: senders of work before receivers."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Instance that serves both phases."""
    PREDICTOR = "predictor"


INSTANCES = (ServiceKind.PREFILL, ServiceKind.DECODE, ServiceKind.COLOCATED)
"""Kinds of instances with an engine: one program, whose role sets the phases that it serves at first."""


_INSTALLED = Path(__file__).resolve().parents[1] / "installed"
"""Folder of the package `services` in a wheel: directly in site-packages its name could clash with another package."""


def find_services() -> None:
    """Make `import services` find this package's services, ahead of any other package of that name."""
    if _INSTALLED.is_dir() and str(_INSTALLED) not in sys.path:
        sys.path.insert(0, str(_INSTALLED))


def program_of(role: ServiceKind) -> tuple[str, ...]:
    """Return the arguments for the Python interpreter that start a kind of service; its flags follow."""
    module = ("services.instance", role) if role in INSTANCES else (f"services.{role}",)
    # -P: ignore a folder named "services" in the working directory.
    return ("-P", "-m", "kaveri.config.run_service", *module)
