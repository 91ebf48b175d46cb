"""What one router has at one decode instance: its token stream, and the attempts that need it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from grpc import aio

from kaveri.domain.view import InstanceRecord
from kaveri.errors import KaveriError, Unavailable
from kaveri.timeouts import CONNECT_GRACE_S
from kaveri.v1 import decode_pb2
from services.router.lifecycle_values import Attempt, DecodeLost, InstanceLife
from services.router.requests import RequestEntry


@dataclass(slots=True, eq=False)
class Tie:
    """An attempt that needs a token stream."""

    entry: RequestEntry
    attempt: Attempt
    decode: InstanceLife
    is_there: bool
    needs_attach: bool = False
    """Whether its tokens do not come on the stream by themselves."""

    def lose(self, error: KaveriError) -> None:
        self.entry.handle(DecodeLost(error), time.monotonic())


class Subscription:
    """One decode instance: its record once the view names it, its stream, the attempts placed there."""

    def __init__(self, instance_id: str, is_over: Callable[[InstanceLife], bool | None]) -> None:
        """is_over: True for a life that the view has named, and names no more."""
        self.instance_id = instance_id
        self._is_over = is_over
        self.record: InstanceRecord | None = None
        self.connected = False
        self.connected_s = 0.0
        """time.monotonic() when the last stream stood."""
        # Ordered: they are lost in the order in which they were placed.
        self.ties: dict[RequestEntry, Tie] = {}
        self.call: aio.Call | None = None
        """The stream, or the last one."""
        self.let_go_s = 0.0
        """time.monotonic() when the instance last let a request go to another one."""
        self.fault = ""
        """Why this router has broken off the stream; empty once there is another one."""
        self._task: asyncio.Task[None] | None = None

    def start(self, record: InstanceRecord, follow: Coroutine[None, None, None]) -> None:
        self.record = record
        for tie in tuple(self.ties.values()):
            self._check_life(tie)
        self._task = asyncio.create_task(follow, name=f"tokens of {self.instance_id}")

    def hand_over(self, successor: "Subscription", incarnation: int) -> None:
        """The attempts on the life that the view names from now on, where prefill has seen that first."""
        for tie in tuple(self.ties.values()):
            if tie.decode.incarnation == incarnation:
                del self.ties[tie.entry]
                successor.tie(tie)

    def stop(self, reason: str) -> asyncio.Task[None] | None:
        """Ends the stream and loses the attempts; returns the task that ends."""
        if self._task is not None:
            self._task.cancel()
        self.connected = False
        lost, self.ties = self.ties, {}
        for tie in lost.values():
            tie.lose(Unavailable(f"decode instance {self.instance_id} {reason}"))
        return self._task

    def break_off(self, fault: str) -> None:
        """Cancels the stream; its follower then treats it as broken."""
        assert self.call is not None
        self.fault = fault
        self.call.cancel()

    def open(self) -> list[decode_pb2.StreamedRequest]:
        """What a new stream has to go on with."""
        named = [
            tie
            for tie in self.ties.values()
            if tie.is_there and self.is_of_life(tie) and not (tie.needs_attach and tie.attempt.taken_over)
        ]
        for tie in named:
            tie.needs_attach = False
        return [
            decode_pb2.StreamedRequest(
                request_id=tie.entry.request_id,
                session=tie.entry.accepted.session,
                attempt=tie.attempt.number,
                next_index=len(tie.entry.answer.token_ids),
            )
            for tie in named
        ]

    def disconnect(self) -> None:
        """The stream broke. The attempts wait for another one."""
        if self.connected:
            self.connected = False
            for tie in self.ties.values():
                self._limit_wait(tie)

    def tie(self, tie: Tie) -> None:
        # The instance may have sent tokens over a former stream, as long as it did not know of this one.
        is_late = tie.attempt.taken_over or not self.connected or self.connected_s >= tie.entry.begun_s
        tie.needs_attach = tie.is_there and is_late
        self.ties[tie.entry] = tie
        if self.record is not None and self._is_over(tie.decode):
            self._check_life(tie)
        # A later life than the view's: prefill has seen it first. This router may be cut off from the cluster store.
        if not (self.connected and self.is_of_life(tie)):
            self._limit_wait(tie)

    def _limit_wait(self, tie: Tie) -> None:
        asyncio.get_running_loop().call_later(CONNECT_GRACE_S, self._check_connection, tie)

    def is_of_life(self, tie: Tie) -> bool:
        """Whether the attempt was placed on the life that the view names."""
        return self.record is not None and tie.decode.incarnation == self.record.incarnation

    def _check_life(self, tie: Tie) -> None:
        if not self.is_of_life(tie):
            # The tokens would come on no stream.
            self.lose(tie, Unavailable(f"decode instance {self.instance_id} has restarted since it reserved room"))

    def _check_connection(self, tie: Tie) -> None:
        if not (self.connected and self.is_of_life(tie)):
            self.lose(tie, Unavailable(f"no token stream from decode instance {self.instance_id}"))

    def lose_all(self) -> None:
        for tie in tuple(self.ties.values()):
            self.lose(tie, Unavailable(f"decode instance {self.instance_id} went silent: {self.fault}"))

    def lose(self, tie: Tie, error: KaveriError) -> None:
        if self.ties.get(tie.entry) is tie:
            del self.ties[tie.entry]
            tie.lose(error)
