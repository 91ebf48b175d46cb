"""What /sd of the metrics port lists. A router sets it. Global, like metrics."""

from collections.abc import Callable, Sequence
from typing import Any

TargetGroups = Sequence[dict[str, Any]]
"""As Prometheus' HTTP service discovery takes them: {"targets": ["host:port"], "labels": {...}}."""

_find: Callable[[], TargetGroups] | None = None


def set_discovery(find: Callable[[], TargetGroups] | None) -> None:
    """find: called on the event loop for each request of /sd. None: there is no /sd."""
    global _find  # noqa: PLW0603 - see above
    _find = find


def discovered() -> TargetGroups | None:
    """What is to be scraped now. None: this process does not know."""
    return None if _find is None else _find()
