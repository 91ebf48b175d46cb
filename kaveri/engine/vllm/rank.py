"""A tensor-parallel rank as the engine sees it: rank_plane in this process, remote_rank in another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kaveri.engine.kv_plane import PlaneEvent
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import LogSettings

LostListener = Callable[[str], None]
"""Called at most once, with the reason, when the rank is lost. No event of it follows."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Setup of a rank. Plain values and a module-level function: it may be sent to another process."""

    listen: tuple[KvEndpoint, ...]
    """Addresses where it takes pushes, best first. Empty: none."""
    transports: "Callable[[], Sequence[Transport]] | None"
    """Makes the transports of KV, the preferred first; None for the socket transports."""
    epoch: int
    receiving: ReceiverOptions = ReceiverOptions()  # noqa: RUF009 - it is frozen
    copy_slots: int = 0
    """Staging slots for blocks that are copied to replicas."""
    rank: int = 0
    """Index of the rank among the engine's."""
    logs: LogSettings | None = None
    """Log settings of the engine's process, for a rank that has a process of its own."""


class PromptChunk(NamedTuple):
    """Tokens of one prompt that a step computes and whose KV is pushed."""

    engine_id: str
    token_count: int
    """Tokens of the whole prompt."""
    new_block_ids: tuple[int, ...]
    """Blocks that it was given for this step, after those that it has."""
    before: int
    """Tokens computed before the step, without those of the prefix cache."""
    computed: int
    """Tokens computed after the step, including those of the prefix cache."""


@dataclass(slots=True)
class StepOrders:
    """Orders of one step, the same for every rank."""

    chunks: Sequence[PromptChunk] = ()
    landed_block_ids: list[int] = field(default_factory=list)
    """Blocks that transfers have written, and that may be read from this step on."""
    released: list[str] = field(default_factory=list)
    """vLLM's ids of requests that have ended and whose blocks nothing touches any more."""
    completed_block_ids: list[int] = field(default_factory=list)
    """Blocks that the step completes and that are copied to replicas after it."""
    left_block_ids: list[int] = field(default_factory=list)
    """Blocks that no step computes any more, and that are copied to replicas."""


@dataclass(frozen=True, slots=True)
class GrantTicket:
    """Lease the ticket's blocks. Granted or TransferReleased follows."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class RevokeTicket:
    """Cancel a landing. TransferReleased follows, unless it has ended."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class BeginPush:
    """Push a prompt as it is computed. PushAccepted or PushFailed follows."""

    engine_id: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AbortPush:
    """Cancel a push. PushFailed follows, unless it has ended."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class PassFirstToken:
    """Add a prompt's first token to every push of it: the prompt is computed."""

    engine_id: str
    first_token_id: int


@dataclass(frozen=True, slots=True)
class ForgetPrompt:
    """Forget a prompt, which is not pushed any more."""

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
    """Finish the push of a replica, whose blocks are all written. PushAccepted or PushFailed follows."""

    transfer_id: bytes
    note: bytes


@dataclass(frozen=True, slots=True)
class AbortCopy:
    """Cancel the push of a replica. PushFailed follows, unless it has ended."""

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
    """A tensor-parallel rank. Every call but attach() and detach() returns without waiting."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the whole engine."""

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        """Make the rank's end of the data plane; return where it takes pushes. Raises ConfigError."""

    def detach(self) -> None:
        """End it, with all transfers. Idempotent; waits 10 s at most."""

    def do(self, call: RankCall) -> None:
        """Carry out a call. Its events go to the listener."""

    def flow(self) -> KvFlow:
        """Snapshot of the transfers, now or shortly before."""

    def shutdown(self) -> None:
        """Shut down a rank that is not needed any more. Idempotent."""
