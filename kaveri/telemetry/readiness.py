"""Whether this process accepts requests. Its gRPC server sets it; /readyz reports it. Global, like metrics."""

_ready = False


def set_ready(ready: bool) -> None:
    """Records whether the process accepts requests."""
    global _ready  # noqa: PLW0603 - see above
    _ready = ready


def is_ready() -> bool:
    """Whether the process accepts requests."""
    return _ready
