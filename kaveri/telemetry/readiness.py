"""Whether this process takes requests. Its gRPC server says so; /readyz tells others. One fact per process, as its
metrics are."""

_ready = False


def set_ready(ready: bool) -> None:
    """Takes in that the process takes requests from now on, or no longer."""
    global _ready  # noqa: PLW0603 - see above
    _ready = ready


def is_ready() -> bool:
    """Whether the process takes requests."""
    return _ready
