"""The SDK's public API is frozen in public_api.txt: one line per export, method and field."""

import dataclasses
import enum
import inspect
from pathlib import Path

import kaveri

FROZEN = Path(__file__).with_name("public_api.txt")
MADE_BY_A_CLIENT = (kaveri.AsyncStream, kaveri.Stream)


def test_the_exports_are_the_ones_promised() -> None:
    assert sorted(kaveri.__all__) == kaveri.__all__
    lines = [line for name in kaveri.__all__ for line in _describe(name)]
    assert lines == FROZEN.read_text().splitlines()


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(kaveri.__file__).with_name("py.typed").exists()


def _describe(name: str) -> list[str]:
    export = getattr(kaveri, name)
    if issubclass(export, enum.Enum):
        return [f"{name} = {' | '.join(repr(member.value) for member in export)}"]
    if dataclasses.is_dataclass(export):
        return [f"{name}{_signature(export)}"]
    bases = f" is a {export.__base__.__name__}" if issubclass(export, Exception) else ""
    lines = [name if export in MADE_BY_A_CLIENT else f"{name}{_signature(export)}{bases}"]
    for attribute, value in sorted(vars(export).items()):
        if attribute.startswith("_") and attribute not in ("__aiter__", "__anext__", "__iter__", "__next__"):
            continue
        if inspect.isfunction(value):
            kind = "async " if inspect.iscoroutinefunction(value) else ""
            lines.append(f"{kind}{name}.{attribute}{_signature(value)}")
        else:
            lines.append(f"{name}.{attribute}")
    return lines


def _signature(export: object) -> str:
    assert callable(export)
    # Exceptions inherit a constructor that has no signature.
    return "(*args)" if export is kaveri.KaveriError else str(inspect.signature(export))
