"""Prefill side of an instance: applies events to the states of its requests, and performs the actions."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kaveri.domain.attachment import Attached, Attachment, check_received
from kaveri.domain.grammar import Grammar
from kaveri.domain.length import known_length
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import DrainWay, InstanceLoad
from kaveri.engine.blame import error_of_stop
from kaveri.engine.contract import EngineEvent, EngineInfo, EngineKey, EngineRequest, EngineStopped, PrefillEngine
from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    RequestNotFound,
    Unavailable,
)
from kaveri.feeds.expiring import MAX_ANSWER_BYTES, ExpiringMap, answer_bytes
from kaveri.feeds.feed import RouterFeeds
from kaveri.lives.prompt import (
    NO_TRANSPORT,
    Advance,
    AwaitingLength,
    BareAction,
    CountPrediction,
    Ended,
    EndHandOver,
    EndRequested,
    EngineReport,
    Event,
    FindAnotherPlace,
    FindPlace,
    FirstTokenDrawn,
    HandedOver,
    Known,
    LengthAnswered,
    LengthPending,
    Outcome,
    Progress,
    Queued,
    RecordEnd,
    SendReport,
    Started,
    State,
    Terms,
    step,
)
from kaveri.policy.busy_rate import BusyRate
from kaveri.policy.levelling import LEVEL_INTERVAL_S
from kaveri.policy.prompt_queue import PromptQueue
from kaveri.policy.room_search import draws_more, place_search
from kaveri.policy.waits import PROMPT_BLOCKS_RETRY_S, QUEUE_FULL_RETRY_S
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import spans_below, trace_fields
from kaveri.timeouts import DRAIN_RETRY_S, STRAGGLER_S
from kaveri.wire.attempts import wrong_secret
from services.prefill.forecaster import LengthForecaster, Question
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import HandOver, PrefillRequest, PromptNews
from services.prefill.spans import PrefillSpans

LONGEST_REQUEST_S = 86_400.0
"""Limit on the time of a request."""
HasRoom = Callable[[PrefillRequest, Collection[PrefillRequest]], bool]
"""True if a prompt may be submitted next to the prompts under way, the earliest first."""


@dataclass(eq=False, slots=True)
class _Life:
    request: PrefillRequest
    state: State
    question: Question | None
    """The pending question about its length."""
    deadline: asyncio.TimerHandle
    spans: PrefillSpans | None = None


class PrefillRole:
    """Prefill side of an instance: has prompts computed and handed over. Implements PhaseService. Not thread-safe."""

    def __init__(
        self,
        engine: PrefillEngine,
        queue: PromptQueue[PrefillRequest],
        hand_over: HandOver,
        forecaster: LengthForecaster,
        metrics: PrefillMetrics,
        orphan_grace_s: float,
        has_room: HasRoom,
        serials: Iterator[int],
        feeds: RouterFeeds,
    ) -> None:
        """orphan_grace_s: seconds for which requests continue without a stream of their router, and ended ones are kept
        so that clients can attach to them. has_room: returns True if a prompt may be submitted to the engine next to
        those under way. serials: unique numbers for requests of this engine. feeds: streams to routers, shared with the
        decode side."""
        self._engine = engine
        self._queue = queue
        self._has_room = has_room
        self._retry: asyncio.TimerHandle | None = None
        self._hand_over = hand_over
        hand_over.report = self._happened
        self._forecaster = forecaster
        self._metrics = metrics
        self._serials = serials
        self._lives: dict[str, _Life] = {}
        self.feeds = feeds
        feeds.join(self._router_gone, self._unsent_of)
        self._kept: ExpiringMap[str, PrefillRequest] = ExpiringMap(orphan_grace_s, max_bytes=MAX_ANSWER_BYTES)
        """Requests after their end, unless cancelled or replaced."""
        self._aborted: ExpiringMap[str, Ownership] = ExpiringMap(STRAGGLER_S)
        """Owners whose Abort came before their request; by request id."""
        self._refuses_s: float | None = None
        """Retry time told to new requests, which are refused; None: they are accepted."""
        self._gives_back = True
        """Prompts that have not begun go back to routers that ask, while requests are refused."""
        self._rate = BusyRate()
        """Prompt tokens per second."""
        self._level_at_s = 0.0
        """Earliest time of the next levelling."""
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.waiting.set_function(lambda: queue.queued_tokens)
        metrics.orphans.set_function(self._orphan_count)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forecaster.run())
            await self._hand_over.run()

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar before a request with it is queued. Raises InvalidArgument if that fails."""
        await asyncio.wrap_future(self._engine.prepare(grammar))

    def accept(
        self,
        request_id: str,
        ownership: Ownership,
        token_ids: tuple[int, ...],
        generated_count: int,
        params: ResolvedParams,
        timeout_s: float,
        silent_decode_ids: frozenset[str] = frozenset(),
        traceparent: str = "",
        suspect_until: int = 0,
    ) -> PrefillRequest:
        """Queue an attempt of a request. Ends an older attempt of it, and another request with the same id. If the
        attempt is here already, all its reports are sent again. token_ids: the prompt and `generated_count` answer
        tokens. timeout_s: seconds until the request is ended. silent_decode_ids: decode instances that do not answer
        the router, used only if there is no other. traceparent: parent span; empty: not traced. suspect_until: answer
        length up to which the request is suspected of breaking an engine's step; 0: not.

        Raises Unavailable (refused), StaleAttempt (also: it was aborted), RequestAlreadyExists (a later session is
        known), NoCapacity (queue full) and InvalidArgument (does not fit this engine).
        """
        known = self._find(request_id)
        if known is not None and known.ownership == ownership:
            return self._repeat(known)
        if self._refuses_s is not None:
            raise _refusal(self._refuses_s)
        _check_fit(self._engine.info, token_ids, generated_count, params)
        self._replace(request_id, ownership)
        if not self._queue.room:
            self._metrics.requests.labels(Outcome.REFUSED).inc()
            reason = f"{self._queue.max_waiting} requests are queued already"
            raise NoCapacity("prefill", retry_after_s=QUEUE_FULL_RETRY_S, reason=reason)
        key = EngineKey(request_id, next(self._serials))
        sent = EngineRequest(key, token_ids, generated_count, params, suspect_until, self._hand_over.at_first_token())
        timeout_s = min(timeout_s, LONGEST_REQUEST_S)
        now_s = time.monotonic()
        room = self._engine.info.max_model_len - (len(token_ids) - generated_count)
        request = PrefillRequest(
            request_id,
            ownership,
            sent,
            len(token_ids),
            now_s + timeout_s,
            known_length(params, max(1, room)),
            silent_decode_ids,
            traceparent,
        )
        self._begin(request, now_s, timeout_s)
        return request

    def has_requests_of(self, router_id: str) -> bool:
        """Return True if a request of this router is at prefill here."""
        return any(life.request.ownership.router_id == router_id for life in self._lives.values())

    def repeat(self, router_id: str, owners: Mapping[str, Term]) -> list[PromptNews]:
        """Mark all reports on a router's requests as unsent. owners: the router's session and attempt by request id.
        Returns error reports for requests that it does not own here."""
        unknown: list[PromptNews] = []
        for request_id, term in owners.items():
            request = self._find(request_id)
            if request is not None and (request.ownership.router_id, request.ownership.term) == (router_id, term):
                request.log.repeat()
            else:
                error = Unavailable("the request is not at the prefill instance, or belongs to another owner")
                unknown.append(PromptNews(request_id, term, ended=True, error=error))
        return unknown

    def attach(self, attachment: Attachment) -> Attached:
        """Make another router, or a later session of the client, the owner of a present or kept request; all its
        reports are sent again. The former router gets RequestAlreadyExists. Raises RequestNotFound and InvalidArgument
        (another secret, prompt or answer, or a session number that does not grow). Nothing changes on errors."""
        request_id, ownership = attachment.request_id, attachment.ownership
        term = ownership.term
        life, request = self._lives.get(request_id), self._find(request_id)
        if request is None or request.log.error is not None:
            raise RequestNotFound(request_id)
        if not request.ownership.secret or not ownership.is_same_request(request.ownership):
            if life is None:
                # Another request had this id before.
                raise RequestNotFound(request_id)
            raise wrong_secret()
        is_its_router = (ownership.router_id, term) == (request.ownership.router_id, request.ownership.term)
        if term.session <= request.ownership.term.session and not is_its_router:
            if ownership.router_id == request.ownership.router_id:
                raise RequestNotFound(request_id)  # an earlier attempt of its router
            raise InvalidArgument("session", term.session, f"above {request.ownership.term.session}, the present one")
        attached = _attached(request, attachment)
        if not is_its_router:
            # A later session that wants log-probabilities has the prompt computed again.
            request.log.forget_report()
            self.feeds.discard(request.ownership.router_id, request)
            replaced = PromptNews(
                request_id, request.ownership.term, ended=True, error=RequestAlreadyExists(request_id)
            )
            self.feeds.add(request.ownership.router_id, replaced)
            request.ownership = ownership
        self._repeat(request)
        self._metrics.attaches.inc()
        get_logger().info("request_attached", request_id=request_id, attempt=term.attempt, session=term.session)
        return attached

    def cancel(self, request: PrefillRequest) -> None:
        """End the request and free its KV blocks, here and at decode. Idempotent."""
        self._happened(request, EndRequested(Outcome.CANCELLED))

    def abort(self, request_id: str, ownership: Ownership) -> None:
        """End a request, unless the id is another request's or has a newer attempt or session. A request that arrives
        after its abort is refused."""
        life = self._lives.get(request_id)
        if life is None:
            # It may have overtaken the request.
            self._aborted.put(request_id, ownership, time.monotonic())
            return
        term = ownership.comparable(life.request.ownership)
        if term is not None and life.request.ownership.term <= term:
            self.cancel(life.request)

    def give_back(self, request_id: str, ownership: Ownership) -> None:
        """While the instance refuses requests: end one that its engine has not received, so that the router places it
        elsewhere. Others are left alone."""
        life = self._lives.get(request_id)
        if self._refuses_s is None or not self._gives_back or life is None:
            return
        waits = isinstance(life.state, AwaitingLength | Queued) and life.request not in self._queue.computing
        if waits and ownership.comparable(life.request.ownership) == life.request.ownership.term:
            self._happened(life.request, EndRequested(Outcome.GIVEN_BACK, _refusal(self._refuses_s)))

    def level(self, surplus_tokens: int) -> None:
        """Return waiting prompts to their routers, newest first, because another instance's queue is shorter by
        `surplus_tokens`. At most once in LEVEL_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s < self._level_at_s or not (moved := self._queue.to_level(surplus_tokens)):
            return
        self._level_at_s = now_s + LEVEL_INTERVAL_S
        refusal = NoCapacity("prefill", retry_after_s=0.0, reason="another instance has a shorter queue")
        for request in moved:
            self._happened(request, EndRequested(Outcome.GIVEN_BACK, refusal))
        get_logger().info("prompts_levelled", requests=len(moved), surplus_tokens=surplus_tokens)

    @property
    def has_waiting_prompts(self) -> bool:
        """True if there are prompts that the engine has not received."""
        return self._queue.room < self._queue.max_waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return self._queue.queued_tokens

    def handle(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            # Aborted requests may still have events.
            if isinstance(event, EngineReport):
                life = self._lives.get(event.key.request_id)
                if life is not None and life.request.engine_request.key == event.key:
                    self._happened(life.request, event)
            elif isinstance(event, EngineStopped):
                for life in list(self._lives.values()):
                    error = error_of_stop(event, life.request.engine_request.key)
                    self._happened(life.request, EndRequested(Outcome.FAILED, error))
        self._submit()

    def load(self) -> InstanceLoad:
        self._kept.prune(time.monotonic())
        stats = self._engine.stats()
        waiting_count = sum(isinstance(life.state, AwaitingLength | Queued) for life in self._lives.values())
        return InstanceLoad(
            waiting_requests=waiting_count,
            running_requests=len(self._lives) - waiting_count,
            queued_prefill_tokens=self._queue.queued_tokens,
            queue_room=self._queue.room,
            free_blocks=stats.free_blocks,
            total_blocks=self._engine.info.total_blocks,
            context_tokens=stats.context_tokens,
            prefill_tokens_per_s=self._rate.per_s,
        )

    def drain(self, retry_after_s: float = DRAIN_RETRY_S, way: DrainWay = DrainWay.MIGRATE) -> None:
        self._refuses_s, self._gives_back = retry_after_s, way is not DrainWay.FINISH

    def undrain(self) -> None:
        self._refuses_s = None

    @property
    def is_idle(self) -> bool:
        return not self._lives

    async def wait_idle(self) -> None:
        await self.feeds.wait_sent(self._idle)

    def fail_all(self, reason: str) -> None:
        for life in list(self._lives.values()):
            self._happened(life.request, EndRequested(Outcome.FAILED, Unavailable(reason)))

    def _find(self, request_id: str) -> PrefillRequest | None:
        life = self._lives.get(request_id)
        return life.request if life is not None else self._kept.get(request_id, time.monotonic())

    def _repeat(self, request: PrefillRequest) -> PrefillRequest:
        request.log.repeat()
        self.feeds.expect(request.ownership.router_id)
        self.feeds.add(request.ownership.router_id, request)
        return request

    def _router_gone(self, router_id: str) -> None:
        for life in list(self._lives.values()):
            if life.request.ownership.router_id == router_id:
                self.cancel(life.request)

    def _unsent_of(self, router_id: str) -> list[PrefillRequest]:
        known = (*(life.request for life in self._lives.values()), *self._kept.values())
        return [request for request in known if request.ownership.router_id == router_id and request.log.has_unsent]

    def _orphan_count(self) -> int:
        missing = self.feeds.missing_routers
        return sum(life.request.ownership.router_id in missing for life in list(self._lives.values()))

    def _replace(self, request_id: str, ownership: Ownership) -> None:
        """End an earlier request with this id. Raises StaleAttempt or RequestAlreadyExists if it is the same or a newer
        attempt, even after its hand-over: an older attempt would have it computed again."""
        now_s = time.monotonic()
        kept = self._kept.get(request_id, now_s)
        for former_owner in (kept.ownership if kept is not None else None, self._aborted.get(request_id, now_s)):
            term = ownership.comparable(former_owner) if former_owner is not None else None
            if former_owner is not None and term is not None and term <= former_owner.term:
                raise term.stale(request_id, former_owner.term)
        self._kept.pop(request_id)
        if (life := self._lives.get(request_id)) is None:
            return
        former, term = life.request, ownership.comparable(life.request.ownership)
        # The router of another request must not place it again: the two would replace each other in turn.
        error: KaveriError = RequestAlreadyExists(request_id)
        if term is not None:
            if term <= former.ownership.term:
                raise term.stale(request_id, former.ownership.term)
            error = former.ownership.term.stale(request_id, term)
        self._happened(former, EndRequested(Outcome.REFUSED, error))

    def _begin(self, request: PrefillRequest, now_s: float, timeout_s: float) -> None:
        info, sent = self._engine.info, request.engine_request
        assert sent.params.max_tokens is not None
        more = draws_more(request.token_count, sent.generated_count, sent.params.max_tokens, info.max_model_len)
        terms = Terms(
            arrived_s=now_s,
            token_count=request.token_count,
            generated_count=sent.generated_count,
            most_tokens=min(sent.params.max_tokens, info.max_model_len - sent.prompt_tokens),
            least_tokens=sent.params.min_tokens,
            place_search=place_search(request.token_count, self._queue.chunk_tokens, more, sent.stays),
        )
        self._queue.hold(request)
        question = None
        if more and request.predicted_length is None:
            question = self._forecaster.ask(
                sent.token_ids[: sent.prompt_tokens],
                lambda length: self._happened(request, LengthAnswered(length)),
            )
        forecast = LengthPending() if question is not None else Known(request.predicted_length)
        waits = question is not None and self._forecaster.comes_first
        state = AwaitingLength(terms) if waits else Queued(terms, forecast)
        deadline = asyncio.get_running_loop().call_later(
            timeout_s,
            lambda: self._happened(request, EndRequested(Outcome.DEADLINE, DeadlineExceeded())),
        )
        spans = spans_below(request.traceparent)
        traced = PrefillSpans(spans, now_s) if spans is not None else None
        self._lives[request.request_id] = _Life(request, state, question, deadline, traced)
        self.feeds.expect(request.ownership.router_id)
        self._idle.clear()
        if not waits:
            self._queue.release(request)
            self._submit()

    def _happened(self, request: PrefillRequest, event: Event) -> None:
        """Apply an event to a request; ignored after its end."""
        life = self._lives.get(request.request_id)
        if life is None or life.request is not request:
            return
        now_s = time.monotonic()
        life.state, actions = step(life.state, event, now_s)
        if isinstance(life.state, Ended):
            del self._lives[request.request_id]
        for action in actions:
            if life.spans is not None:
                life.spans.note(action, now_s)
            match action:
                case Advance():
                    self._queue.advance(request, action.computed_tokens)
                    self._rate.done(action.new_tokens, now_s, has_more=bool(self._queue.computing))
                    self._metrics.tokens.inc(action.new_tokens)
                case SendReport():
                    self._observe(action.progress)
                    request.log.put(action.progress)
                    self.feeds.add(request.ownership.router_id, request)
                case CountPrediction():
                    assert life.question is not None
                    self._forecaster.decided(life.question, action.outcome)
                case FindPlace():
                    request.predicted_length = action.length
                    self._hand_over.begin(request)
                case FindAnotherPlace():
                    self._hand_over.push_failed(request, action.failure)
                case EndHandOver():
                    self._hand_over.end(request, action.handed_over)
                case RecordEnd():
                    self._close(life, action)
                case BareAction.ENQUEUE:
                    self._queue.release(request)
                    self._submit()
                case BareAction.LEAVE_QUEUE:
                    self._queue.remove(request)
                case BareAction.DROP_QUESTION:
                    assert life.question is not None
                    self._forecaster.drop(life.question)
                case BareAction.ABORT_IN_ENGINE:
                    self._engine.abort(request.engine_request.key)

    def _submit(self) -> None:
        """Submit queued prompts as far as the engine needs them now. Prompts that can never fit fail."""
        while (request := self._queue.next()) is not None:
            try:
                if not self._has_room(request, self._queue.computing):
                    self._submit_later()
                    return
                self._engine.prefill(request.engine_request)
            except NoCapacity:
                self._submit_later()
                return
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            except InvalidArgument as error:
                self._happened(request, EndRequested(Outcome.FAILED, error))
            else:
                self._queue.submitted(request)
                self._rate.begin(time.monotonic())

    def _submit_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(PROMPT_BLOCKS_RETRY_S, self._submit_again)

    def _submit_again(self) -> None:
        self._retry = None
        self._submit()

    def _observe(self, progress: Progress) -> None:
        match progress:
            case Started():
                self._metrics.queue_seconds.observe(progress.queue_s)
            case FirstTokenDrawn():
                self._metrics.prefill_seconds.observe(progress.prefill_s)
            case HandedOver() if progress.kv_transport != NO_TRANSPORT:
                self._metrics.transfers.seconds.observe(progress.kv_transfer_s)
                self._metrics.transfers.tail_seconds.observe(progress.kv_tail_s)
                self._metrics.transfers.bytes.labels(progress.kv_transport).inc(progress.kv_bytes)

    def _close(self, life: _Life, close: RecordEnd) -> None:
        request = life.request
        life.deadline.cancel()
        request.log.end(close.error)
        if close.outcome is Outcome.CANCELLED:
            self.feeds.discard(request.ownership.router_id, request)
        else:
            self.feeds.add(request.ownership.router_id, request)
        if close.outcome not in (Outcome.CANCELLED, Outcome.REFUSED):
            if request.engine_request.params.prompt_logprobs is not None:
                # They would take the memory of many other requests.
                request.log.forget_report()
            first = request.log.first_token
            logprobs = [first.logprobs] if first is not None and first.logprobs is not None else []
            size = answer_bytes(request.token_count, logprobs)
            self._kept.put(request.request_id, request, time.monotonic(), size)
        self._metrics.requests.labels(close.outcome).inc()
        get_logger().info(
            "request_ended",
            request_id=request.request_id,
            attempt=request.ownership.term.attempt,
            session=request.ownership.term.session,
            outcome=close.outcome,
            reason=str(close.error) if close.error is not None else None,
            prompt_tokens=request.token_count,
            seconds=round(close.seconds, 6),
            **trace_fields(life.spans),
        )
        if not self._lives:
            self._idle.set()
        # Others may wait for its blocks, or its share of the engine. Later, as this may run within _submit().
        asyncio.get_running_loop().call_soon(self._submit)


def _refusal(retry_after_s: float) -> Unavailable:
    reason = "the prefill instance is draining" if retry_after_s else "the instance does not serve prefill now"
    return Unavailable(reason, retry_after_s)


def _attached(request: PrefillRequest, attachment: Attachment) -> Attached:
    sent, first = request.engine_request, request.log.first_token
    prompt, generated = sent.token_ids[: sent.prompt_tokens], sent.token_ids[sent.prompt_tokens :]
    # Once the first token is drawn, decode may have drawn any number of others.
    known = generated if first is None else (*generated, first.token_id)
    check_received(attachment, prompt, known, is_all=first is None)
    missing = generated[attachment.generated_count :]
    if missing and sent.params.logprobs is not None:
        raise RequestNotFound(request.request_id, "the log-probabilities of earlier placements are not known here")
    return Attached(sent.params, sent.generated_count, missing)


def _check_fit(info: EngineInfo, token_ids: tuple[int, ...], generated_count: int, params: ResolvedParams) -> None:
    if not token_ids or len(token_ids) >= info.max_model_len:
        limit = f"at least 1 and fewer than {info.max_model_len} tokens (prompt and answer share the model's length)"
        raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", limit)
    if info.layout.block_count(len(token_ids)) > info.total_blocks:
        limit = f"at most {info.total_blocks * info.layout.block_tokens} tokens (the KV pool here)"
        raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", limit)
    params.check_known_ids(info.vocab_size, token_ids)
    if generated_count >= len(token_ids):
        raise InvalidArgument("generated_count", generated_count, "less than the number of token_ids")
    if params.max_tokens is None or params.seed is None:
        raise InvalidArgument("params", params, "given max_tokens and a seed by the router")
