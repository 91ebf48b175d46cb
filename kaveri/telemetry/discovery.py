"""Scrape targets for /sd of the metrics port. Set by a router. Global, like metrics."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

TargetGroups = Sequence[dict[str, Any]]
"""Prometheus' HTTP service discovery format: {"targets": ["host:port"], "labels": {...}}."""

_find: weakref.WeakMethod[Callable[[], TargetGroups]] | None = None


def set_discovery(find: Callable[[], TargetGroups]) -> None:
    """Set the source of targets. find: a method, called on the event loop for each request of /sd while its object
    lives."""
    global _find  # noqa: PLW0603 - see above
    _find = weakref.WeakMethod(find)


def discovered() -> TargetGroups | None:
    """Current scrape targets; None if this process does not know them."""
    find = None if _find is None else _find()
    return None if find is None else find()
