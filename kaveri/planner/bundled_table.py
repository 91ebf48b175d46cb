"""Entries of the planner's own tables, or of a file of the same form. Raises ConfigError, naming file and key."""

import math
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from kaveri.errors import ConfigError


class _Named(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init__(self, *, name: str, **values: Any) -> None: ...


EntryT = TypeVar("EntryT", bound=_Named)
_FOLDER = Path(__file__).parent / "bundled"


def bundled_names(table: str) -> tuple[str, ...]:
    return tuple(tomllib.loads((_FOLDER / f"{table}.toml").read_text()))


def read_entry(name_or_file: str, table: str, kind: type[EntryT], field: str) -> EntryT:
    """Read an entry of a bundled table by its name, or from a TOML file with the fields of one entry.

    kind: a dataclass of `name` and of numbers above 0 or texts. field: named in errors.
    """
    entries = tomllib.loads((_FOLDER / f"{table}.toml").read_text())
    if name_or_file in entries:
        return _entry(name_or_file, entries[name_or_file], kind, field)
    path = Path(name_or_file).expanduser()
    if not name_or_file or not path.is_file():
        raise ConfigError(field, f"is {name_or_file!r}, which is no file and none of: {', '.join(entries)}")
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(field, f"cannot read {path}: {error}") from error
    return _entry(path.stem, document, kind, f"{field} {path}")


def _entry(name: str, document: dict[str, Any], kind: type[EntryT], where: str) -> EntryT:
    known = {entry.name: entry for entry in fields(kind) if entry.name != "name"}
    for key, value in document.items():
        if key not in known:
            raise ConfigError(f"{where} {key}", f"is no field; there are {', '.join(known)}")
        expected = known[key].type
        if expected in (str, "str"):
            if not isinstance(value, str):
                raise ConfigError(f"{where} {key}", f"is {value!r}; it must be a text")
            continue
        kinds = (int,) if expected in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise ConfigError(f"{where} {key}", f"is {value!r}; it must be a number above 0")
    for key, entry in known.items():
        if key not in document and entry.default is MISSING:
            raise ConfigError(f"{where} {key}", "is not given")
    return kind(name=name, **document)
