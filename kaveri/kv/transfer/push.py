"""How a push goes and ends, and which listener hears of it. Values; knows no connection."""

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


@dataclass(frozen=True, slots=True)
class PushMarked:
    """The receiver of an open push has verified blocks [0, block_count), and keeps them if the push fails."""

    transfer_id: bytes
    block_count: int
    """Higher than in the mark before."""


@dataclass(frozen=True, slots=True)
class PushExtended:
    """The receiver of an open push has given it more destination blocks."""

    transfer_id: bytes
    block_count: int
    """All that may be written now, those of the ticket included."""


PushEnd = PushAccepted | PushFailed
PushEvent = PushEnd | PushMarked | PushExtended
PushListener = Callable[[PushEvent], None]
"""Called on threads of the sender; must not block. Of each opened transfer it hears the end, once and last."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the receiver's own thread of the sender; must not block."""
