"""Interface to a tensor-parallel rank of the engine, in this process (rank_plane) or another (remote_rank)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kaveri.engine.kv_plane import PlaneEvent
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import LogSettings

LostListener = Callable[[str], None]
"""Called at most once, with the reason, when the rank is lost. No event of the rank follows."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """KV transfer settings of a tensor-parallel rank. Picklable, for ranks in their own process."""

    listen: tuple[KvEndpoint, ...]
    """Listening addresses for incoming KV, best first; empty for none."""
    transports: "Callable[[], Sequence[Transport]] | None"
    """Returns the KV transports, in order of preference; None for the socket transports."""
    epoch: int
    receiving: ReceiverOptions = ReceiverOptions()  # noqa: RUF009 - it is frozen
    copy_slots: int = 0
    """Number of staging slots for blocks copied to replicas."""
    rank: int = 0
    """Index of the rank within the engine."""
    logs: LogSettings | None = None
    """Log settings of the engine's process, for a rank in its own process."""


class PromptChunk(NamedTuple):
    """Tokens of one prompt that a step computes and whose KV is pushed."""

    engine_id: str
    token_count: int
    """Number of tokens of the whole prompt."""
    new_block_ids: tuple[int, ...]
    """Blocks added for this step, after earlier ones."""
    before: int
    """Tokens computed before the step, without those of the prefix cache."""
    computed: int
    """Tokens computed after the step, including those of the prefix cache."""


@dataclass(slots=True)
class StepOrders:
    """What the ranks do with KV blocks in one step of vLLM; the same for every rank."""

    chunks: Sequence[PromptChunk] = ()
    landed_block_ids: list[int] = field(default_factory=list)
    """Blocks written by transfers and readable from this step on."""
    released: list[str] = field(default_factory=list)
    """Ids in vLLM of ended requests whose blocks no transfer touches any more."""
    completed_block_ids: list[int] = field(default_factory=list)
    """Blocks that the step fills, to be copied to replicas afterwards."""
    left_block_ids: list[int] = field(default_factory=list)
    """Blocks of requests that are computed no more, to be copied to replicas."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call to a tensor-parallel rank; its events follow. Methods and their arguments:

        grant(ticket): lease the blocks. Granted or TransferReleased follows.
        revoke(transfer_id): cancel an incoming transfer. TransferReleased follows, unless it has ended.
        open_push(engine_id, ticket): push a prompt during its computation. PushAccepted or PushFailed follows.
        abort_push(transfer_id): cancel a push. PushFailed follows, unless it has ended.
        hand_over(engine_id, first_token_id): add a computed prompt's first token to every push of that prompt.
        forget(engine_id): drop a prompt that has ended.
        stage(serial, block_id, slot): copy a block of the pool to a staging slot. BlockStaged follows.

    Others are methods of the PushSender that pushes replicas from the staging slots.
    """

    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockStaged:
    serial: int


RankEvent = PlaneEvent | BlockStaged
RankListener = Callable[[RankEvent], None]
"""Called on any thread, also within do()."""


class Rank(Protocol):
    """A tensor-parallel rank of the engine, as far as KV is concerned. Only attach() and detach() may block."""

    @property
    def layout(self) -> KvLayout:
        """KV layout of the whole engine."""

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        """Start the rank's KV transfers; return its listening addresses for pushes. Raises ConfigError."""

    def detach(self) -> None:
        """End all transfers of the rank. Idempotent; waits at most 10 s."""

    def do(self, call: RankCall) -> None:
        """Carry out a call. Its events go to the listener."""

    def flow(self) -> KvFlow:
        """Return a recent snapshot of the rank's KV transfers."""

    def shutdown(self) -> None:
        """End a rank that is no longer needed. Idempotent."""
