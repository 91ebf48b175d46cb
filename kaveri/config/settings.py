"""Declares settings as fields of a frozen dataclass, and reads them from flags, KAVERI_* variables and a TOML file.

A field `chunk_tokens` made by `setting` becomes the flag `--chunk-tokens`, the variable `KAVERI_CHUNK_TOKENS` and the
file's key `chunk_tokens`. A flag wins over a variable, a variable over the file, the file over the default. A secret
can also be given by the file that holds it, as `--redis-url-file`, `KAVERI_REDIS_URL_FILE` or `redis_url_file`, since
every user of a machine can read command lines. Environment and flags are read nowhere else.
"""

import enum
import inspect
import math
import operator
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar

from kaveri.config.output import quiet_output
from kaveri.config.sources import (
    CONFIG_VARIABLE,
    FILE_SUFFIX,
    SERVICE_LINKS_ADVICE,
    Given,
    Names,
    SettingNames,
    find_given,
    flag_of,
    is_service_link,
    read_file,
    read_flags,
    read_variables,
    variable_of,
)
from kaveri.errors import ConfigError

ConfigT = TypeVar("ConfigT")
NumberT = TypeVar("NumberT", int, float)

OPTIONS = "Options"
MAX_NAME_LENGTH = 128
MAX_PORT = 65_535
_HELP_WIDTH = 78
_HELP_COLUMN = 30
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def setting(
    help: str,
    default: Any = MISSING,
    parse: Callable[[str], Any] | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    mask: Callable[[str], str] | None = None,
) -> Any:
    """Declare a setting as a dataclass field with one line of help: unit, why this default, what None or 0 means.

    parse: converts text to the value if the type alone is not enough; raises ValueError. No default: the setting is
    required. least, above, most: inclusive minimum, exclusive minimum, inclusive maximum of a number. choices: the only
    accepted texts; none: any. mask: for a setting that may hold a password, returns the printable part of its value;
    such a setting can be given in a file.
    """
    limits = {"least": least, "above": above, "most": most, "choices": tuple(choices)}
    return field(default=default, metadata={"help": help, "parse": parse, "mask": mask, **limits})


def hidden(text: str) -> str:
    """Mask the whole value of a secret setting, for display."""
    return "***"


def present(text: str) -> str:
    """Validate the text of a setting that must not be empty. Raises ValueError."""
    if not text.strip():
        raise ValueError("is empty")
    return text


def name_text(text: str) -> str:
    """Validate a name: empty, or up to MAX_NAME_LENGTH letters, digits and `. _ -`. Raises ValueError."""
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH}}}", text):
        raise ValueError(f"is {text!r:.140}; write up to {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-'")
    return text


def size_bytes(text: str) -> int:
    """Parse a size such as "512MiB", "2GB", "64k" or a plain number into bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write 512MiB, 2GB or a number of bytes")
    size = float(match[1]) * _SIZE_UNITS[match[2] or ""]
    if not math.isfinite(size):
        raise ValueError(f"{text[:40]!r} is more than any machine has")
    return int(size)


@dataclass(frozen=True, slots=True)
class ReadSettings(Generic[ConfigT]):
    config: ConfigT
    given: Mapping[str, Given]
    """Given values by name; a missing setting has its default."""
    service_links: tuple[str, ...]
    """Ignored KAVERI_* variables that Kubernetes created for a Service."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, value and origin (flag, variable or file) of every setting, for display. Secrets are masked."""
        rows = []
        for entry in _declared(type(self.config)):
            given, mask = self.given.get(entry.name), entry.metadata["mask"]
            text = _shown(getattr(self.config, entry.name))
            if given is not None and given.text and entry.metadata["parse"]:
                # The given text of a parsed value, such as a file's path.
                text = given.text
            shown = mask(text) if mask is not None and text else text
            rows.append((entry.name, shown, given.origin if given else "default"))
        return rows


def read_settings(
    config_type: type[ConfigT],
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    find_sections: Callable[[], Mapping[str, Collection[str]]] = dict,
) -> ReadSettings[ConfigT]:
    """Build a `config_type` from flags, then variables, then the file that --config names, then defaults.

    program: "kaveri decode"; the last word is its section of the file. find_sections: returns the setting names of all
    programs by section; called only for an unknown name. Prints help and exits 0 on --help. Raises ConfigError, naming
    the flag, the variable or the place in the file, for invalid input.
    """
    if "--help" in arguments or "-h" in arguments:
        _print_help(config_type, program)
        raise SystemExit(0)
    names = Names(program, names_of(config_type), find_sections)
    flags = read_flags(arguments, names)
    variables, service_links = read_variables(environment, names)
    sources = [flags, variables]
    named = flags.get("config") or Given(environment.get(CONFIG_VARIABLE, ""), CONFIG_VARIABLE)
    if named.text:
        sources.append(read_file(named, names))
    hints = typing.get_type_hints(config_type)
    given: dict[str, Given] = {}
    values: dict[str, Any] = {}
    for entry in _declared(config_type):
        found = find_given(entry.name, sources, entry.name in names.settings.secrets)
        if found is not None:
            given[entry.name] = found
            values[entry.name] = _parse_value(found, entry.metadata, hints[entry.name])
        elif entry.default is MISSING:
            raise ConfigError(flag_of(entry.name), f"is required ({entry.metadata['help']})")
    return ReadSettings(config_type(**values), given, service_links)


