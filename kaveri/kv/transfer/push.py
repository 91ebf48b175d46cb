"""How a push ended, and which listener hears of it. Values; knows no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PushAccepted:
    """The receiver has every byte, verified where it asked for digests. The source blocks are no longer read."""

    transfer_id: bytes
    kv_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push ended without acceptance. The source blocks are no longer read."""

    transfer_id: bytes
    reason: str


PushListener = Callable[[PushAccepted | PushFailed], None]
"""Called on threads of the sender, once per opened transfer; must not block."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the receiver's own thread of the sender; must not block."""
