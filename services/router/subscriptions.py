"""The stream from one instance to a router, and the attempts that depend on it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from grpc import aio

from kaveri.domain.view import InstanceRecord
from kaveri.errors import KaveriError, Unavailable
from kaveri.lives.request_values import Attempt, GivenUp, InstanceLife
from kaveri.timeouts import CONNECT_GRACE_S
from kaveri.v1 import feed_pb2, prefill_pb2, term_pb2
from services.router.requests import RequestEntry


@dataclass(slots=True, eq=False)
class Tie:
    """Dependency of an attempt (placement of a request) on the token stream of its decode instance."""

    entry: RequestEntry
    attempt: Attempt
    life: InstanceLife
    is_there: bool
    needs_attach: bool = False
    """True if the stream carries the attempt's tokens only after an Attach call by this router."""

    at_prefill = has_ended = False

    @property
    def number(self) -> int:
        return self.attempt.number

    @property
    def is_named(self) -> bool:
        """True if a new stream that names the request repeats the tokens lost on the former one."""
        return self.is_there and not (self.needs_attach and self.attempt.taken_over)

    def lose(self, error: KaveriError) -> None:
        self.entry.handle(GivenUp(self.number, self.life, error, has_ended=False), time.monotonic())


@dataclass(slots=True, eq=False)
class PromptTie:
    """Dependency of an attempt (placement of a request) on its prefill instance's stream, with the reports received."""

    entry: RequestEntry
    number: int
    """Attempt number."""
    record: InstanceRecord
    life: InstanceLife
    is_there: bool = False
    """True once the instance is known to have the request."""
    was_sent: bool = True
    """True if the instance may have received the request."""
    has_ended: bool = False
    """True if the request has ended there, or never arrived."""
    news: asyncio.Queue[prefill_pb2.PrefillReport | KaveriError | None] = field(default_factory=asyncio.Queue)
    """Reports in order, then an error that ends them; None wakes the reader, as the attempt may be over. Unbounded: an
    instance sends a handful per attempt."""

    at_prefill = True

    @property
    def is_named(self) -> bool:
        """True if a new stream that names the request repeats the reports lost on the former one."""
        return self.is_there

    def lose(self, error: KaveriError) -> None:
        self.news.put_nowait(error)


AnyTie = Tie | PromptTie


@dataclass(slots=True)
class OpenStream:
    """A Follow stream from an instance that has sent its first message."""

    call: aio.Call
    since_s: float
    """time.monotonic() at which it opened."""
    quiet: bool = False
    """True if the instance has no request of this router and sends nothing."""


class Subscription:
    """A router's stream from one instance, the instance's record, and the attempts that depend on the stream."""

    def __init__(self, instance_id: str, is_over: Callable[[InstanceLife], bool | None]) -> None:
        """is_over: returns True for an instance's process run that has left the cluster view."""
        self.instance_id = instance_id
        self._is_over = is_over
        self.record: InstanceRecord | None = None
        self.stream: OpenStream | None = None
        self.broken_s = 0.0
        """time.monotonic() at which the last stream broke."""
        self.ties: dict[tuple[RequestEntry, bool], AnyTie] = {}
        """By request and at_prefill, in order of placement, which is also the order of failure."""
        self.let_go_s = 0.0
        """time.monotonic() at which the instance last moved a request to another one."""
        self.fault = ""
        """Reason for which this router cancelled the stream; empty once another one is open."""
        self._task: asyncio.Task[None] | None = None

    def start(self, record: InstanceRecord, follow: Coroutine[None, None, None]) -> None:
        self.record = record
        for tie in tuple(self.ties.values()):
            self._check_life(tie)
        self._task = asyncio.create_task(follow, name=f"news of {self.instance_id}")

    def hand_over(self, successor: "Subscription", incarnation: int) -> None:
        """Pass the attempts that were placed on the restarted instance, run `incarnation`, to its new subscription."""
        for tie in tuple(self.ties.values()):
            if tie.life.incarnation == incarnation:
                del self.ties[tie.entry, tie.at_prefill]
                successor.tie(tie)

    def stop(self, reason: str) -> asyncio.Task[None] | None:
        """End the stream and fail its attempts. Returns the cancelled task that read the stream, if any."""
        if self._task is not None:
            self._task.cancel()
        self.stream = None
        lost, self.ties = self.ties, {}
        for tie in lost.values():
            tie.lose(Unavailable(f"{self._name(tie)} {reason}"))
        return self._task

    def break_off(self, fault: str) -> None:
        """Cancel the stream as broken. fault: the reason."""
        self.fault = fault
        if self.stream is not None:
            self.stream.call.cancel()

    def open(self) -> list[feed_pb2.FollowedRequest]:
        """List the requests to name in the Follow call of a new stream, which then continues them."""
        named = [tie for tie in self.ties.values() if self.is_of_life(tie) and tie.is_named]
        for tie in named:
            if isinstance(tie, Tie):
                tie.needs_attach = False
        return [
            feed_pb2.FollowedRequest(
                request_id=tie.entry.request_id,
                term=term_pb2.Term(session=tie.entry.accepted.session, attempt=tie.number),
                next_index=len(tie.entry.answer.token_ids),
                at_prefill=tie.at_prefill,
            )
            for tie in named
        ]

    def disconnect(self) -> None:
        """Record that the stream broke. Its attempts fail unless another one opens within CONNECT_GRACE_S."""
        self.stream, self.broken_s = None, time.monotonic()
        for tie in self.ties.values():
            self._limit_wait(tie)

    def tie(self, tie: AnyTie) -> None:
        if isinstance(tie, Tie):
            # Tokens may have been sent on a former stream.
            is_late = tie.attempt.taken_over or self.stream is None or self.stream.since_s >= tie.entry.begun_s
            tie.needs_attach = tie.is_there and is_late
        elif self.stream is not None:
            # The instance sends beats once it has the prompt, so silence counts from now on.
            self.stream.quiet = False
        self.ties[tie.entry, tie.at_prefill] = tie
        if self.record is not None and self._is_over(tie.life):
            self._check_life(tie)
        # A prefill instance may know a later life than this router's view.
        if not (self.stream and self.is_of_life(tie)):
            self._limit_wait(tie)

    def _limit_wait(self, tie: AnyTie) -> None:
        asyncio.get_running_loop().call_later(CONNECT_GRACE_S, self._check_connection, tie)

    def is_of_life(self, tie: AnyTie) -> bool:
        """True if the attempt was placed on the instance's process run that the cluster view names."""
        return self.record is not None and tie.life.incarnation == self.record.incarnation

    def _check_life(self, tie: AnyTie) -> None:
        if not self.is_of_life(tie):
            self.lose(tie, Unavailable(f"{self._name(tie)} has restarted since it took the request"))

    def _check_connection(self, tie: AnyTie) -> None:
        if not (self.stream and self.is_of_life(tie)):
            self.lose(tie, Unavailable(f"no stream from {self._name(tie)}"))

    def lose_all(self) -> None:
        for tie in tuple(self.ties.values()):
            self.lose(tie, Unavailable(f"{self._name(tie)} went silent: {self.fault}"))

    def lose(self, tie: AnyTie, error: KaveriError) -> None:
        if self.drop(tie):
            tie.lose(error)

    def drop(self, tie: AnyTie) -> bool:
        """Remove an attempt from the stream. Returns False if it is not registered."""
        key = tie.entry, tie.at_prefill
        if self.ties.get(key) is not tie:
            return False
        del self.ties[key]
        return True

    def _name(self, tie: AnyTie) -> str:
        return f"{'prefill' if tie.at_prefill else 'decode'} instance {self.instance_id}"
