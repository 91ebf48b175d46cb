"""The examples in the docstrings of kaveri.kv and in docs/kv.md are right."""

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


def test_the_example_of_the_manual_holds() -> None:
    manual = Path(__file__).parents[3] / "docs" / "kv.md"
    with structlog.testing.capture_logs():
        result = doctest.testfile(str(manual), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
