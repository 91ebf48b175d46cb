"""The tree in the docstring of kaveri/errors.py matches the classes, and each error keeps its data."""

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kaveri import errors
from kaveri.errors import InvalidArgument, KaveriError, ModelNotFound, NoCapacity


def _drawn() -> dict[str, tuple[str, ...]]:
    """Return the names of the attributes of each class, as the docstring lists them."""
    return {name: tuple(re.split(r",\s*", data)) if data else () for _, name, data in _rows()}


def _drawn_bases() -> dict[str, str]:
    """Return the name of each class's base, as the docstring draws it."""
    bases, last = {}, "KaveriError"
    for indent, name, _ in _rows():
        bases[name] = last if indent else "KaveriError"
        last = last if indent else name
    return bases


def _rows() -> list[tuple[str, str, str]]:
    """Return (indentation, class, attributes) of each line of the tree, which has two levels below its root."""
    assert errors.__doc__ is not None
    drawn = r"^(│   |)[├└]── (\w+)\s+[^:\n]+(?::\s*(.*))?$"
    return re.findall(drawn, errors.__doc__, flags=re.MULTILINE)


def _classes(root: type[KaveriError] = KaveriError) -> Iterator[type[KaveriError]]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
        yield from _classes(child)


def test_the_drawn_tree_names_exactly_the_classes_in_their_order() -> None:
    assert list(_drawn()) == [kind.__name__ for kind in _classes()]
    assert _drawn_bases() == {kind.__name__: kind.__base__.__name__ for kind in _classes() if kind.__base__}


@pytest.mark.parametrize("kind", list(_classes()), ids=lambda kind: kind.__name__)
def test_each_error_keeps_the_data_that_the_drawing_promises(kind: type[KaveriError]) -> None:
    parameters = inspect.signature(kind).parameters
    values = {name: _example(name) for name in parameters}
    error = kind(**values)
    for name in _drawn()[kind.__name__]:
        assert getattr(error, name) == values[name]
    assert kind.__doc__
    assert "\n" not in str(error)


def _example(name: str) -> object:
    known = {"retry_after_s": 0.5, "limit_s": 30.0, "attempt": 1, "newest_attempt": 2, "served": ("a", "b")}
    return known.get(name, f"the {name}")


@pytest.mark.parametrize("kind", list(_classes()), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_each_error_survives_pickle_and_copy_with_its_data(kind: type[KaveriError], again: Any) -> None:
    error = kind(**{name: _example(name) for name in inspect.signature(kind).parameters})
    error.add_note("seen")
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_messages_name_field_value_and_limit() -> None:
    assert str(InvalidArgument("params.top_p", 1.5, "in (0, 1]")) == "params.top_p is 1.5; it must be in (0, 1]"
    assert str(NoCapacity("decode", 0.2)) == "decode: no room; try again in 0.2 s"
    assert str(ModelNotFound("x", ("a", "b"))) == "model 'x' is not served here; served here: a, b"


def test_a_huge_value_makes_no_huge_message() -> None:
    for value in ("x" * 10**6, ["x" * 10**6], ["x"] * 10**6, list(range(10**6))):
        message = str(InvalidArgument("prompt", value, "shorter"))
        assert len(message) < 300
        assert message.endswith("...; it must be shorter")
    assert str(InvalidArgument("prompt", "x" * 118, "shorter")) == f"prompt is '{'x' * 118}'; it must be shorter"
