"""Decode side of an instance: reserves KV blocks, admits requests whose KV has arrived to the batch, sends tokens, and
ends each request once."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from kaveri.domain.grammar import Grammar
from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.domain.owner import Ownership
from kaveri.domain.replica import ReplicaLocation, Resumption
from kaveri.domain.sampling import Logprobs, ResolvedParams
from kaveri.domain.view import DrainWay, InstanceLoad
from kaveri.engine.blame import error_of_failure, error_of_stop
from kaveri.engine.contract import (
    DecodeEngine,
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    Landed,
    LandingFailed,
    Preempted,
    RequestEvent,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.errors import EngineError, KaveriError, NoCapacity, RequestAlreadyExists, RequestCancelled, Unavailable
from kaveri.feeds.feed import RouterFeeds
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives import decoding
from kaveri.lives.decoding import Ended, InLine, Reserving, Rival, Running
from kaveri.policy.admission import AnyAdmission, DecodeBatch, expected_answer, member_of
from kaveri.policy.decode_room import DecodeRoom, FreeRoom, Place
from kaveri.policy.growth import BatchMember
from kaveri.policy.placement import HeavyThresholds
from kaveri.policy.waits import LINE_LOOK_S
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import spans_below, trace_fields
from kaveri.timeouts import DRAIN_RETRY_S
from services.decode.answer_readers import AnswerTokenizer
from services.decode.metrics import DecodeMetrics
from services.decode.owners import RequestOwners
from services.decode.requests import AnswerLog, DecodeRequest, End, ResumedHere
from services.decode.spans import DecodeSpans

_LONGEST_REQUEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Terms:
    reservation_ttl_s: float
    range_end: RangeEnd
    thresholds: HeavyThresholds


class DecodeInstance:
    """Decode side of an instance: carries out what kaveri.lives.decoding (states of requests) and
    kaveri.policy.decode_room (admission to the batch) decide. Implements PhaseService. Not thread-safe."""

    def __init__(
        self,
        engine: DecodeEngine,
        policy: AnyAdmission,
        max_batch: int,
        reservation_ttl_s: float,
        orphan_grace_s: float,
        metrics: DecodeMetrics,
        range_end: RangeEnd,
        thresholds: HeavyThresholds,
        serials: Iterator[int],
        tokenizer: AnswerTokenizer | None,
        feeds: RouterFeeds,
    ) -> None:
        """policy: admits requests to the batch. max_batch: requests in it. reservation_ttl_s: seconds that a
        reservation waits for its KV. orphan_grace_s: seconds for which requests continue without a stream of their
        router, and ended ones are kept. range_end: end of a predicted answer length that the policy uses. thresholds:
        lengths above which a request counts as heavy in the load. serials: unique numbers for requests of this engine.
        tokenizer: for clients that read answers here; None disables that. feeds: streams to routers, shared with the
        prefill side."""
        self._engine = engine
        self._terms = _Terms(reservation_ttl_s, range_end, thresholds)
        self._metrics = metrics
        block_tokens = engine.info.layout.block_tokens
        self._room = DecodeRoom(engine.info.total_blocks, block_tokens, DecodeBatch(policy, block_tokens, max_batch))
        self.owners = RequestOwners(orphan_grace_s, self._router_gone, metrics, tokenizer, feeds)
        self._look_again: asyncio.TimerHandle | None = None
        """Looks for free blocks again."""
        self._refuses_s: float | None = None
        """Retry time told to new requests, which are refused; None: they are accepted."""
        self._serials = serials
        metrics.here.in_line.set_function(lambda: self._room.waiting_count)
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Do nothing: decoding needs no background task."""

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar before KV of a request with it is awaited. Raises InvalidArgument if that fails."""
        await asyncio.wrap_future(self._engine.prepare(grammar))

    async def reserve(
        self,
        request_id: str,
        ownership: Ownership,
        token_ids: tuple[int, ...],
        generated_count: int,
        params: ResolvedParams,
        timeout_s: float,
        layout: KvLayout,
        predicted_length: TokenRange | None = None,
        waits: bool = False,
        placement: int = 0,
        traceparent: str = "",
        placed_by: str = "",
        suspect_until: int = 0,
    ) -> Ticket:
        """Reserve KV blocks for a request whose KV a prefill instance will push; return the ticket for the push. First
        ends an earlier reservation of the request, whose place in line a newer attempt takes over, and any other
        request with the same id.

        token_ids: the prompt and `generated_count` answer tokens. timeout_s: seconds until the request is ended here.
        layout: the pushing engine's. waits: True: wait in line for blocks; False: refuse. placement: number of this
        call within the attempt; an earlier call that arrives late is stale. traceparent: parent span; empty: not
        traced. placed_by: id of the prefill instance; empty: unknown. suspect_until: answer length up to which the
        request is suspected of breaking an engine's step; 0: not.

        Raises Unavailable (refused, also during the wait), LayoutMismatch, StaleAttempt, NoCapacity, InvalidArgument
        (can never fit), RequestAlreadyExists (replaced by another request or a later session), DeadlineExceeded, and
        RequestCancelled when aborted. On cancellation nothing stays reserved or in line.
        """
        if self._refuses_s is not None:
            raise _refusal(self._refuses_s)
        info = self._engine.info
        info.layout.require_mappable(layout)
        key = EngineKey(request_id, next(self._serials))
        engine_request = EngineRequest(key, token_ids, generated_count, params, suspect_until)
        # Check before queueing: an unservable request would wait forever.
        info.require_servable(engine_request)
        needed_blocks = self._room.needed_blocks(len(token_ids))
        place = self._end_former(request_id, ownership, placement)
        request = self._open(engine_request, ownership, timeout_s, predicted_length, waits, traceparent)
        request.placement, request.source, request.placed_by = placement, layout, placed_by
        request.answer = asyncio.get_running_loop().create_future()
        self._room.join(request_id, needed_blocks, len(token_ids), place)
        self._give()
        if isinstance(request.state, InLine) and (not waits or self._room.is_over_limit()):
            self._turn_away(request)
        return await self._granted(request)

    async def reserve_resumed(self, resumption: Resumption, held_tokens: int) -> tuple[DecodeRequest, Ticket]:
        """Reserve KV blocks, ahead of waiting requests and even while draining, for a request resumed from a KV copy of
        `held_tokens` tokens that this instance holds. Return the request and the ticket for its KV; it also joins the
        batch first. Raises as reserve() without `waits`. On cancellation nothing stays reserved."""
        request = self._open_resumed(resumption, held_tokens)
        request.answer = asyncio.get_running_loop().create_future()
        if self._has_room_for(request, 0):
            self._ask(request)
        else:
            self._turn_away(request)
        return request, await self._granted(request)

    def promote(
        self, resumption: Resumption, held_tokens: int, promote: Callable[[EngineRequest], None], former_id: str
    ) -> None:
        """Resume a request from a KV copy of `held_tokens` tokens in the engine's own pool, without a push. promote:
        calls KeepingEngine.promote() for the copy. former_id: id of the instance that may have kept the same KV; empty:
        none. Raises as reserve() without `waits`, and TransferFailed."""
        request = self._open_resumed(resumption, held_tokens, former_id)
        try:
            if not self._has_room_for(request, self._engine.info.layout.block_count(held_tokens)):
                raise self._room.refusal(self._free_room(), time.monotonic())
            self._take(request, decoding.BareEvent.ROOM_REQUESTED)
            promote(request.engine_request)
        except KaveriError as error:
            self._take(request, decoding.RoomRefused(error))
            raise
        self._take(request, decoding.BareEvent.ADOPTED)
        assert request.resumed is not None
        request.resumed.landed.set_result(True)
        self._admit()
        self.owners.announce(request)

    def _open_resumed(self, resumption: Resumption, held_tokens: int, former_id: str = "") -> DecodeRequest:
        request_id, token_ids = resumption.request_id, resumption.token_ids
        key = EngineKey(request_id, next(self._serials))
        params, suspect_until = resumption.params, resumption.suspect_until
        engine_request = EngineRequest(key, token_ids, resumption.generated_count, params, suspect_until)
        self._engine.info.require_servable(engine_request)
        self._end_former(request_id, resumption.ownership)
        request = self._open(
            engine_request,
            resumption.ownership,
            resumption.timeout_s,
            resumption.predicted_length,
            False,
            resumption.traceparent,
        )
        request.resumed = ResumedHere(held_tokens, asyncio.get_running_loop().create_future(), former_id)
        request.log = AnswerLog(resumption.generated_count, resumption.generated_count)
        return request

    def _has_room_for(self, request: DecodeRequest, held_blocks: int) -> bool:
        needed_blocks = self._room.needed_blocks(len(request.engine_request.token_ids)) - held_blocks
        return self._room.has_ahead_of_line(needed_blocks, self._free_room(), time.monotonic())

    def landed(self) -> Iterator[DecodeRequest]:
        """Iterate over requests whose KV has arrived, preempted ones included."""
        requests = self.owners.by_serial.values()
        return (request for request in requests if isinstance(request.state, decoding.Landed | Running))

    def move(self, request: DecodeRequest, replica: ReplicaLocation) -> None:
        """End a request that the engine has stopped; its router resumes it from `replica` at another instance."""
        request.log.note_replica(replica)
        self._take(request, decoding.Moved(replica.holder_id))

    def lose(self, request: DecodeRequest, error: KaveriError) -> None:
        """End a request of which another instance runs a newer attempt or session. Its router receives `error`."""
        self.owners.note_loss(request, error)
        self._take(request, decoding.RivalCame(Rival.NEWER_OWNER, error))

    def adopt(
        self,
        engine_request: EngineRequest,
        ownership: Ownership,
        timeout_s: float,
        first_token: tuple[int, Logprobs | None],
        predicted_length: TokenRange | None = None,
        traceparent: str = "",
    ) -> None:
        """Take over a request that this engine has prefilled, without a push; also while draining. Arguments as for
        reserve(). first_token: sampled by prefill. Raises StaleAttempt, RequestAlreadyExists, and Unavailable (the
        engine has stopped)."""
        self._end_former(engine_request.key.request_id, ownership)
        request = self._open(engine_request, ownership, timeout_s, predicted_length, False, traceparent)
        request.log.begin_with(*first_token)
        self._take(request, decoding.BareEvent.ROOM_REQUESTED)
        try:
            self._engine.adopt(engine_request.key)
        except EngineError as error:
            self._take(request, decoding.RoomRefused(error))
            raise Unavailable(str(error)) from error
        self._take(request, decoding.BareEvent.ADOPTED)
        self._admit()
        if request.spans is not None:
            request.spans.adopted(time.monotonic())

    def abort(self, request_id: str, ownership: Ownership, by_router: bool, placement: int = 0) -> None:
        """End a request. Ignored if its id is unknown or now another request's, or it has a newer attempt or session,
        or a later placement than number `placement` (0: any). by_router: False if a prefill instance calls; then
        the router of a request whose KV has arrived gets an error, as it may be waiting for tokens."""
        request = self.owners.by_id.get(request_id)
        if request is None:
            return
        term = ownership.comparable(request.ownership)
        if term is None or term < request.ownership.term:
            return
        if request.ownership.term == term and 0 < placement < request.placement:
            # The room was given back and reserved again before this abort arrived.
            return
        self._take(request, decoding.EndRequested(by_router))

    def handle(self, events: Sequence[EngineEvent]) -> None:
        landed: list[DecodeRequest] = []
        token_counts: list[int] = []
        for event in events:
            if isinstance(event, StepTokens):
                self._step(event.steps)
                token_counts.append(len(event.steps))
            elif isinstance(event, EngineStopped):
                for each in list(self.owners.by_serial.values()):
                    self._take(each, decoding.Broken(error_of_stop(event, each.engine_request.key)))
            # Aborted requests may still have events.
            elif (
                isinstance(event, RequestEvent) and (request := self.owners.by_serial.get(event.key.serial)) is not None
            ):
                match event:
                    case Landed():
                        if event.first_token_id is not None and request.engine_request.params.logprobs is None:
                            # The first token's log-probabilities are not part of the KV transfer.
                            request.log.begin_with(event.first_token_id, None)
                        self._take(request, decoding.LandingDone(event.kv_bytes))
                        landed.append(request)
                        if request.resumed is not None:
                            request.resumed.landed.set_result(True)
                    case LandingFailed():
                        self._take(request, decoding.LandingFailed(event.reason))
                    case Preempted():
                        self._take(request, decoding.BareEvent.BLOCKS_LOST)
                    case RequestFailed():
                        self._take(request, decoding.Broken(error_of_failure(event)))
        if token_counts:
            self._metrics.steps.count(token_counts, time.monotonic(), self._room.batch.running_count)
        self._admit()
        for request in landed:
            if isinstance(request.state, decoding.Landed):
                self.owners.announce(request)
        self._give()

    def load(self) -> InstanceLoad:
        self.owners.prune()
        placed = [request for request in self.owners.by_serial.values() if not isinstance(request.state, InLine)]
        heavy_count = sum(request.heavy for request in placed)
        load = self._room.load(self._free_room(), len(self.owners.by_serial), time.monotonic())
        return replace(
            load,
            context_tokens=self._engine.stats().context_tokens,
            heavy_requests=heavy_count,
            light_requests=len(placed) - heavy_count,
            step_s=self._metrics.steps.step_s,
        )

    def kept_blocks(self, coming: tuple[EngineRequest, TokenRange | None] | None = None) -> int:
        """Number of free KV blocks that the admission policy keeps for requests already here. coming: the next request
        to be taken over from this engine's prefill, with its predicted answer length."""
        member = self._member(*coming) if coming is not None else None
        return self._room.batch.kept_blocks(time.monotonic(), member)

    def drain(self, retry_after_s: float = DRAIN_RETRY_S, way: DrainWay = DrainWay.MIGRATE) -> None:
        self._refuses_s = retry_after_s
        for request in list(self.owners.by_serial.values()):
            if isinstance(request.state, InLine):
                self._take(request, decoding.RoomRefused(_refusal(retry_after_s)))

    def undrain(self) -> None:
        self._refuses_s = None

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        await self.owners.feeds.wait_sent(self._idle)

    def fail_all(self, reason: str) -> None:
        for request in list(self.owners.by_serial.values()):
            self._take(request, decoding.Broken(Unavailable(reason)))
        self.owners.feeds.close_all()

    def _free_room(self) -> FreeRoom:
        quarantined_blocks = self._engine.kv_flow().receiving.quarantined_block_count
        stats = self._engine.stats()
        return FreeRoom(stats.free_blocks, quarantined_blocks, stats.running_requests)

    def _give(self) -> None:
        """Reserve free KV blocks for waiting requests, in the policy's order."""
        room = self._room
        while room.waiting_count:
            request_id = room.next_to_ask(self._free_room(), time.monotonic())
            if request_id is None:
                break
            request = self.owners.by_id.get(request_id)
            assert request is not None, request_id
            self._ask(request)
            if isinstance(request.state, InLine):
                break  # the engine keeps its free blocks for preempted requests
        if room.waiting_count and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(LINE_LOOK_S, self._look_for_room)

    def _look_for_room(self) -> None:
        self._look_again = None
        self._give()

    def _ask(self, request: DecodeRequest) -> None:
        left_s = request.expires_s - time.monotonic()
        if left_s <= 0:
            self._take(request, decoding.BareEvent.TIME_OVER)
            return
        held_tokens = None
        if request.resumed is not None:
            held_tokens = request.resumed.held_tokens
        else:
            self._room.asked(request.request_id)
        self._take(request, decoding.BareEvent.ROOM_REQUESTED)
        expires_in_s = min(left_s, self._terms.reservation_ttl_s)
        granting = self._engine.reserve(request.engine_request, expires_in_s, request.source, held_tokens)
        if granting.done():
            self._answered(request, granting)
        else:
            in_loop, answered = asyncio.get_running_loop().call_soon_threadsafe, partial(self._answered, request)
            granting.add_done_callback(partial(in_loop, answered))

    def _turn_away(self, request: DecodeRequest) -> None:
        refusal = self._room.refusal(self._free_room(), time.monotonic())
        self._take(request, decoding.RoomRefused(refusal))

    async def _granted(self, request: DecodeRequest) -> Ticket:
        """Wait for the ticket of a request's reservation. Cancellation ends the request."""
        assert request.answer is not None
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._take(request, decoding.BareEvent.CALL_ENDED)
            raise

    def _answered(self, request: DecodeRequest, granting: "Future[Ticket]") -> None:
        """Handle the engine's answer to a reservation; the request may have ended meanwhile."""
        error = granting.exception()
        if isinstance(request.state, Ended):
            if error is None:
                self._engine.abort(request.engine_request.key)
        elif error is None:
            self._take(request, decoding.RoomGranted(granting.result()))
        else:
            known = error if isinstance(error, KaveriError) else EngineError(repr(error))
            if self._refuses_s is not None and isinstance(known, NoCapacity):
                # drain() emptied the line while this request was outside; joining again would make it wait forever.
                known = _refusal(self._refuses_s)
            self._take(request, decoding.RoomRefused(known))

    def _admit(self) -> None:
        if not self._room.batch.ready_count:
            return
        for serial in self._room.batch.admissible(self._engine.stats().free_blocks):
            request = self.owners.by_serial.get(serial)
            assert request is not None, serial
            try:
                self._engine.admit(request.engine_request.key)
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            self._take(request, decoding.BareEvent.SEAT_TAKEN)

    def _step(self, steps: Sequence[TokenStep]) -> None:
        now_s = time.monotonic()
        drawn: set[int] = set()
        for step in steps:
            # Aborted requests may still have events.
            request = self.owners.by_serial.get(step.key.serial)
            if request is None:
                continue
            drawn.add(step.key.serial)
            request.state, actions = decoding.step(request.state, decoding.Drew(step.finish is not None), now_s)
            if not actions:
                self.owners.gain(request, step, None)
                continue
            (report,) = actions
            assert isinstance(report, decoding.RecordEnd)
            times = report.times
            if times is not None and request.resumed is not None:
                held_tokens = request.resumed.held_tokens
                recomputed_tokens = len(request.engine_request.token_ids) - held_tokens
                times = replace(times, held_tokens=held_tokens, recomputed_tokens=recomputed_tokens)
            self.owners.gain(request, step, times)
            self._remove(request)
            self.owners.keep(request, now_s)
            if request.spans is not None:
                request.spans.note(report, now_s)
            self._report(request, report, now_s)
        self._room.batch.step(drawn)

    def _end_former(self, request_id: str, ownership: Ownership, placement: int = 0) -> Place | None:
        """End an earlier request with this id, and return the place in line of an older attempt of the same request.
        Raises StaleAttempt or RequestAlreadyExists if the earlier one is newer."""
        former = self.owners.by_id.get(request_id)
        term = ownership.comparable(former.ownership) if former is not None else None
        if former is not None and term is not None:
            is_late = term == former.ownership.term and 0 < placement < former.placement
            if term < former.ownership.term or is_late:
                raise term.stale(request_id, former.ownership.term)
        self.owners.begin(request_id, ownership)
        if former is None:
            return None
        place = self._room.leave_line(request_id)
        if term is None:
            self._take(former, decoding.RivalCame(Rival.OTHER_REQUEST, RequestAlreadyExists(request_id)))
            return None
        rival = Rival.NEWER_OWNER if former.ownership.term < term else Rival.SAME_OWNER
        self._take(former, decoding.RivalCame(rival, former.ownership.term.stale(request_id, term)))
        return place

    def _open(
        self,
        engine_request: EngineRequest,
        ownership: Ownership,
        timeout_s: float,
        predicted: TokenRange | None,
        stays: bool,
        traceparent: str,
    ) -> DecodeRequest:
        now_s, timeout_s = time.monotonic(), min(timeout_s, _LONGEST_REQUEST_S)
        # Prefill samples and sends the first token.
        next_index = engine_request.generated_count + 1
        request = DecodeRequest(
            request_id=engine_request.key.request_id,
            engine_request=engine_request,
            ownership=ownership,
            came_s=now_s,
            expires_s=now_s + timeout_s,
            member=self._member(engine_request, predicted),
            state=InLine(stays),
            log=AnswerLog(next_index, next_index),
            heavy=self._terms.thresholds.is_heavy(predicted, engine_request.prompt_tokens),
        )
        loop = asyncio.get_running_loop()
        request.deadline = loop.call_later(timeout_s, self._take, request, decoding.BareEvent.TIME_OVER)
        if (spans := spans_below(traceparent)) is not None:
            request.spans = DecodeSpans(spans, now_s)
        self.owners.add(request)
        self._idle.clear()
        return request

    def _member(self, request: EngineRequest, predicted: TokenRange | None) -> BatchMember:
        max_model_len = self._engine.info.max_model_len
        expected = expected_answer(predicted, request.prompt_tokens, request.params.max_tokens, max_model_len)
        return member_of(len(request.token_ids), request.generated_count, expected, self._terms.range_end)

    def _router_gone(self, router_id: str) -> None:
        for request in self.owners.of_router(router_id):
            self._take(request, decoding.BareEvent.ROUTER_LOST)

    def _take(self, request: DecodeRequest, event: decoding.Event) -> None:
        """Apply an event to a request; ignored after the request's end."""
        former = request.state
        if isinstance(former, Ended):
            return
        now_s = time.monotonic()
        request.state, actions = decoding.step(former, event, now_s)
        self._follow(request, former, now_s)
        for action in actions:
            self._act(request, action, now_s)

    def _follow(self, request: DecodeRequest, former: decoding.State, now_s: float) -> None:
        """Update request table and running batch after a request's state has changed."""
        batch, serial = self._room.batch, request.engine_request.key.serial
        match request.state:
            case Reserving():
                batch.expect(serial, request.member, now_s)
                self.owners.feeds.expect(request.ownership.router_id)
            case InLine() if isinstance(former, Reserving):
                batch.leave(serial)
            case decoding.Landed() if not isinstance(former, decoding.Landed):
                batch.land(serial, first=request.resumed is not None)
            case Running() if isinstance(former, decoding.Landed):
                batch.admit(serial)
            case decoding.Landed() | Running():
                batch.preempt(serial)
            case Ended():
                self._remove(request)
                # Freed seats, blocks and places in line may serve other requests.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._admit)
                loop.call_soon(self._give)

    def _remove(self, request: DecodeRequest) -> None:
        self._room.batch.leave(request.engine_request.key.serial)
        self.owners.remove(request)
        if request.deadline is not None:
            request.deadline.cancel()
        if request.resumed is not None and not request.resumed.landed.done():
            request.resumed.landed.set_result(False)
        if not self.owners.by_serial:
            self._idle.set()

    def _act(self, request: DecodeRequest, action: decoding.Action, now_s: float) -> None:
        if request.spans is not None:
            request.spans.note(action, now_s)
        match action:
            case decoding.AnswerReserve(result):
                if request.answer is None or request.answer.done():
                    return
                if isinstance(result, Ticket):
                    request.answer.set_result(result)
                else:
                    request.answer.set_exception(result or RequestCancelled(request.request_id))
            case decoding.BareAction.LEAVE_LINE:
                self._room.leave_line(request.request_id)
            case decoding.BareAction.KEEP_PLACE:
                self._room.refused(request.request_id)
            case decoding.BareAction.ABORT_IN_ENGINE:
                self._engine.abort(request.engine_request.key)
            case decoding.SendError(error, replaced, moved, fault):
                self.owners.fail(request, End(error=error, replaced=replaced, moved=moved, fault=fault))
                self.owners.keep(request, now_s)
            case decoding.KeepTokens(error):
                self.owners.drop(request)
                request.log.end = End(error=error)
                self.owners.keep(request, now_s)
            case decoding.BareAction.DROP_TOKENS:
                self.owners.drop(request)
            case decoding.CountLanding(kv_bytes, landing_s):
                self._metrics.received_bytes.inc(kv_bytes)
                self._metrics.landing_seconds.observe(landing_s)
            case decoding.BareAction.COUNT_PREEMPTION:
                self._metrics.preemptions.inc()
            case decoding.RecordEnd():
                self._report(request, action, now_s)

    def _report(self, request: DecodeRequest, report: decoding.RecordEnd, now_s: float) -> None:
        self._metrics.requests.labels(report.outcome.value).inc()
        if report.times is not None:
            self._metrics.queue_seconds.observe(report.times.queue_s)
            self._metrics.decode_seconds.observe(report.times.decode_s)
        get_logger().info(
            "request_ended",
            request_id=request.request_id,
            attempt=request.ownership.term.attempt,
            session=request.ownership.term.session,
            outcome=report.outcome.value,
            reason=report.reason,
            prompt_tokens=len(request.engine_request.token_ids),
            preemptions=report.preemptions,
            seconds=round(now_s - request.came_s, 6),
            **trace_fields(request.spans),
        )


def _refusal(retry_after_s: float) -> Unavailable:
    reason = "the decode instance is draining" if retry_after_s else "the instance does not serve decode now"
    return Unavailable(reason, retry_after_s)
