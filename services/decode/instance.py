"""One decode instance at work: reserves, admits what has landed, passes tokens on, ends every request exactly once."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import InstanceLoad
from kaveri.engine.contract import (
    DecodeEngine,
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    Landed,
    LandingFailed,
    Preempted,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.errors import (
    EngineError,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    StaleAttempt,
    Unavailable,
)
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.decode_batch import DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom, RequestCounts
from kaveri.policy.growth import BatchMember
from kaveri.policy.placement import DEFAULT_THRESHOLDS, HeavyThresholds
from kaveri.policy.room_line import Place
from kaveri.telemetry.logs import get_logger
from services.decode import lifecycle
from services.decode.lifecycle import Asked, InLine, Ready, Released, Rival, Running
from services.decode.metrics import DecodeMetrics
from services.decode.requests import DecodeRequest, DecodeRequests, KnownAttempts
from services.decode.token_streams import TokenStreams

ROUTER_GRACE_S = 2.0
"""How long requests are kept for a router that has not opened its stream yet."""
_ATTEMPTS_REMEMBERED_S = 5.0
"""Longer than a Reserve can be on its way; not much longer, since a client may use a request id again."""
_ATTEMPTS_REMEMBERED_COUNT = 65_536
_LONGEST_REQUEST_S = 86_400.0
_LOOK_AGAIN_S = 0.002
"""Blocks of aborted requests come free without an event: while requests wait, free blocks are looked at this often."""


class DecodeInstance:
    """The PhaseService that decodes. For one event loop.

    It waits and sends. services.decode.lifecycle says what an event means for a request; kaveri.policy.decode_room says
    which request has room and a seat in the batch.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        policy: AdmissionPolicy,
        max_batch: int,
        reservation_ttl_s: float,
        metrics: DecodeMetrics,
        range_end: RangeEnd = RangeEnd.LOW,
        thresholds: HeavyThresholds = DEFAULT_THRESHOLDS,
        serials: Iterator[int] | None = None,
    ) -> None:
        """reservation_ttl_s: seconds that a reservation waits for its KV, at most.

        range_end: which end of a predicted length the policy counts on. thresholds: which requests its load calls
        heavy. serials: numbers that no one else gives to requests of this engine; None: from 1.
        """
        self._engine = engine
        self._range_end = range_end
        self._thresholds = thresholds
        self._reservation_ttl_s = reservation_ttl_s
        self._metrics = metrics
        block_tokens = engine.info.layout.block_tokens
        self._room = DecodeRoom(engine.info.total_blocks, block_tokens, DecodeBatch(policy, block_tokens, max_batch))
        self._requests = DecodeRequests()
        self._attempts = KnownAttempts(_ATTEMPTS_REMEMBERED_S, _ATTEMPTS_REMEMBERED_COUNT)
        self.streams = TokenStreams(ROUTER_GRACE_S, self._router_gone)
        self._serials = itertools.count(1) if serials is None else serials
        # Read by the threads that serve metrics.
        metrics.in_line.set_function(lambda: self._room.line.length)
        self._look_again: asyncio.TimerHandle | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Nothing to do beside the events."""

    async def reserve(
        self,
        request_id: str,
        attempt: int,
        router_id: str,
        token_ids: tuple[int, ...],
        generated_count: int,
        params: SamplingParams,
        timeout_s: float,
        layout: KvLayout,
        predicted_length: TokenRange | None = None,
        waits: bool = False,
        reservation: int = 0,
    ) -> Ticket:
        """Reserves room. With `waits` a request without room waits in line until it has room; otherwise it is refused.

        An older reservation of the same request, or of the same attempt, is ended first, waiting or not; and so is a
        request of another router with the same id. A newer attempt takes over the place in line of an older one.
        reservation: the number of this call within the attempt; an earlier call that comes late is stale.

        timeout_s: what is left of the request's time; when it is over the request ends here. Raises Unavailable
        (draining, also while it waits), LayoutMismatch, StaleAttempt, NoCapacity, InvalidArgument (can never fit),
        RequestAlreadyExists (another router's request has replaced it while it waited), DeadlineExceeded, and
        RequestCancelled when it was aborted meanwhile. Cancelled, it leaves nothing reserved, and no place in line.
        """
        if self._draining:
            raise _draining()
        info = self._engine.info
        info.layout.require_mappable(layout)
        engine_request = EngineRequest(EngineKey(request_id, next(self._serials)), token_ids, generated_count, params)
        # Before it can get a place in line: it would wait there forever.
        info.require_servable(engine_request)
        needed_blocks = self._room.needed_blocks(len(token_ids))
        place = self._end_former(request_id, attempt, router_id, reservation)
        request = self._open(engine_request, attempt, router_id, timeout_s, predicted_length, InLine(waits))
        request.reservation, request.source = reservation, layout
        answer = request.answer = asyncio.get_running_loop().create_future()
        self._room.line.join(request_id, needed_blocks, len(token_ids), place)
        self._give_room()
        if isinstance(request.state, InLine) and (not waits or self._room.line.is_over_limit()):
            refusal = self._room.refusal(self._free_room(), time.monotonic())
            self._take(request, lifecycle.TurnedAway(refusal))
        try:
            ticket: Ticket = await answer
        except asyncio.CancelledError:
            self._take(request, lifecycle.CallEnded())
            raise
        return ticket

    def adopt(
        self,
        engine_request: EngineRequest,
        attempt: int,
        router_id: str,
        timeout_s: float,
        predicted_length: TokenRange | None = None,
    ) -> None:
        """Takes on a request that this very engine has prefilled: it has landed, and waits for its admission.

        As reserve(), but there is nothing to reserve, and it is taken while draining too: it came in before. Raises
        StaleAttempt, and Unavailable when the engine has stopped.
        """
        self._end_former(engine_request.key.request_id, attempt, router_id)
        request = self._open(engine_request, attempt, router_id, timeout_s, predicted_length, InLine(stays=False))
        self._take(request, lifecycle.RoomAsked())
        try:
            self._engine.adopt(engine_request.key)
        except EngineError as error:
            self._take(request, lifecycle.RoomRefused(error))
            raise Unavailable(str(error)) from error
        self._take(request, lifecycle.AdoptedHere())

    def abort(self, request_id: str, attempt: int, router_id: str, by_router: bool, reservation: int = 0) -> None:
        """Ends the router's request if the attempt that is here is `attempt` or older. Unknown ones are ignored, and
        so is a later reservation of the same attempt than `reservation`. 0: any.

        by_router: whether the router itself asks. When a prefill instance ends a request that has landed, the router
        gets an error: it may wait for nothing but this instance's tokens by then.
        """
        request = self._requests.by_request_id(request_id)
        if request is None or request.attempt > attempt or request.router_id != router_id:
            return
        if request.attempt == attempt and 0 < reservation < request.reservation:
            # Room was given back, and asked for again before this came.
            return
        self._take(request, lifecycle.AbortAsked(by_router))

    def handle(self, events: Sequence[EngineEvent]) -> None:
        landed: list[DecodeRequest] = []
        for event in events:
            if isinstance(event, StepTokens):
                self._step(event.steps)
            # Aborted requests may still be spoken of.
            elif not isinstance(event, EngineStopped) and (request := self._requests.by_key(event.key)) is not None:
                match event:
                    case Landed():
                        self._take(request, lifecycle.KvLanded(event.kv_bytes))
                        landed.append(request)
                    case LandingFailed():
                        self._take(request, lifecycle.KvNotLanded(event.reason))
                    case Preempted():
                        self._take(request, lifecycle.BlocksLost())
                    case RequestFailed():
                        self._take(request, lifecycle.Broken(event.reason))
        self._admit()
        for request in landed:
            if isinstance(request.state, Ready):
                self.streams.announce(request)
        self._give_room()
        self.streams.flush()

    def load(self) -> InstanceLoad:
        placed = [request for request in self._requests if not isinstance(request.state, InLine)]
        heavy_count = sum(request.heavy for request in placed)
        counts = RequestCounts(len(self._requests), heavy_count, len(placed) - heavy_count)
        return self._room.load(self._free_room(), self._engine.stats().context_tokens, counts, time.monotonic())

    def kept_blocks(self, coming: tuple[EngineRequest, TokenRange | None] | None = None) -> int:
        """Free blocks that the policy keeps for what is here; nothing new may take them.

        coming: the request that will be adopted next, with its predicted length.
        """
        member = self._member(*coming) if coming is not None else None
        return self._room.batch.kept_blocks(time.monotonic(), member)

    def drain(self) -> None:
        self._draining = True
        for request in list(self._requests):
            if isinstance(request.state, InLine):
                self._take(request, lifecycle.TurnedAway(_draining()))

    def resume(self) -> None:
        self._draining = False

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        # What the streams have not sent yet they send when they are closed.
        await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        for request in list(self._requests):
            self._take(request, lifecycle.Broken(reason))
        self.streams.close_all()

    def _step(self, steps: Sequence[TokenStep]) -> None:
        now_s = time.monotonic()
        drawn: set[int] = set()
        for step in steps:
            # Aborted requests may still be spoken of.
            request = self._requests.by_key(step.key)
            if request is None:
                continue
            drawn.add(step.key.serial)
            request.state, actions = lifecycle.step(request.state, lifecycle.Drew(step.finish is not None), now_s)
            if not actions:
                self.streams.gain(request, step, None)
                continue
            (report,) = actions
            assert isinstance(report, lifecycle.Report)
            self.streams.gain(request, step, report.times)
            self._remove(request)
            self._report(request, report, now_s)
        self._room.batch.step(drawn)
        self._metrics.count_step(len(steps), now_s, self._room.batch.running_count)

    def _end_former(self, request_id: str, attempt: int, router_id: str, reservation: int = 0) -> Place | None:
        """Ends what is here of the request, unless that is newer: then raises StaleAttempt.

        Returns the place in line that an older attempt of the same router had.
        """
        former = self._requests.by_request_id(request_id)
        same_router = former is not None and former.router_id == router_id
        is_late = former is not None and attempt == former.attempt and 0 < reservation < former.reservation
        if former is not None and same_router and (attempt < former.attempt or is_late):
            raise StaleAttempt(request_id, attempt, former.attempt)
        self._attempts.note(router_id, request_id, attempt, time.monotonic())
        if former is None:
            return None
        place = self._room.line.leave(request_id)
        if not same_router:
            self._take(former, lifecycle.RivalCame(Rival.OTHER_ROUTER, RequestAlreadyExists(request_id)))
            return None
        rival = Rival.NEWER_ATTEMPT if former.attempt < attempt else Rival.SAME_ATTEMPT
        self._take(former, lifecycle.RivalCame(rival, StaleAttempt(request_id, former.attempt, attempt)))
        return place

    def _open(
        self,
        engine_request: EngineRequest,
        attempt: int,
        router_id: str,
        timeout_s: float,
        predicted: TokenRange | None,
        state: InLine,
    ) -> DecodeRequest:
        now_s, timeout_s = time.monotonic(), min(timeout_s, _LONGEST_REQUEST_S)
        request = DecodeRequest(
            engine_request=engine_request,
            attempt=attempt,
            router_id=router_id,
            came_s=now_s,
            expires_s=now_s + timeout_s,
            member=self._member(engine_request, predicted),
            state=state,
            heavy=self._thresholds.is_heavy(predicted, _prompt_tokens(engine_request)),
        )
        loop = asyncio.get_running_loop()
        request.deadline = loop.call_later(timeout_s, self._take, request, lifecycle.TimeOver())
        self._requests.add(request)
        self._idle.clear()
        return request

    def _member(self, request: EngineRequest, predicted: TokenRange | None) -> BatchMember:
        max_model_len = self._engine.info.max_model_len
        expected = expected_answer(predicted, _prompt_tokens(request), request.params.max_tokens, max_model_len)
        return member_of(len(request.token_ids), request.generated_count, expected, self._range_end)

    def _free_room(self) -> FreeRoom:
        quarantined_blocks = self._engine.kv_flow().receiving.quarantined_block_count
        stats = self._engine.stats()
        return FreeRoom(stats.free_blocks, quarantined_blocks, stats.running_requests)

    def _give_room(self) -> None:
        """Asks the engine for room for the requests in line that there is room for."""
        line = self._room.line
        while line.length:
            request_id = self._room.next_to_ask(self._free_room(), time.monotonic())
            if request_id is None:
                break
            request = self._requests.by_request_id(request_id)
            assert request is not None, request_id
            self._ask(request)
            if isinstance(request.state, InLine):
                break  # the engine keeps its free blocks for preempted requests
        if line.length and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._give_room()

    def _ask(self, request: DecodeRequest) -> None:
        left_s = request.expires_s - time.monotonic()
        if left_s <= 0:
            self._take(request, lifecycle.TimeOver())
            return
        self._room.line.asked(request.request_id)
        self._take(request, lifecycle.RoomAsked())
        expires_in_s = min(left_s, self._reservation_ttl_s)
        granting = self._engine.reserve(request.engine_request, expires_in_s, request.source)
        if granting.done():
            self._answered(request, granting)
        else:
            asyncio.wrap_future(granting).add_done_callback(partial(self._answered, request))

    def _answered(self, request: DecodeRequest, granting: "Future[Ticket] | asyncio.Future[Ticket]") -> None:
        """The engine has granted or refused the room of a request that may have ended meanwhile."""
        error = granting.exception()
        if isinstance(request.state, Released):
            if error is None:
                self._engine.abort(request.key)
        elif error is None:
            self._take(request, lifecycle.RoomGranted(granting.result()))
        else:
            known = error if isinstance(error, KaveriError) else EngineError(repr(error))
            if self._draining and isinstance(known, NoCapacity):
                # drain() has sent away those in line while this one was not in line. None may join it again.
                known = _draining()
            self._take(request, lifecycle.RoomRefused(known))

    def _admit(self) -> None:
        if not self._room.batch.ready_count:
            return
        for serial in self._room.batch.admissible(self._engine.stats().free_blocks):
            request = self._requests.by_serial(serial)
            try:
                self._engine.admit(request.key)
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            self._take(request, lifecycle.SeatTaken())

    def _router_gone(self, router_id: str) -> None:
        for request in self._requests.of_router(router_id):
            self._take(request, lifecycle.RouterLost())

    def _take(self, request: DecodeRequest, event: lifecycle.Event) -> None:
        """Something has happened to the request. Nothing happens to one that has ended."""
        former = request.state
        if isinstance(former, Released):
            return
        now_s = time.monotonic()
        request.state, actions = lifecycle.step(former, event, now_s)
        self._follow(request, former, now_s)
        for action in actions:
            self._act(request, action, now_s)

    def _follow(self, request: DecodeRequest, former: lifecycle.State, now_s: float) -> None:
        """Table and batch follow the request's state."""
        batch, serial = self._room.batch, request.key.serial
        match request.state:
            case Asked():
                batch.expect(serial, request.member, now_s)
                self.streams.expect(request.router_id)
            case InLine() if isinstance(former, Asked):
                batch.leave(serial)
            case Ready() if not isinstance(former, Ready):
                batch.land(serial)
            case Running() if isinstance(former, Ready):
                batch.admit(serial)
            case Ready() | Running():
                batch.preempt(serial)
            case Released():
                self._remove(request)
                # Its seat may be what a ready request waits for, its blocks or its place what a waiting one does.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._admit)
                loop.call_soon(self._give_room)

    def _remove(self, request: DecodeRequest) -> None:
        self._room.batch.leave(request.key.serial)
        self._requests.remove(request)
        if request.deadline is not None:
            request.deadline.cancel()
        if not len(self._requests):
            self._idle.set()

    def _act(self, request: DecodeRequest, action: lifecycle.Action, now_s: float) -> None:
        match action:
            case lifecycle.Answer(result):
                self._answer(request, result)
            case lifecycle.LeaveLine():
                self._room.line.leave(request.request_id)
            case lifecycle.KeepPlace():
                self._room.line.refused(request.request_id)
            case lifecycle.AbortInEngine():
                self._engine.abort(request.key)
            case lifecycle.TellRouter(error, replaced):
                self.streams.fail(request, error, replaced)
            case lifecycle.DropTokens():
                self.streams.drop(request)
            case lifecycle.CountLanding(kv_bytes, landing_s):
                self._metrics.received_bytes.inc(kv_bytes)
                self._metrics.landing_seconds.observe(landing_s)
            case lifecycle.CountPreemption():
                self._metrics.preemptions.inc()
            case lifecycle.Report():
                self._report(request, action, now_s)

    def _answer(self, request: DecodeRequest, result: Ticket | KaveriError | None) -> None:
        answer = request.answer
        if answer is None or answer.done():
            return
        if isinstance(result, Ticket):
            answer.set_result(result)
        else:
            answer.set_exception(result or RequestCancelled(request.request_id))

    def _report(self, request: DecodeRequest, report: lifecycle.Report, now_s: float) -> None:
        self._metrics.count_end(report)
        get_logger().info(
            "request_ended",
            request_id=request.request_id,
            attempt=request.attempt,
            outcome=report.outcome.value,
            reason=report.reason,
            prompt_tokens=len(request.engine_request.token_ids),
            preemptions=report.preemptions,
            seconds=round(now_s - request.came_s, 6),
        )


def _draining() -> Unavailable:
    return Unavailable("the decode instance is draining", retry_after_s=1.0)


def _prompt_tokens(request: EngineRequest) -> int:
    return len(request.token_ids) - request.generated_count
