"""Warm service processes for the end-to-end tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_services: None) -> None:
    """Start services warm."""