def names_of(config_type: type[Any]) -> SettingNames:
    """Return the names of a program's settings: fields made by setting(), without those in its attribute NOT_TAKEN."""
    hints, declared = typing.get_type_hints(config_type), _declared(config_type)
    return SettingNames(
        own=frozenset(entry.name for entry in declared),
        secrets=frozenset(entry.name for entry in declared if entry.metadata["mask"] is not None),
        switches=frozenset(entry.name for entry in declared if hints[entry.name] is bool),
    )


def _declared(config_type: type[Any]) -> list[Field[Any]]:
    not_taken = getattr(config_type, "NOT_TAKEN", ())
    return [entry for entry in fields(config_type) if "help" in entry.metadata and entry.name not in not_taken]


def _print_help(config_type: type[Any], program: str) -> None:
    groups = {title: list[tuple[str, str]]() for title in dict.fromkeys(map(_group_title, config_type.__mro__))}
    groups[OPTIONS] = [
        ("--config <file>", f"TOML file of settings; flags and variables win over it.  [env var: {CONFIG_VARIABLE}]")
    ]
    for entry in _declared(config_type):
        variables = variable_of(entry.name)
        if entry.metadata["mask"] is not None:
            variables += f" or {variable_of(entry.name + FILE_SUFFIX)}"
        default = "required" if entry.default is MISSING else f"default: {_shown(entry.default)}"
        text = entry.metadata["help"]
        unit = entry.name.split("_")[-1]
        declared_by = next(each for each in config_type.__mro__ if entry.name in inspect.get_annotations(each))
        groups[_group_title(declared_by)].append(
            (f"{flag_of(entry.name)} <{unit}>", f"{text[0].upper()}{text[1:]}.  [env var: {variables}; {default}]")
        )
    with quiet_output():
        print(_help_text(program, config_type.__doc__ or "", groups))


def _group_title(config_type: type[Any]) -> str:
    return str(vars(config_type).get("HELP_TITLE", OPTIONS))


def _help_text(program: str, doc: str, groups: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Format a program's help. groups: by heading, each flag with its text; --help is added under OPTIONS."""
    width = min(_HELP_WIDTH, shutil.get_terminal_size().columns - 2)
    lines = [f"Usage: {program} [OPTIONS]"]
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        lines += ["", *textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="  ")]
    for title, rows in groups.items():
        last = [("--help", "Show this message and exit.")] if title == OPTIONS else []
        if rows:
            lines += ["", f"{title}:", *_help_lines([*rows, *last], width)]
    return "\n".join(lines)


def _help_lines(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    lines: list[str] = []
    for flag, text in rows:
        start = f"  {flag}"
        if len(start) > _HELP_COLUMN - 2:
            lines.append(start)
            start = ""
        first, column = start.ljust(_HELP_COLUMN), " " * _HELP_COLUMN
        lines += textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=column, break_long_words=False, break_on_hyphens=False
        )
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "empty"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse_value(given: Given, metadata: Mapping[str, Any], hint: Any) -> Any:
    try:
        value = (metadata["parse"] or _parser_of(hint))(given.text)
        _check(value, metadata)
    except ValueError as error:
        if is_service_link(given.text):
            reason = f"is {given.text!r}, which Kubernetes made for a Service of this name; {SERVICE_LINKS_ADVICE}"
            raise ConfigError(given.origin, reason) from error
        raise ConfigError(given.origin, str(error)) from error
    return value


def _check(value: Any, limits: Mapping[str, Any]) -> None:
    if (choices := limits["choices"]) and value not in choices:
        raise ValueError(f"is {value!r}; choose {', '.join(choices)}")
    broken = (("least", operator.lt, "at least"), ("above", operator.le, "more than"), ("most", operator.gt, "at most"))
    for name, breaks, text in broken:
        if (limit := limits[name]) is not None and breaks(value, limit):
            raise ValueError(f"is {value}; it must be {text} {limit}")


def _parser_of(hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return partial(_parse_choice, hint)
    parsers: dict[Any, Callable[[str], Any]] = {
        bool: _parse_bool,
        int: partial(_parse_number, int, "is no whole number"),
        float: _parse_float,
    }
    assert callable(hint), hint
    return parsers.get(hint) or typing.cast(Callable[[str], Any], hint)


def _parse_choice(choices: type[enum.StrEnum], text: str) -> enum.StrEnum:
    try:
        return choices(text)
    except ValueError as error:
        raise ValueError(f"is {text!r}; choose {', '.join(choices)}") from error


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_number(kind: type[NumberT], fault: str, text: str) -> NumberT:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} {fault}") from error


def _parse_float(text: str) -> float:
    value = _parse_number(float, "is no number", text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no finite number")
    return value
