"""One decode instance at work: reserves, admits what has landed, passes tokens on, ends every request exactly once."""

import asyncio
import itertools
import time
from collections.abc import Sequence
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
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    StaleAttempt,
    Unavailable,
)
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.admission import (
    AdmissionPolicy,
    DecodeSnapshot,
    LandedRequest,
    RunningRequest,
    choose_admitted,
    kept_blocks,
)
from kaveri.policy.placement import DEFAULT_THRESHOLDS, HeavyThresholds
from kaveri.policy.room_line import Place, RoomLine
from kaveri.telemetry.logs import get_logger
from services.decode.metrics import DecodeMetrics
from services.decode.requests import DecodeRequest, DecodeRequests, KnownAttempts, Phase
from services.decode.token_streams import RequestTimes, TokenStreams

ROUTER_GRACE_S = 2.0
"""How long requests are kept for a router that has not opened its stream yet."""
_ATTEMPTS_REMEMBERED_S = 5.0
"""Longer than a Reserve can be on its way; not much longer, since a client may use a request id again."""
_ATTEMPTS_REMEMBERED_COUNT = 65_536
_LONGEST_REQUEST_S = 86_400.0
_RETRY_AFTER_S = 0.1
_UNLANDED_KEEPS_S = 2.0
"""How long blocks are kept for the growth of an answer whose KV has not landed: longer than most pushes take."""
_LOOK_AGAIN_S = 0.002
"""Blocks of aborted requests come free without an event: while requests wait, free blocks are looked at this often."""


