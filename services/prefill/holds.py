"""The holds of one prefill instance: computed prompts whose KV stays in the pool until a decode instance asks for it.

A hold is a HandOver that waits to be asked. Its request is one of the PrefillRole's like all others.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.sampling import Logprobs
from kaveri.engine.contract import KvPushFailed, PrefillEngine
from kaveri.errors import EngineError, InvalidArgument, NoCapacity, RequestNotFound, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.telemetry.logs import get_logger
from services.prefill.hold_lifecycle import (
    AnswerPush,
    CallerAborted,
    EndRequest,
    ForgetHold,
    HeldHere,
    HoldEnded,
    HoldEvent,
    HoldOutcome,
    HoldState,
    LeaseOver,
    PushAsked,
    PushBroke,
    PushingHeld,
    PushLeft,
    ReleaseAsked,
    RequestOver,
    busy,
    gone,
    step_hold,
)
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import HoldOver, PrefillRequest, RoomReserved

HOLD_ID_BYTES = 16
_RETRY_AFTER_S = 0.5
"""What callers are asked to wait while the share for holds is used."""
_ENDED_COUNT = 4096
"""Ended holds of which it is known how they ended."""


class HoldName(NamedTuple):
    """Names one hold of one life of a prefill instance."""

    incarnation: int
    hold_id: bytes
    """Random, of HOLD_ID_BYTES."""


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """What a decode instance must know of a hold."""

    first_token: tuple[int, Logprobs | None]
    layout: KvLayout
    expires_in_s: float


@dataclass(eq=False, slots=True)
class _Hold:
    name: HoldName
    request: PrefillRequest
    state: HoldState
    lease: asyncio.TimerHandle
    pushed: asyncio.Future[None] | None = None
    """What the push that is under way waits for."""


class Holds:
    """The HandOver of requests that are held. For one event loop."""

    at_first_token = True

    def __init__(
        self,
        engine: PrefillEngine,
        incarnation: int,
        ttl_s: float,
        share: float,
        max_line: int,
        metrics: PrefillMetrics,
    ) -> None:
        """ttl_s: seconds that a hold lasts without a push. share: of the pool's blocks that holds may have. max_line:
        prompts that may wait for a part of it."""
        self._engine = engine
        self._incarnation = incarnation
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._max_blocks = int(engine.info.total_blocks * share)
        self._max_line = max_line
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Blocks that prompts wait for, the first one first."""
        self._claimed_blocks = 0
        """Of prompts that are to be held and are not computed yet."""
        self._by_id: dict[bytes, _Hold] = {}
        self._by_request: dict[PrefillRequest, _Hold] = {}
        self._ended: OrderedDict[bytes, tuple[str, HoldOutcome]] = OrderedDict()
        """Request id and outcome of the last holds that have ended."""
        # Read by the thread that serves metrics.
        metrics.holds.set_function(lambda: len(self._by_id))
        metrics.hold_blocks.set_function(self._used_blocks)
        metrics.hold_line.set_function(lambda: len(self._line))

    async def run(self) -> None:
        """No background work."""

    @contextlib.asynccontextmanager
    async def claimed(self, token_count: int) -> AsyncIterator[None]:
        """Within it, blocks of the share are kept for a prompt of so many tokens: until begin() has made a hold of it.
        Waits in line for them.

        Raises NoCapacity when the line is full, and InvalidArgument when the prompt is larger than the share.
        """
        layout = self._engine.info.layout
        blocks = layout.block_count(token_count)
        if blocks > self._max_blocks:
            most = self._max_blocks * layout.block_tokens
            limit = f"at most {most} tokens, the share of the KV pool for holds (--hold-share)"
            raise InvalidArgument("prompt", f"{token_count} tokens", limit)
        if self._line or self._used_blocks() + blocks > self._max_blocks:
            await self._wait_in_line(blocks)
        else:
            self._claimed_blocks += blocks
        try:
            yield
        finally:
            self._claimed_blocks -= blocks
            self._give()

    async def _wait_in_line(self, blocks: int) -> None:
        """Claims the blocks. Cancelled, it leaves the line."""
        if len(self._line) >= self._max_line:
            reason = f"{self._max_line} prompts wait for a part of the KV pool's share for holds (--hold-share)"
            raise NoCapacity("prefill", _RETRY_AFTER_S, reason)
        waiting = (blocks, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
            else:
                self._claimed_blocks -= blocks
            self._give()
            raise

    def _give(self) -> None:
        """Claims blocks for those in line, in order."""
        while self._line and self._used_blocks() + self._line[0][0] <= self._max_blocks:
            blocks, turn = self._line.popleft()
            self._claimed_blocks += blocks
            turn.set_result(None)

    def name_of(self, request: PrefillRequest) -> HoldName | None:
        """The hold of a request. None: its first token has ended it, or it is not computed yet."""
        hold = self._by_request.get(request)
        return None if hold is None else hold.name

    def resolve(self, name: HoldName, token_ids: tuple[int, ...]) -> HeldPrompt:
        """Raises RequestNotFound and RequestCancelled, saying why it is not here, and InvalidArgument when it is a hold
        of another prompt."""
        hold = self._find(name)
        if token_ids != hold.request.engine_request.token_ids:
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", "the prompt that the hold was made for")
        assert isinstance(hold.state, HeldHere | PushingHeld)
        first = hold.request.outbox.first_token
        assert first is not None
        layout, left_s = self._engine.info.layout, max(0.0, hold.state.expires_s - time.monotonic())
        return HeldPrompt((first.token_id, first.logprobs), layout, left_s)

    async def push(self, name: HoldName, ticket: Ticket, placed: RoomReserved) -> None:
        """Pushes the hold's KV and returns when the receiver has accepted it; the hold has ended then.

        placed: who has granted the ticket. Raises RequestNotFound and RequestCancelled as resolve(), and when the hold
        ends meanwhile; RequestAlreadyExists while it is being pushed; InvalidArgument and LayoutMismatch when the
        ticket does not fit; Unavailable when the push failed: the hold stays then. Cancelled, it gives the hold up.
        """
        hold = self._find(name)
        request = hold.request
        if isinstance(hold.state, PushingHeld):
            raise busy(request.request_id)
        if ticket.token_count != request.token_count:
            raise InvalidArgument("ticket.token_count", ticket.token_count, f"{request.token_count}, those of the hold")
        try:
            self._engine.push_to(request.key, ticket)
        except EngineError as error:
            raise Unavailable(str(error)) from error
        pushed = hold.pushed = asyncio.get_running_loop().create_future()
        self._happened(hold, PushAsked())
        request.report(request, placed)
        try:
            await pushed
        except asyncio.CancelledError:
            # One that has just ended, and whose caller has not heard of it yet, is not left: the next may be under way.
            if hold.pushed is pushed:
                self._happened(hold, PushLeft())
            raise

    def release(self, name: HoldName) -> None:
        """Ends the hold and frees its KV, unless it is being pushed. Unknown ones are ignored."""
        hold = self._by_id.get(name.hold_id)
        if hold is not None and hold.name == name:
            self._happened(hold, ReleaseAsked())

    def abort_request(self, request_id: str) -> None:
        """Ends the hold that was made for the request with this id, if there is one: its caller wants no answer."""
        for request, hold in list(self._by_request.items()):
            if request.request_id == request_id:
                self._happened(hold, CallerAborted())

    def begin(self, request: PrefillRequest) -> None:
        """The request's first token is drawn: it is held from now on."""
        name = HoldName(self._incarnation, secrets.token_bytes(HOLD_ID_BYTES))
        expires_s = time.monotonic() + self._ttl_s
        lease = asyncio.get_running_loop().call_later(self._ttl_s, self._lease_over, name)
        self._by_id[name.hold_id] = self._by_request[request] = _Hold(name, request, HeldHere(expires_s), lease)

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        hold = self._by_request.get(request)
        if hold is not None:
            self._happened(hold, PushBroke(event.reason))

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        hold = self._by_request.get(request)
        if hold is not None:
            self._happened(hold, RequestOver(handed_over))

    def _lease_over(self, name: HoldName) -> None:
        hold = self._by_id.get(name.hold_id)
        if hold is not None:
            self._happened(hold, LeaseOver())

    def _find(self, name: HoldName) -> _Hold:
        hold = self._by_id.get(name.hold_id)
        if hold is not None and hold.name == name:
            return hold
        shown = f"hold {name.hold_id.hex()[:8]}"
        if name.incarnation != self._incarnation:
            raise RequestNotFound(shown, "it was held in a former life of this instance")
        if (ended := self._ended.get(name.hold_id)) is not None:
            raise gone(*ended)
        raise RequestNotFound(shown, "unknown, or it ended long ago")

    def _happened(self, hold: _Hold, event: HoldEvent) -> None:
        """The only way in which a hold's state changes. Ended holds are ignored."""
        if isinstance(hold.state, HoldEnded):
            return
        request = hold.request
        hold.state, actions = step_hold(hold.state, event, time.monotonic(), request.request_id)
        if isinstance(hold.state, HoldEnded):
            hold.lease.cancel()
            del self._by_id[hold.name.hold_id], self._by_request[request]
            self._give()
        for action in actions:
            match action:
                case AnswerPush(error):
                    self._answer(hold, error)
                case EndRequest():
                    request.report(request, HoldOver())
                case ForgetHold(outcome):
                    self._ended[hold.name.hold_id] = (request.request_id, outcome)
                    if len(self._ended) > _ENDED_COUNT:
                        self._ended.popitem(last=False)
                    self._metrics.hold_ends.labels(outcome).inc()
                    get_logger().info("hold_ended", request_id=request.request_id, outcome=outcome)

    def _answer(self, hold: _Hold, error: Exception | None) -> None:
        pushed, hold.pushed = hold.pushed, None
        if pushed is None or pushed.done():
            return
        if error is None:
            pushed.set_result(None)
        else:
            pushed.set_exception(error)

    def _used_blocks(self) -> int:
        layout = self._engine.info.layout
        held = sum(layout.block_count(request.token_count) for request in list(self._by_request))
        return self._claimed_blocks + held
