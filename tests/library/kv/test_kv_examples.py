"""The examples in the library's docstrings do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["block_map", "partition", "plan", "places", "streams", "token_streamer"])
def test_examples_of_the_kv_library_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"kaveri.kv.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
