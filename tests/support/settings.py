"""Parses settings of services in tests."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kaveri.config.settings import read_settings

ConfigT = TypeVar("ConfigT")


def parse_config(
    config_type: type[ConfigT], program: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> ConfigT:
    """Return the config of read_settings()."""
    return read_settings(config_type, program, arguments, environment).config
