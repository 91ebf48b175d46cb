"""Takes the fields of one JSON object apart. What is not known is refused, never ignored. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kaveri.errors import InvalidArgument

Accepts = Callable[[Any], bool]
"""Whether a value of a field changes nothing."""


def one_of(*values: object) -> Accepts:
    """Accepts these values. True is not 1 here."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def number(*values: float) -> Accepts:
    """Accepts these numbers, written as whole numbers or not."""
    return lambda value: type(value) in (int, float) and value in values


def empty(value: object) -> bool:
    """Accepts an empty list, object or text."""
    return value in ([], {}, "")


def any_text(value: object) -> bool:
    """Accepts every text: a note of the caller's, which changes no answer."""
    return type(value) is str


def any_list(value: object) -> bool:
    """Accepts every list."""
    return type(value) is list


def any_object(value: object) -> bool:
    """Accepts every object: notes of the caller's, which change no answer."""
    return type(value) is dict


def any_flag(value: object) -> bool:
    """Accepts true and false."""
    return type(value) is bool


class Fields:
    """The fields of an object. Take those that are known, then call refuse_rest(). null stands for a missing field."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """path: stands before the names in errors: "messages[0]."."""
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """The value, of any type; None: it is missing."""
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        """false when it is missing. Raises InvalidArgument."""
        value = self.take(name)
        if value is None or type(value) is bool:
            return bool(value)
        raise InvalidArgument(self._path + name, value, "true or false")

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Raises InvalidArgument."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise InvalidArgument(self._path + name, value, f"a whole number in [{least}, {most}]")
        return value

    def text(self, name: str) -> str | None:
        """Raises InvalidArgument."""
        value = self.take(name)
        if value is not None and type(value) is not str:
            raise InvalidArgument(self._path + name, value, "a text")
        return value

    def refuse_rest(self, harmless: Mapping[str, Accepts]) -> None:
        """harmless: known fields that are not built, and the values of them that change nothing. Raises
        InvalidArgument for every other field, and for every other value."""
        for name, value in self._left.items():
            accepts = harmless.get(name)
            if accepts is None:
                raise InvalidArgument(self._path + f"{name:.100}", value, "left out: there is no such parameter")
            if not accepts(value):
                raise InvalidArgument(self._path + name, value, "left out: Kaveri does not support it")


def check_object(value: object, field: str) -> Mapping[str, Any]:
    """Raises InvalidArgument unless `value` is a JSON object."""
    if not isinstance(value, dict):
        raise InvalidArgument(field, value, "an object")
    return value


def check_items(value: object, field: str) -> Sequence[Any]:
    """Raises InvalidArgument unless `value` is a JSON array with something in it."""
    if not isinstance(value, list) or not value:
        raise InvalidArgument(field, value, "a list with at least one entry")
    return value
