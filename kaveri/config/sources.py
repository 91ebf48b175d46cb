"""Reads the texts of settings from flags, KAVERI_* variables and a TOML file. settings.py parses them.

A file holds `setting = value` for every service that has the setting, and a section per service for one of them only:

    model = "Qwen/Qwen3-8B"
    redis_url_file = "/run/secrets/redis-url"

    [decode]
    max_batch = 128
"""

import difflib
import json
import re
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kaveri.errors import ConfigError

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "KAVERI_CONFIG"
FILE_SUFFIX = "_file"
"""Suffix of a setting that names a file which holds a secret, as in redis_url_file."""
SERVICE_LINKS_ADVICE = "set `enableServiceLinks: false` in the pod's spec"
_PREFIX = "KAVERI_"
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "KAVERI_TARGET", "KAVERI_API_KEY"})
"""KAVERI_* variables that are no service settings."""
_LINK_NAME = re.compile(
    r"KAVERI_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://\S+")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return _PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Given:
    """Unparsed value of one setting, and where it was given."""

    text: str
    origin: str
    """Where it was given: "--max-batch", "KAVERI_MAX_BATCH", "kaveri.toml [decode] max_batch"."""


@dataclass(frozen=True)
class SettingNames:
    """Names of the settings that one program accepts."""

    own: frozenset[str]
    secrets: frozenset[str] = frozenset()
    """Settings that may hold a password, and can be given in a file."""
    switches: frozenset[str] = frozenset()
    """Boolean settings, whose flags need no value."""

    @cached_property
    def taken(self) -> frozenset[str]:
        """All names that the program accepts: its settings, and `NAME_file` for each secret."""
        return self.own | {secret + FILE_SUFFIX for secret in self.secrets}


@dataclass(frozen=True)
class Names:
    """Setting names of one program, and of all programs, to tell unknown names from those of others."""

    program: str
    """Program name for errors: "kaveri decode"; its last word is its section of a file."""
    settings: SettingNames
    find_sections: Callable[[], Mapping[str, Collection[str]]] = field(default=dict)
    """Returns the names of all programs by section. May be slow: called only for a name that is not the program's."""

    @property
    def section(self) -> str:
        return self.program.split()[-1]

    @cached_property
    def sections(self) -> Mapping[str, Collection[str]]:
        return {**self.find_sections(), self.section: self.settings.taken}

    @cached_property
    def all(self) -> frozenset[str]:
        return frozenset(name for names in self.sections.values() for name in names)


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for the error about an unknown name: "; the nearest is max_batch", or empty."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {found[0]}" if found else ""


def read_flags(arguments: Sequence[str], names: Names) -> dict[str, Given]:
    """Parse `--max-batch 8` or `--max-batch=8` into values by setting name, CONFIG_FLAG as "config". The last of
    several wins; a boolean flag needs no value. Raises ConfigError for anything else."""
    flags = {flag_of(name): name for name in names.settings.taken} | {CONFIG_FLAG: "config"}
    given: dict[str, Given] = {}
    words = deque(arguments)
    while words:
        flag, equals, text = (word := words.popleft()).partition("=")
        if not flag.startswith("--"):
            raise ConfigError("flags", f"{word!r} is no flag; write --name value")
        if flag not in flags:
            raise ConfigError(flag, f"is no flag of {names.program}{nearest(flag, flags)}")
        if not equals:
            text = take_value(flag, words, is_switch=flags[flag] in names.settings.switches)
        given[flags[flag]] = Given(text, flag)
    return given


def take_value(flag: str, words: deque[str], *, is_switch: bool) -> str:
    """Remove a flag's value from the front of `words` and return it; "true" for a switch alone. Raises ConfigError."""
    if words and not words[0].startswith("--"):
        return words.popleft()
    if is_switch:
        return "true"
    raise ConfigError(flag, f"has no value; write {flag} VALUE")


def read_variables(environment: Mapping[str, str], names: Names) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return settings given by KAVERI_* variables, by name, and variables ignored because Kubernetes made them for a
    Service. Raises ConfigError for a KAVERI_* variable that no program reads."""
    variables = {variable_of(name): name for name in names.settings.taken}
    given: dict[str, Given] = {}
    links: list[str] = []
    for variable in sorted(name for name in environment if name.startswith(_PREFIX)):
        text = environment[variable]
        if variable in variables:
            given[variables[variable]] = Given(text, variable)
        elif variable in _OTHER_VARIABLES:
            continue
        elif _LINK_NAME.fullmatch(variable) or _LINK_VALUE.fullmatch(text):
            links.append(variable)
        elif variable not in (known := {variable_of(name) for name in names.all} | _OTHER_VARIABLES):
            raise ConfigError(variable, f"is no variable of Kaveri{nearest(variable, known)}")
    return given, tuple(links)


def is_service_link(text: str) -> bool:
    """Return True if a port's value is a Kubernetes service link: "tcp://10.0.0.1:80", for a Service named kaveri."""
    return _LINK_VALUE.fullmatch(text) is not None


def read_file(named: Given, names: Names) -> dict[str, Given]:
    """Read a program's settings from the TOML file that `named` names. Raises ConfigError, naming file and key."""
    path = Path(named.text)
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(named.origin, f"cannot read {path}: {error}") from error
    shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for section in table.keys() - shared.keys() - {names.section}:
        if section not in names.sections:
            raise ConfigError(f"{path} [{section}]", f"is no section{nearest(section, names.sections)}")
    for key in shared.keys() - names.settings.taken:
        if key not in names.all:
            raise ConfigError(f"{path} {key}", f"is no setting of Kaveri{nearest(key, names.all)}")
    own = table.get(names.section, {})
    for key in own.keys() - names.settings.taken:
        raise ConfigError(
            f"{path} [{names.section}] {key}", f"is no setting of {names.program}{nearest(key, names.settings.taken)}"
        )
    places = {key: (f"{path} {key}", value) for key, value in shared.items() if key in names.settings.taken}
    # A secret and its file are one setting: in the section, either replaces both.
    for key in own:
        plain = key.removesuffix(FILE_SUFFIX)
        if plain in names.settings.secrets:
            places.pop(plain, None)
            places.pop(plain + FILE_SUFFIX, None)
    places |= {key: (f"{path} [{names.section}] {key}", value) for key, value in own.items()}
    return {key: Given(_as_text(value, place), place) for key, (place, value) in places.items()}


def _as_text(value: Any, place: str) -> str:
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case list() if all(isinstance(item, str | int | float) for item in value):
            return ",".join(_as_text(item, place) for item in value)
        case dict():
            try:
                return json.dumps(value)
            except TypeError:
                pass
    raise ConfigError(place, "has a value of a kind that no setting takes; write text, a number, true, false or a list")


def find_given(name: str, sources: Sequence[Mapping[str, Given]], is_secret: bool) -> Given | None:
    """Return a setting from the first source that has it; a secret may be read from a file. Raises ConfigError."""
    for source in sources:
        given = source.get(name)
        by_file = source.get(name + FILE_SUFFIX) if is_secret else None
        if by_file is None or not by_file.text:
            if given is not None:
                return given
            continue
        if given is not None:
            raise ConfigError(by_file.origin, f"is set, and {given.origin} too; set one of them")
        try:
            return Given(Path(by_file.text).read_text().strip(), by_file.origin)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(by_file.origin, f"cannot read {by_file.text}: {error}") from error
    return None
