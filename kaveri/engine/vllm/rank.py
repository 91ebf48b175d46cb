"""A tensor-parallel rank, as the engine sees it: one that is in its own process, or in another (remote_rank)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kaveri.engine.kv_plane import PlaneEvent
from kaveri.engine.vllm.rank_plane import RankPlane, RankSetup
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket

if TYPE_CHECKING:
    from kaveri.engine.vllm.connector_worker import WorkerSide

RankListener = Callable[[PlaneEvent], None]
LostListener = Callable[[str], None]
"""Called at most once, with the reason: the rank is gone, and nothing more is heard of it."""


class Rank(Protocol):
    """Every call but attach() and detach() returns without waiting, and what comes of it is heard by the listener."""

    @property
    def layout(self) -> KvLayout:
        """Of the whole engine."""

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        """Makes the rank's end of the data plane; returns where it takes pushes. Raises ConfigError."""

    def detach(self) -> None:
        """Ends it, with all transfers. Idempotent; waits 10 s at most."""

    def grant(self, ticket: Ticket) -> None:
        """See RankPlane."""

    def revoke(self, transfer_id: bytes) -> None:
        """See RankPlane."""

    def open_push(self, number: str, ticket: Ticket) -> None:
        """See RankPlane."""

    def abort_push(self, transfer_id: bytes) -> None:
        """See RankPlane."""

    def hand_over(self, number: str, first_token_id: int) -> None:
        """See RankPlane."""

    def forget(self, number: str) -> None:
        """See RankPlane."""

    def flow(self) -> KvFlow:
        """What is under way, now or a little while ago."""

    def shutdown(self) -> None:
        """The rank is not needed any more. Idempotent."""


class LocalRank:
    """The one rank of an engine that computes in its own process. Calls to a rank that is not attached do nothing."""

    def __init__(self, worker_side: "WorkerSide") -> None:
        self._worker_side = worker_side

    @property
    def layout(self) -> KvLayout:
        return self._worker_side.layout

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        plane = self._worker_side.plane = RankPlane(self._worker_side.pool, setup, listener)
        return plane.endpoints

    def detach(self) -> None:
        plane, self._worker_side.plane = self._worker_side.plane, None
        if plane is not None:
            plane.close()

    def grant(self, ticket: Ticket) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.grant(ticket)

    def revoke(self, transfer_id: bytes) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.revoke(transfer_id)

    def open_push(self, number: str, ticket: Ticket) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.open_push(number, ticket)

    def abort_push(self, transfer_id: bytes) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.abort_push(transfer_id)

    def hand_over(self, number: str, first_token_id: int) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.hand_over(number, first_token_id)

    def forget(self, number: str) -> None:
        if (plane := self._worker_side.plane) is not None:
            plane.forget(number)

    def flow(self) -> KvFlow:
        plane = self._worker_side.plane
        return plane.flow() if plane is not None else KvFlow()

    def shutdown(self) -> None:
        self.detach()
