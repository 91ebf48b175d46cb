"""A tensor-parallel rank as the engine sees it: rank_plane in this process, remote_rank in another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.engine.kv_plane import PlaneEvent
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import LogSettings

LostListener = Callable[[str], None]
"""Called at most once, with the reason, when the rank is gone. No event of it follows."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Plain values and a function at the top of a module: it may go to another process."""

    listen: tuple[KvEndpoint, ...]
    """Where to take pushes, best first. Empty: nowhere."""
    transports: "Callable[[], Sequence[Transport]] | None"
    """Makes what carries KV, the preferred first; None for the socket transports."""
    epoch: int
    receiving: ReceiverOptions = ReceiverOptions()  # noqa: RUF009 - it is frozen
    copy_slots: int = 0
    """Staging slots for blocks that are copied to replicas."""
    rank: int = 0
    """Which of the engine's ranks it is for."""
    logs: LogSettings | None = None
    """Of the engine's process, for a rank that has a process of its own."""


@dataclass(frozen=True, slots=True)
class GrantTicket:
    """Lease the ticket's blocks. Granted or TransferReleased follows."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RevokeTicket:
    """Give a landing up. TransferReleased follows, unless it has ended."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class BeginPush:
    """Push a prompt as it is computed. PushAccepted or PushFailed follows."""

    engine_id: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AbortPush:
    """Give a push up. PushFailed follows, unless it has ended."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class PassFirstToken:
    """A prompt is computed and its first token drawn: every push of it hands the token over."""

    engine_id: str
    first_token_id: int


@dataclass(frozen=True, slots=True)
class ForgetPrompt:
    """Nothing more is pushed of a prompt."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class StageBlock:
    """Copy a block of the pool to a staging slot. BlockStaged follows."""

    serial: int
    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """Begin the push of a replica, out of the staging slots. Its events follow."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class WriteCopy:
    """Push a slot, as this block of the replica."""

    transfer_id: bytes
    block_index: int
    slot: int


@dataclass(frozen=True, slots=True)
class MarkCopy:
    """Mark the push of a replica."""

    transfer_id: bytes
    block_count: int
    note: bytes


@dataclass(frozen=True, slots=True)
class FinishCopy:
    """All blocks of a replica are written: finish its push. PushAccepted or PushFailed follows."""

    transfer_id: bytes
    note: bytes


@dataclass(frozen=True, slots=True)
class AbortCopy:
    """Give the push of a replica up. PushFailed follows, unless it has ended."""

    transfer_id: bytes
    keep_marked: bool
    """See KvSender.abort."""


CopyCall = StageBlock | OpenCopy | WriteCopy | MarkCopy | FinishCopy | AbortCopy
RankCall = GrantTicket | RevokeTicket | BeginPush | AbortPush | PassFirstToken | ForgetPrompt | CopyCall


@dataclass(frozen=True, slots=True)
class BlockStaged:
    """A block is in its staging slot."""

    serial: int


RankEvent = PlaneEvent | BlockStaged
RankListener = Callable[[RankEvent], None]
"""Called on any thread, and within do() too."""


class Rank(Protocol):
    """Every call but attach() and detach() returns without waiting."""

    @property
    def layout(self) -> KvLayout:
        """Of the whole engine."""

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        """Makes the rank's end of the data plane; returns where it takes pushes. Raises ConfigError."""

    def detach(self) -> None:
        """Ends it, with all transfers. Idempotent; waits 10 s at most."""

    def do(self, call: RankCall) -> None:
        """Carries a call out. What comes of it goes to the listener."""

    def flow(self) -> KvFlow:
        """What is under way, now or a little while ago."""

    def shutdown(self) -> None:
        """The rank is not needed any more. Idempotent."""
