"""The examples in the library's docstrings and in its README do what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
import structlog


@pytest.mark.parametrize("name", ["block_map"])
def test_examples_of_the_kv_library_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"kaveri.kv.layout.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_example_of_the_readme_holds() -> None:
    readme = Path(importlib.import_module("kaveri.kv").__path__[0]) / "README.md"
    with structlog.testing.capture_logs():
        result = doctest.testfile(str(readme), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
