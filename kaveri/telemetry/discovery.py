"""What /sd of the metrics port lists. A router sets it. Global, like metrics."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

TargetGroups = Sequence[dict[str, Any]]
"""As Prometheus' HTTP service discovery takes them: {"targets": ["host:port"], "labels": {...}}."""

_find: weakref.WeakMethod[Callable[[], TargetGroups]] | None = None


def set_discovery(find: Callable[[], TargetGroups]) -> None:
    """find: a method, called on the event loop for each request of /sd as long as its object lives."""
    global _find  # noqa: PLW0603 - see above
    _find = weakref.WeakMethod(find)


def discovered() -> TargetGroups | None:
    """What is to be scraped now. None: this process does not know."""
    find = None if _find is None else _find()
    return None if find is None else find()
