"""What planted bugs are made with: their list, and the replacement of one attribute for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One bug that can be switched on."""

    name: str
    what: str
    """What is wrong, in one sentence."""
    apply: Callable[[], AbstractContextManager[None]]


PLANTED: dict[str, PlantedBug] = {}
"""All of them, by name."""


def planted(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Puts a planted bug on the list, under the function's name."""
    assert function.__doc__ is not None
    PLANTED[function.__name__] = PlantedBug(function.__name__, function.__doc__, contextmanager(function))
    return function


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or module by make(what was there)."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def nothing(*_: object, **__: object) -> None:
    """Stands for a function that should have done something."""


async def nothing_async(*_: object, **__: object) -> None:
    """Stands for a coroutine function that should have done something."""
