"""No thread of KV transfers breaks unnoticed: a test that breaks one on purpose says so."""

from collections.abc import Iterator

import pytest
import structlog
from structlog.typing import EventDict


@pytest.fixture
def breaks_are_expected() -> None:
    """For tests that break something on purpose. Those that capture the log need it not."""


@pytest.fixture(autouse=True)
def nothing_breaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """What breaks is logged with its traceback, and all else goes on: nothing else would fail the test."""
    broken: list[object] = []

    def note(_logger: object, _method: str, event: EventDict) -> EventDict:
        if event.get("exc_info"):
            broken.append(event["event"])
        return event

    processors = structlog.get_config()["processors"]
    processors.insert(0, note)
    yield
    processors.remove(note)
    assert not broken or "breaks_are_expected" in request.fixturenames, f"logged with a traceback: {broken}"
