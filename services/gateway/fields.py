"""Validates the fields of a JSON object. Unknown fields are refused, never ignored. Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kaveri.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Accepts:
    """Values of an unsupported field that have no effect, and are taken."""

    check: Callable[[Any], bool]
    says: str
    """The values, for documents; empty: none."""

    def __call__(self, value: Any) -> bool:
        return self.check(value)


def one_of(*values: object) -> Accepts:
    """Accept these values only. Types must match: True is not 1."""
    says = " or ".join(f"`{json.dumps(value)}`" for value in values)
    return Accepts(lambda value: any(type(value) is type(each) and value == each for each in values), says)


def number(*values: float) -> Accepts:
    """Accept these numbers only, as integers or floats."""
    says = " or ".join(f"{value:g}" for value in values)
    return Accepts(lambda value: type(value) in (int, float) and value in values, says)


empty = Accepts(lambda value: value in ([], {}, ""), "empty")


def any_of(kind: type[object], says: str = "any") -> Accepts:
    """Accept every value of exactly this type."""
    return Accepts(lambda value: type(value) is kind, says)


class Fields:
    """Fields of a JSON object not taken yet. Take the known ones, then call refuse_rest(). null counts as missing."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """path: prefix of field names in errors, such as "messages[0]."."""
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """Remove a field and return its value, of any type; None if missing."""
        return self._left.pop(name, None)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Remove a boolean field and return it; `default` if missing. Raises InvalidArgument for another type."""
        value = self.take(name)
        if type(value) not in (bool, type(None)):
            raise InvalidArgument(self._path + name, value, "true or false")
        return default if value is None else bool(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Remove an integer field and return it; None if missing. Raises InvalidArgument if not in [least, most]."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise InvalidArgument(self._path + name, value, f"a whole number in [{least}, {most}]")
        return value

    def text(self, name: str) -> str | None:
        """Remove a string field and return it; None if missing. Raises InvalidArgument for another type."""
        value = self.take(name)
        if value is not None and type(value) is not str:
            raise InvalidArgument(self._path + name, value, "a text")
        return value

    def refuse_rest(self, harmless: Mapping[str, Accepts]) -> None:
        """Raise InvalidArgument for any field left, unless its predicate in `harmless` finds that it has no effect."""
        for name, value in self._left.items():
            accepts = harmless.get(name)
            if accepts is None:
                raise InvalidArgument(self._path + f"{name:.100}", value, "left out: there is no such parameter")
            if not accepts(value):
                raise InvalidArgument(self._path + name, value, "left out: Kaveri does not support it")


def check_object(value: object, field: str) -> Mapping[str, Any]:
    """Return `value`. Raises InvalidArgument unless it is a JSON object. field: name for the error."""
    if not isinstance(value, dict):
        raise InvalidArgument(field, value, "an object")
    return value


def check_items(value: object, field: str) -> Sequence[Any]:
    """Return `value`. Raises InvalidArgument unless it is a non-empty JSON array. field: name for the error."""
    if not isinstance(value, list) or not value:
        raise InvalidArgument(field, value, "a list with at least one entry")
    return value
