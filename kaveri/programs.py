"""Settings of all programs, by section of a configuration file. For programs only; services get them as arguments."""

import importlib
from collections.abc import Mapping
from typing import Any

from kaveri.config.services import UP_SECTION, find_services
from kaveri.config.settings import names_of


def settings_types() -> Mapping[str, type[Any]]:
    """Return the settings dataclass of each program, by section of a configuration file. The first call takes 0.1 s."""
    find_services()
    found: Mapping[str, type[Any]] = importlib.import_module("services.settings").SETTINGS
    return found


def setting_sections() -> dict[str, frozenset[str]]:
    """Return the valid setting names of each section of a configuration file; none for that of `kaveri up`."""
    return {section: names_of(declared).taken for section, declared in settings_types().items()} | {
        UP_SECTION: frozenset()
    }
