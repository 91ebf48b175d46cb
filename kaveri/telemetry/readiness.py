"""Readiness of this process, as reported by /readyz. Set by its gRPC server. Global, like metrics."""

from collections.abc import Callable

_ready = False
_before_ready: list[Callable[[], None]] = []


def set_ready(ready: bool) -> None:
    global _ready  # noqa: PLW0603 - see above
    while ready and _before_ready:
        _before_ready.pop(0)()
    _ready = ready


def is_ready() -> bool:
    return _ready


def before_ready(action: Callable[[], None]) -> None:
    """Run `action` once, before the process first accepts requests."""
    _before_ready.append(action)