class DecodeInstance:
    """The EngineRole of a decode instance. For one event loop."""

    def __init__(
        self,
        engine: DecodeEngine,
        policy: AdmissionPolicy,
        max_batch: int,
        reservation_ttl_s: float,
        metrics: DecodeMetrics,
        range_end: RangeEnd = RangeEnd.LOW,
        thresholds: HeavyThresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        """reservation_ttl_s: seconds that a reservation waits for its KV, at most.

        range_end: which end of a predicted length the policy counts on. thresholds: which requests its load calls
        heavy.
        """
        self._engine = engine
        self._info = engine.info
        self._policy = policy
        self._range_end = range_end
        self._thresholds = thresholds
        self._max_batch = max_batch
        self._reservation_ttl_s = reservation_ttl_s
        self._metrics = metrics
        self._requests = DecodeRequests()
        self._attempts = KnownAttempts(_ATTEMPTS_REMEMBERED_S, _ATTEMPTS_REMEMBERED_COUNT)
        self.streams = TokenStreams(ROUTER_GRACE_S, self._router_gone)
        self._serials = itertools.count(1)
        self._landing_numbers = itertools.count(1)
        self._landed: dict[int, DecodeRequest] = {}
        self._running_count = 0
        self._line = RoomLine()
        # Read by the threads that serve metrics.
        metrics.in_line.set_function(lambda: self._line.length)
        self._look_again: asyncio.TimerHandle | None = None
        self._last_step_s: float | None = None
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
    ) -> Ticket:
        """Reserves room. With `waits` a request without room waits in line until it has room; otherwise it is refused.

        An older reservation of the same request, or of the same attempt, is ended first, waiting or not; and so is a
        request of another router with the same id. A newer attempt takes over the place in line of an older one.

        timeout_s: what is left of the request's time; when it is over the request ends here. Raises Unavailable
        (draining, also while it waits), LayoutMismatch, StaleAttempt, NoCapacity, InvalidArgument (can never fit),
        RequestAlreadyExists (another router's request has replaced it while it waited), DeadlineExceeded, and
        RequestCancelled when it was aborted meanwhile. Cancelled, it leaves nothing reserved, and no place in line.
        """
        if self._draining:
            raise Unavailable("the decode instance is draining", retry_after_s=1.0)
        self._info.layout.require_mappable(layout)
        engine_request = EngineRequest(EngineKey(request_id, next(self._serials)), token_ids, generated_count, params)
        # Before it can get a place in line: it would wait there for ever.
        self._info.require_servable(engine_request)
        needed_blocks = self._info.layout.block_count(len(token_ids) + 1)
        if needed_blocks > self._info.total_blocks:
            limit = f"at most {self._info.total_blocks * self._info.layout.block_tokens - 1} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", limit)
        place = self._end_former(request_id, attempt, router_id)
        request = self._open(engine_request, attempt, router_id, timeout_s, predicted_length)
        request.waits = waits
        answer = request.answer = asyncio.get_running_loop().create_future()
        self._line.join(request_id, needed_blocks, len(token_ids), place)
        self._give_room()
        if request.phase is Phase.WAITING and (not waits or self._line.is_over_limit()):
            self._refuse(request, NoCapacity("decode", _RETRY_AFTER_S, self._why_no_room()))
        try:
            ticket: Ticket = await answer
        except asyncio.CancelledError:
            self._end(request, "left_line" if request.phase is Phase.WAITING else "aborted")
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
        request = self._open(engine_request, attempt, router_id, timeout_s, predicted_length)
        request.phase = Phase.RESERVED
        self.streams.expect(router_id)
        try:
            self._engine.adopt(engine_request.key)
        except EngineError as error:
            self._end(request, "failed")
            raise Unavailable(str(error)) from error
        self._land(request, time.monotonic())

    def abort(self, request_id: str, attempt: int, router_id: str, by_router: bool) -> None:
        """Ends the router's request if the attempt that is here is `attempt` or older. Unknown ones are ignored.

        by_router: whether the router itself asks. When a prefill instance ends a request that has landed, the router
        gets an error: it may wait for nothing but this instance's tokens by then.
        """
        request = self._requests.by_request_id(request_id)
        if request is None or request.attempt > attempt or request.router_id != router_id:
            return
        if request.phase is Phase.WAITING:
            self._end(request, "left_line")
            return
        silent = by_router or request.phase in (Phase.ASKED, Phase.RESERVED)
        self._end(request, "aborted", error=None if silent else "its prefill instance has given the request up")

    def handle(self, events: Sequence[EngineEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, StepTokens):
                self._step(event.steps, now_s)
            elif not isinstance(event, EngineStopped) and (request := self._requests.by_key(event.key)) is not None:
                self._handle_one(request, event, now_s)
        self._admit()
        self._give_room()
        self.streams.flush()

    def load(self) -> InstanceLoad:
        stats = self._engine.stats()
        placed = [request for request in self._requests if request.phase is not Phase.WAITING]
        heavy_count = sum(request.heavy for request in placed)
        # What is kept for the first in line no other request can have.
        is_open = self._line.is_open(self._attainable_blocks())
        return InstanceLoad(
            waiting_requests=len(self._requests) - self._running_count,
            running_requests=self._running_count,
            free_blocks=max(0, stats.free_blocks - self.kept_blocks()) if is_open else 0,
            total_blocks=self._info.total_blocks,
            context_tokens=stats.context_tokens,
            heavy_requests=heavy_count,
            light_requests=len(placed) - heavy_count,
        )

    def kept_blocks(self, coming: tuple[EngineRequest, TokenRange | None] | None = None) -> int:
        """Free blocks that the policy keeps for what is here; nothing new may take them.

        When nothing runs they are kept for the request that is expected to run first: one that has landed, else the
        oldest reservation of the last _UNLANDED_KEEPS_S. A push that stands still keeps nothing from others for longer.
        coming: the request that will be adopted next, with its predicted length. It runs first when nobody is here.
        """
        if self._policy is AdmissionPolicy.GREEDY:
            return 0
        batch = self._running()
        if not batch and (first := self._first_to_run(time.monotonic())) is not None:
            batch = (self._running_request(first),)
        if not batch and coming is not None:
            batch = (self._running_request(self._request(coming[0], attempt=0, router_id="", predicted=coming[1])),)
        return kept_blocks(self._policy, batch, self._info.layout.block_tokens, self._range_end)

    def drain(self) -> None:
        self._draining = True
        for request in self._waiting():
            self._refuse(request, Unavailable("the decode instance is draining", retry_after_s=1.0))

    async def wait_idle(self) -> None:
        # What the streams have not sent yet they send when they are closed.
        await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        for request in list(self._requests):
            self._fail(request, reason)
        self.streams.close_all()

    def _step(self, steps: Sequence[TokenStep], now_s: float) -> None:
        if self._last_step_s is not None:
            self._metrics.step_seconds.observe(now_s - self._last_step_s)
        self._metrics.step_requests.observe(len(steps))
        self._metrics.tokens.inc(len(steps))
        for step in steps:
            # Aborted requests may still be spoken of.
            request = self._requests.by_key(step.key)
            if request is None:
                continue
            if request.first_step_s is None:
                request.first_step_s = now_s
            request.drawn_here += 1
            request.without_blocks = False
            if step.finish is None:
                self.streams.gain(request, step, None)
            else:
                times = self._times(request, now_s)
                self._metrics.queue_seconds.observe(times.queue_s)
                self._metrics.decode_seconds.observe(times.decode_s)
                self.streams.gain(request, step, times)
                self._end(request, "finished")
        self._last_step_s = now_s if self._running_count else None

    def _handle_one(self, request: DecodeRequest, event: EngineEvent, now_s: float) -> None:
        match event:
            case Landed():
                self._land(request, now_s)
                self._metrics.received_bytes.inc(event.kv_bytes)
                self._metrics.landing_seconds.observe(now_s - request.reserved_s)
            case LandingFailed():
                # The prefill side hears of it by its push.
                self._end(request, "not_landed", event.reason)
            case Preempted():
                request.preemptions += 1
                request.without_blocks = True
                self._metrics.preemptions.inc()
            case RequestFailed():
                self._fail(request, event.reason)

    def _end_former(self, request_id: str, attempt: int, router_id: str) -> Place | None:
        """Ends what is here of the request, unless that is newer: then raises StaleAttempt.

        Returns the place in line that an older attempt of the same router had.
        """
        former = self._requests.by_request_id(request_id)
        same_router = former is not None and former.router_id == router_id
        if former is not None and same_router and attempt < former.attempt:
            raise StaleAttempt(request_id, attempt, former.attempt)
        self._attempts.note(router_id, request_id, attempt, time.monotonic())
        if former is None:
            return None
        place = self._line.leave(request_id)
        if not same_router:
            # In whatever phase: its router would place it again, and the two would replace each other in turn.
            self._end(
                former,
                "replaced",
                error="another router has begun a request with the same id",
                replaced=True,
                answer=RequestAlreadyExists(request_id),
            )
            return None
        # A newer attempt is the router's own doing. That room for the same one is asked for again says that prefill
        # did not hear of the landing; the router may have got tokens, and wait for more of them.
        unheard = former.attempt == attempt and former.phase in (Phase.LANDED, Phase.RUNNING)
        answer = StaleAttempt(request_id, former.attempt, attempt) if former.attempt < attempt else None
        self._end(former, "replaced", error="its room was asked for again" if unheard else None, answer=answer)
        return place

    def _open(
        self,
        engine_request: EngineRequest,
        attempt: int,
        router_id: str,
        timeout_s: float,
        predicted_length: TokenRange | None,
    ) -> DecodeRequest:
        request = self._request(engine_request, attempt, router_id, predicted_length)
        timeout_s = min(timeout_s, _LONGEST_REQUEST_S)
        request.expires_s = time.monotonic() + timeout_s
        request.deadline = asyncio.get_running_loop().call_later(timeout_s, self._expire, request)
        self._requests.add(request)
        self._idle.clear()
        return request

    def _request(
        self, engine_request: EngineRequest, attempt: int, router_id: str, predicted: TokenRange | None
    ) -> DecodeRequest:
        prompt_tokens = len(engine_request.token_ids) - engine_request.generated_count
        return DecodeRequest(
            engine_request=engine_request,
            attempt=attempt,
            router_id=router_id,
            predicted_length=self._cut(predicted, prompt_tokens, engine_request.params),
            heavy=self._thresholds.is_heavy(predicted, prompt_tokens),
            reserved_s=time.monotonic(),
        )

    def _waiting(self) -> tuple[DecodeRequest, ...]:
        return tuple(request for request in self._requests if request.phase is Phase.WAITING)

    def _give_room(self) -> None:
        """Asks the engine for room for the requests in line that there is room for."""
        while self._line.length:
            room_blocks = self._engine.stats().free_blocks - self.kept_blocks()
            request_id = self._line.next_to_ask(room_blocks, self._attainable_blocks())
            if request_id is None:
                break
            request = self._requests.by_request_id(request_id)
            assert request is not None, request_id
            self._ask(request)
            if request.phase is Phase.WAITING:
                break  # the engine keeps its free blocks for preempted requests
        if self._line.length and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._give_room()

    def _ask(self, request: DecodeRequest) -> None:
        assert request.phase is Phase.WAITING, request
        request.reserved_s = time.monotonic()
        request.phase = Phase.ASKED
        self._line.asked(request.request_id)
        self.streams.expect(request.router_id)
        left_s = request.expires_s - request.reserved_s
        if left_s <= 0:
            self._expire(request)
            return
        granting = self._engine.reserve(request.engine_request, min(left_s, self._reservation_ttl_s))
        if granting.done():
            self._answered(request, granting)
        else:
            loop = asyncio.get_running_loop()
            asyncio.wrap_future(granting, loop=loop).add_done_callback(partial(self._answered, request))

    def _answered(self, request: DecodeRequest, granting: "Future[Ticket] | asyncio.Future[Ticket]") -> None:
        """The engine has granted or refused the room of a request that may have ended meanwhile."""
        error = granting.exception()
        if self._requests.by_key(request.key) is None:
            if error is None:
                self._engine.abort(request.key)
            return
        assert request.answer is not None
        if error is None:
            request.phase = Phase.RESERVED
            self._line.leave(request.request_id)
            if not request.answer.done():
                request.answer.set_result(granting.result())
        elif isinstance(error, NoCapacity):
            request.phase = Phase.WAITING
            self._line.refused(request.request_id)
            if not request.waits:
                self._refuse(request, error)
        elif isinstance(error, KaveriError) and not isinstance(error, EngineError):
            self._end(request, "refused", answer=error)
        else:
            self._end(request, "failed", answer=Unavailable(str(error)))

    def _refuse(self, request: DecodeRequest, error: KaveriError) -> None:
        self._end(request, "no_room" if isinstance(error, NoCapacity) else "refused", answer=error)

    def _why_no_room(self) -> str:
        if not self._line.is_open(self._attainable_blocks()):
            return "what comes free is for a request that has waited longer"
        kept = self.kept_blocks()
        return f"{kept} free KV blocks are kept for other requests" if kept else ""

    def _attainable_blocks(self) -> int:
        """Blocks that can come free: nobody knows when frozen senders wake, and their blocks leave quarantine."""
        return self._info.total_blocks - self._engine.kv_flow().receiving.quarantined_block_count

    def _land(self, request: DecodeRequest, now_s: float) -> None:
        request.phase = Phase.LANDED
        request.landed_s = now_s
        request.landing_number = next(self._landing_numbers)
        self._landed[request.landing_number] = request

    def _times(self, request: DecodeRequest, now_s: float) -> RequestTimes:
        first_step_s = now_s if request.first_step_s is None else request.first_step_s
        return RequestTimes(first_step_s - request.landed_s, now_s - first_step_s, request.preemptions)

    def _admit(self) -> None:
        if not self._landed:
            return
        for chosen in choose_admitted(self._policy, self._snapshot(), self._range_end):
            request = self._landed[chosen.landing_number]
            try:
                self._engine.admit(request.key)
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            del self._landed[chosen.landing_number]
            request.phase = Phase.RUNNING
            self._running_count += 1

    def _running(self) -> tuple[RunningRequest, ...]:
        return tuple(self._running_request(request) for request in self._requests if request.phase is Phase.RUNNING)

    def _first_to_run(self, now_s: float) -> DecodeRequest | None:
        if self._landed:
            return next(iter(self._landed.values()))
        expected = (
            request
            for request in self._requests
            if request.phase is not Phase.WAITING and now_s - request.reserved_s < _UNLANDED_KEEPS_S
        )
        return min(expected, key=lambda request: request.reserved_s, default=None)

    def _running_request(self, request: DecodeRequest) -> RunningRequest:
        return RunningRequest(request.context_tokens, self._held_blocks(request), request.remaining)

    def _snapshot(self) -> DecodeSnapshot:
        stats = self._engine.stats()
        return DecodeSnapshot(
            landed=tuple(
                LandedRequest(number, request.context_tokens, self._held_blocks(request), request.remaining)
                for number, request in self._landed.items()
            ),
            running_requests=self._running_count,
            max_batch=self._max_batch,
            free_blocks=stats.free_blocks,
            total_blocks=self._info.total_blocks,
            block_tokens=self._info.layout.block_tokens,
            running=self._running(),
        )

    def _held_blocks(self, request: DecodeRequest) -> int:
        # A landed or running request has room for its next token.
        return 0 if request.without_blocks else self._info.layout.block_count(request.context_tokens + 1)

    def _cut(
        self, predicted_length: TokenRange | None, prompt_tokens: int, params: SamplingParams
    ) -> TokenRange | None:
        """A prediction, cut to what the request and the model allow."""
        if predicted_length is None:
            return None
        most_tokens = self._info.max_model_len - prompt_tokens
        if params.max_tokens is not None:
            most_tokens = min(most_tokens, params.max_tokens)
        return predicted_length.up_to(max(1, most_tokens))

    def _router_gone(self, router_id: str) -> None:
        for request in self._requests.of_router(router_id):
            if request.phase is Phase.WAITING:
                continue  # it has no tokens here yet
            self._end(request, "router_gone", error="the router's token stream ended")

    def _expire(self, request: DecodeRequest) -> None:
        self._end(request, "deadline", answer=DeadlineExceeded())

    def _fail(self, request: DecodeRequest, reason: str) -> None:
        self._end(request, "failed", reason, error=reason, answer=Unavailable(reason))

    def _end(
        self,
        request: DecodeRequest,
        outcome: str,
        reason: str | None = None,
        error: str | None = None,
        replaced: bool = False,
        answer: KaveriError | None = None,
    ) -> None:
        """Ends a request in any phase, once; later calls do nothing.

        error: what its router gets. None: nothing, because it has ended the request itself or another instance tells
        it. replaced: as in RequestTokens. answer: what reserve() raises if it has not returned; None: RequestCancelled.
        """
        if not self._requests.remove(request):
            return
        if request.deadline is not None:
            request.deadline.cancel()
        self._landed.pop(request.landing_number, None)
        if request.phase is Phase.RUNNING:
            self._running_count -= 1
        loop = asyncio.get_running_loop()
        self._line.leave(request.request_id)
        if request.answer is not None and not request.answer.done():
            request.answer.set_exception(answer or RequestCancelled(request.request_id))
        if request.phase is Phase.WAITING:
            # What was kept for it may be for others now.
            loop.call_soon(self._give_room)
        elif outcome != "finished":
            self._engine.abort(request.key)
            if error is None:
                self.streams.drop(request)
            else:
                self.streams.fail(request, error, replaced)
            # Its seat in the batch may be what a landed request waits for, its blocks what a waiting one does.
            loop.call_soon(self._admit)
            loop.call_soon(self._give_room)
        if not len(self._requests):
            self._idle.set()
        self._metrics.requests.labels(outcome).inc()
        get_logger().info(
            "request_ended",
            request_id=request.request_id,
            attempt=request.attempt,
            outcome=outcome,
            reason=reason,
            prompt_tokens=request.token_count,
            preemptions=request.preemptions,
            seconds=round(time.monotonic() - request.reserved_s, 6),
        )
