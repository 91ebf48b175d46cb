"""Fixtures with stepwise engines."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.library.engine.stepwise_bench import StepwiseBench
from tests.support.engine_suite import one_torch_thread

__all__ = ["one_torch_thread"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StepwiseBench]:
    with ExitStack() as stack:
        yield StepwiseBench(tmp_path, stack)
