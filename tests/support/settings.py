from collections.abc import Mapping, Sequence
from typing import TypeVar

from kaveri.config.settings import read_settings

ConfigT = TypeVar("ConfigT")


def parse_config(
    config_type: type[ConfigT], program: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> ConfigT:
    """Parse a service's settings from arguments and environment, as read_settings() does."""
    return read_settings(config_type, program, arguments, environment).config
