"""Actions of a peer's thread. Values."""

from dataclasses import dataclass

from kaveri.kv.transfer.connection import Connection
from kaveri.kv.transfer.outgoing import Push


@dataclass(frozen=True, slots=True)
class SendOpening:
    push: Push


@dataclass(frozen=True, slots=True)
class SendWrite:
    push: Push
    connection: Connection
    layers: range
    first_index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendMark:
    push: Push
    block_count: int
    note: bytes


@dataclass(frozen=True, slots=True)
class SendEnd:
    push: Push
    note: bytes


@dataclass(frozen=True, slots=True)
class SendAbort:
    push: Push


@dataclass(frozen=True, slots=True)
class LoseConnection:
    connection: Connection
    reason: str


@dataclass(frozen=True, slots=True)
class DropLost:
    """Close the lost connection."""


@dataclass(frozen=True, slots=True)
class TellUntold:
    """Notify the receiver of pushes that were given up."""


PeerAction = SendOpening | SendWrite | SendMark | SendEnd | SendAbort | LoseConnection | DropLost | TellUntold
