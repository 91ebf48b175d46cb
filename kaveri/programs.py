"""Settings of every program that reads a configuration file, by section. For programs: services pass them down."""

import importlib
from collections.abc import Mapping
from typing import Any

from kaveri.config.services import UP_SECTION, find_services
from kaveri.config.settings import names_of


def settings_types() -> Mapping[str, type[Any]]:
    """Settings dataclasses by section of a configuration file. The first call takes a tenth of a second."""
    find_services()
    found: Mapping[str, type[Any]] = importlib.import_module("services.settings").SETTINGS
    return found


def setting_sections() -> dict[str, frozenset[str]]:
    """Valid names by section; see kaveri.config.sources.Names. Those of `kaveri up` are not included."""
    return {section: names_of(declared).taken for section, declared in settings_types().items()} | {
        UP_SECTION: frozenset()
    }
