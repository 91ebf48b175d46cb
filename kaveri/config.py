"""Turns a frozen dataclass into command-line flags and KAVERI_* variables, parsed loudly.

A service declares its settings once, as dataclass fields made by `setting`. Each field `chunk_tokens` becomes the flag
`--chunk-tokens` and the variable `KAVERI_CHUNK_TOKENS`; the flag wins. A secret one may be in a file that the variable
`KAVERI_<FIELD>_FILE` names, since every user of a machine sees command lines. Environment and flags are read nowhere
else.
"""

import argparse
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kaveri.errors import ConfigError

ConfigT = TypeVar("ConfigT")

MAX_NAME_LENGTH = 128
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
    secret: bool = False,
) -> Any:
    """A dataclass field with one line of help: unit, why this default, what None or 0 means.

    parse: text to value where the type alone does not say how; raises ValueError. No default: the setting is required.
    least, above, most: what a number must reach, exceed, and not exceed. choices: the only texts taken; none: any.
    secret: it may hold a password, and be given in a file.
    """
    limits = {"least": least, "above": above, "most": most, "choices": tuple(choices)}
    return field(default=default, metadata={"help": help, "parse": parse, "secret": secret, **limits})


def present(text: str) -> str:
    """For `setting`: a text that must not be empty. Raises ValueError."""
    if not text.strip():
        raise ValueError("is empty")
    return text


def name_text(text: str) -> str:
    """For `setting`: a name, of up to MAX_NAME_LENGTH letters, digits and `. _ -`, or none. Raises ValueError."""
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH}}}", text):
        raise ValueError(f"is {text!r:.140}; write up to {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-'")
    return text


def read_secret(variable: str, environment: Mapping[str, str]) -> str | None:
    """A secret from the variable, or from the file that <variable>_FILE names, without the line's end. None: neither is
    set. Raises ConfigError when both are, or the file cannot be read."""
    text, path = environment.get(variable), environment.get(f"{variable}_FILE")
    if not path:
        return text
    if text is not None:
        raise ConfigError(f"{variable}_FILE", f"is set, and {variable} too; set one of them")
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}_FILE", f"cannot read {path}: {error}") from error


def size_bytes(text: str) -> int:
    """Reads "512MiB", "2GB", "64k" or a plain number of bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write 512MiB, 2GB or a number of bytes")
    size = float(match[1]) * _SIZE_UNITS[match[2] or ""]
    if not math.isfinite(size):
        raise ValueError(f"{text[:40]!r} is more than any machine has")
    return int(size)


def parse_config(
    config_type: type[ConfigT], program: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> ConfigT:
    """Builds a `config_type` from flags, then environment, then defaults.

    Prints help and exits 0 on --help. Raises ConfigError, naming the flag or the variable, on anything it cannot read.
    """
    hints = typing.get_type_hints(config_type)
    parser = _LoudParser(prog=program, description=config_type.__doc__, allow_abbrev=False)
    declared = fields(config_type)  # type: ignore[arg-type]
    for entry in declared:
        flag, variable = _flag(entry.name), _variable(entry.name)
        shown = "required" if entry.default is MISSING else f"default: {entry.default}"
        variables = f"{variable} or {variable}_FILE" if entry.metadata["secret"] else variable
        help_text = f"{entry.metadata['help']} [{variables}; {shown}]".replace("%", "%%")
        parser.add_argument(
            flag, dest=entry.name, default=None, help=help_text, metavar=entry.name.split("_")[-1].upper()
        )
    given = vars(parser.parse_args(list(arguments)))
    values: dict[str, Any] = {}
    for entry in declared:
        source = _flag(entry.name)
        text: str | None = given[entry.name]
        if text is None:
            source = _variable(entry.name)
            text = read_secret(source, environment) if entry.metadata["secret"] else environment.get(source)
        if text is not None:
            values[entry.name] = _parse_value(source, text, entry.metadata, hints[entry.name])
        elif entry.default is MISSING:
            raise ConfigError(_flag(entry.name), f"is required ({entry.metadata['help']})")
    return config_type(**values)


class _LoudParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError("flags", message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "KAVERI_" + name.upper()


def _parse_value(source: str, text: str, metadata: Mapping[str, Any], hint: Any) -> Any:
    try:
        value = (metadata["parse"] or _parser_of(hint))(text)
        _check(value, metadata)
    except ValueError as error:
        raise ConfigError(source, str(error)) from error
    return value


def _check(value: Any, limits: Mapping[str, Any]) -> None:
    least, above, most, choices = (limits[name] for name in ("least", "above", "most", "choices"))
    if choices and value not in choices:
        raise ValueError(f"is {value!r}; choose {', '.join(choices)}")
    if least is not None and value < least:
        raise ValueError(f"is {value}; it must be at least {least}")
    if above is not None and value <= above:
        raise ValueError(f"is {value}; it must be more than {above}")
    if most is not None and value > most:
        raise ValueError(f"is {value}; it must be at most {most}")


def _parser_of(hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return partial(_parse_choice, hint)
    parsers: dict[Any, Callable[[str], Any]] = {bool: _parse_bool, int: _parse_int, float: _parse_float}
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


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no whole number") from error


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no number") from error
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no finite number")
    return value
