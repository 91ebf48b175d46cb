"""One prefill instance at work: takes requests in, follows the engine's events, and ends every request exactly once."""

import asyncio
import itertools
import time
from collections.abc import Sequence

from kaveri.domain.length import settled_length
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import InstanceLoad
from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    FirstToken,
    KvPushed,
    KvPushFailed,
    PrefillEngine,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    StepTokens,
)
from kaveri.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.policy.ordering import DEFAULT_SCHEDULING_BATCH, OrderingPolicy
from kaveri.telemetry.logs import get_logger
from services.prefill.forecaster import LengthForecaster
from services.prefill.hand_over import HandOver
from services.prefill.metrics import PrefillMetrics
from services.prefill.queue import HasRoom, PrefillQueue
from services.prefill.requests import (
    Adopted,
    Failed,
    FirstTokenDrawn,
    HandedOver,
    HandOverReport,
    Placed,
    PrefillRequest,
    Started,
)

_BLOCKS_RETRY_S = 0.02
"""Blocks of an aborted request come back without an event, once no transfer can touch them: look again after this."""
NO_TRANSPORT = "none"
"""What a hand-over that moves nothing names as its transport."""
LONGEST_REQUEST_S = 86_400.0
"""Time given to a request whose RPC has no deadline."""


class PrefillInstance:
    """The EngineRole of a prefill instance. For one event loop."""

    def __init__(
        self,
        engine: PrefillEngine,
        policy: OrderingPolicy,
        chunk_tokens: int,
        max_queue: int,
        metrics: PrefillMetrics,
        hand_over: HandOver,
        scheduling_batch: int = DEFAULT_SCHEDULING_BATCH,
        has_room: HasRoom | None = None,
        forecaster: LengthForecaster | None = None,
    ) -> None:
        """max_queue: requests that wait for the engine. hand_over: takes the requests on from here.

        scheduling_batch: most prompts that the policy orders together. has_room: asked before a prompt is submitted,
        where the engine decodes as well. forecaster: says how long answers will be; None: nobody does.
        """
        self._engine = engine
        self._info = engine.info
        self._chunk_tokens = chunk_tokens
        self._metrics = metrics
        self._queue = PrefillQueue(engine, policy, chunk_tokens, max_queue, scheduling_batch, has_room)
        self._hand_over = hand_over
        self._forecaster = forecaster
        self._serials = itertools.count(1)
        self._requests: dict[EngineKey, PrefillRequest] = {}
        self._by_request_id: dict[str, PrefillRequest] = {}
        self._started_count = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._retry: asyncio.TimerHandle | None = None
        metrics.waiting.set_function(lambda: self._queue.queued_tokens)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._forecaster is not None:
                tasks.create_task(self._forecaster.run())
            await self._hand_over.run()

    def accept(
        self,
        request_id: str,
        attempt: int,
        router_id: str,
        token_ids: tuple[int, ...],
        generated_count: int,
        params: SamplingParams,
        timeout_s: float | None,
    ) -> PrefillRequest:
        """Queues one attempt; its outbox tells what becomes of it. An older attempt of the same request is dropped, and
        so is a request of another router with the same id.

        timeout_s: what is left of the request's time; None: no deadline. Raises Unavailable (draining), StaleAttempt,
        NoCapacity (queue full) and InvalidArgument (does not fit this engine).
        """
        if self._draining:
            raise Unavailable("the prefill instance is draining", retry_after_s=1.0)
        self._check_fit(token_ids, generated_count, params)
        former = self._by_request_id.get(request_id)
        same_router = former is not None and former.router_id == router_id
        if former is not None and same_router and attempt <= former.attempt:
            raise StaleAttempt(request_id, attempt, former.attempt)
        loop = asyncio.get_running_loop()
        now_s = time.monotonic()
        key = EngineKey(request_id, next(self._serials))
        request = PrefillRequest(
            key=key,
            attempt=attempt,
            router_id=router_id,
            engine_request=EngineRequest(key, token_ids, generated_count, params),
            arrived_s=now_s,
            deadline_s=now_s + min(LONGEST_REQUEST_S if timeout_s is None else timeout_s, LONGEST_REQUEST_S),
            report=self._reported,
            predicted_length=settled_length(params),
        )
        if former is not None:
            # Another router's must not be placed again: the two would replace each other in turn.
            stale = StaleAttempt(request_id, former.attempt, attempt)
            self._end(former, "refused", stale if same_router else RequestAlreadyExists(request_id))
        try:
            self._queue.hold(request)
        except NoCapacity:
            self._metrics.requests.labels("refused").inc()
            raise
        request.deadline = loop.call_later(request.deadline_s - now_s, self._expire, request)
        self._requests[key] = request
        self._by_request_id[request_id] = request
        self._idle.clear()
        asked = self._ask_length(request)
        if not (asked and self._forecaster is not None and self._forecaster.comes_first):
            self._queue.release(request)
            self._submit()
        return request

    def cancel(self, request: PrefillRequest) -> None:
        """Nobody waits for the request any more: frees all that it holds, here and at its decode instance."""
        self._end(request, "cancelled", None)

    def abort(self, request_id: str, attempt: int, router_id: str) -> None:
        """Ends the router's request if the attempt that is here is `attempt` or older. Unknown ones are ignored."""
        request = self._by_request_id.get(request_id)
        if request is not None and request.attempt <= attempt and request.router_id == router_id:
            self._end(request, "cancelled", None)

    def fail(self, request: PrefillRequest, error: KaveriError) -> None:
        """Ends a request that cannot be handed over."""
        self._end(request, "failed", error)

    def _reported(self, request: PrefillRequest, report: HandOverReport) -> None:
        match report:
            case Placed():
                request.pushing_since_s = time.monotonic()
                request.outbox.put(report)
            case Adopted():
                assert request.first_token_s is not None
                tail_s = time.monotonic() - request.first_token_s
                request.outbox.put(report.placed)
                request.outbox.put(HandedOver(0, 0.0, tail_s, NO_TRANSPORT))
                self._end(request, "handed_over", None)
            case Failed():
                self.fail(request, report.error)

    def handle(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, StepTokens | EngineStopped):
                continue  # the one is not of this role, the other is the host's
            # Aborted requests may still be spoken of.
            if (request := self._requests.get(event.key)) is not None:
                self._handle_one(request, event)
        self._submit()

    def load(self) -> InstanceLoad:
        stats = self._engine.stats()
        return InstanceLoad(
            waiting_requests=len(self._requests) - self._started_count,
            running_requests=self._started_count,
            queued_prefill_tokens=self._queue.queued_tokens,
            queue_room=self._queue.room,
            free_blocks=stats.free_blocks,
            total_blocks=self._info.total_blocks,
            context_tokens=stats.context_tokens,
        )

    def drain(self) -> None:
        self._draining = True

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        for request in list(self._requests.values()):
            self.fail(request, Unavailable(reason))

    def _check_fit(self, token_ids: tuple[int, ...], generated_count: int, params: SamplingParams) -> None:
        info = self._info
        if not token_ids or len(token_ids) >= info.max_model_len:
            limit = (
                f"at least 1 and fewer than {info.max_model_len} tokens (prompt and answer share the model's length)"
            )
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", limit)
        if info.layout.block_count(len(token_ids)) > info.total_blocks:
            limit = f"at most {info.total_blocks * info.layout.block_tokens} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", limit)
        if max(token_ids) >= info.vocab_size:
            raise InvalidArgument("token_ids", max(token_ids), f"ids below {info.vocab_size}")
        if generated_count >= len(token_ids):
            raise InvalidArgument("generated_count", generated_count, "less than the number of token_ids")
        if params.max_tokens is None or params.seed is None:
            raise InvalidArgument("params", params, "given max_tokens and a seed by the router")

    def _handle_one(self, request: PrefillRequest, event: EngineEvent) -> None:
        now_s = time.monotonic()
        match event:
            case PrefillStarted():
                request.started_s = now_s
                self._started_count += 1
                queue_s = now_s - request.arrived_s
                self._metrics.queue_seconds.observe(queue_s)
                request.outbox.put(Started(queue_s))
                # A prompt of one chunk has no second one to push beside: its place is looked for while it is computed,
                # so that the push can begin with the first layer and not after the last.
                # Its length may still come meanwhile: then, or when it is computed at the latest.
                if self._is_one_chunk(request) and not self._awaits_length(request):
                    self._look_for_place(request)
            case PrefillProgress():
                self._metrics.tokens.inc(event.computed_tokens - request.computed_tokens)
                self._queue.advance(request, event.computed_tokens)
                self._look_for_place(request)
            case FirstToken():
                self._first_token(request, event, now_s)
            case KvPushed():
                self._handed_over(request, event, now_s)
            case KvPushFailed():
                self._hand_over.push_failed(request, event)
            case RequestFailed():
                self.fail(request, Unavailable(event.reason))

    def _first_token(self, request: PrefillRequest, event: FirstToken, now_s: float) -> None:
        assert request.started_s is not None
        prefill_s = now_s - request.started_s
        request.first_token_s = now_s
        self._metrics.prefill_seconds.observe(prefill_s)
        self._metrics.tokens.inc(request.token_count - request.computed_tokens)
        self._queue.advance(request, request.token_count)
        request.outbox.put(FirstTokenDrawn(event.token_id, event.logprobs, event.finish, prefill_s))
        if event.finish is not None:
            self._end(request, "finished", None)
        else:
            self._look_for_place(request)

    def _look_for_place(self, request: PrefillRequest) -> None:
        if self._hand_over.at_first_token and request.first_token_s is None:
            return
        if self._goes_on(request):
            if self._forecaster is not None:
                self._forecaster.decide(request)
            self._hand_over.begin(request)

    def _goes_on(self, request: PrefillRequest) -> bool:
        """Whether it needs a decode instance: not when its next token is its last."""
        params = request.engine_request.params
        assert params.max_tokens is not None
        more = request.engine_request.generated_count + 1 < params.max_tokens
        return more and request.token_count + 1 < self._info.max_model_len

    def _is_one_chunk(self, request: PrefillRequest) -> bool:
        return request.token_count <= self._chunk_tokens

    def _ask_length(self, request: PrefillRequest) -> bool:
        """Whether an answer is on its way. Lengths that are settled are not asked for."""
        if self._forecaster is None or request.predicted_length is not None or not self._goes_on(request):
            return False
        return self._forecaster.ask(request, self._length_settled)

    def _awaits_length(self, request: PrefillRequest) -> bool:
        return self._forecaster is not None and self._forecaster.is_open(request)

    def _length_settled(self, request: PrefillRequest) -> None:
        """The question about its length has ended, with an answer or without."""
        self._queue.release(request)
        if request.started_s is not None and self._is_one_chunk(request):
            self._look_for_place(request)
        self._submit()

    def _handed_over(self, request: PrefillRequest, event: KvPushed, now_s: float) -> None:
        assert request.first_token_s is not None
        assert request.pushing_since_s is not None
        transfer_s, tail_s = now_s - request.pushing_since_s, now_s - request.first_token_s
        self._metrics.transfer_seconds.observe(transfer_s)
        self._metrics.tail_seconds.observe(tail_s)
        self._metrics.transfer_bytes.labels(event.transport).inc(event.kv_bytes)
        request.outbox.put(HandedOver(event.kv_bytes, transfer_s, tail_s, event.transport))
        self._end(request, "handed_over", None)

    def _expire(self, request: PrefillRequest) -> None:
        self._end(request, "deadline", DeadlineExceeded())

    def _end(self, request: PrefillRequest, outcome: str, error: KaveriError | None) -> None:
        """Ends a request in any phase, once; later calls do nothing. `error` is what its router gets."""
        if self._requests.pop(request.key, None) is None:
            return
        if request.deadline is not None:
            request.deadline.cancel()
        del self._by_request_id[request.request_id]
        if request.started_s is not None:
            self._started_count -= 1
        self._queue.remove(request)
        if self._forecaster is not None:
            self._forecaster.forget(request)
        self._hand_over.end(request, handed_over=outcome == "handed_over")
        if outcome not in ("handed_over", "finished"):
            self._engine.abort(request.key)
        request.outbox.close(error)
        self._metrics.requests.labels(outcome).inc()
        get_logger().info(
            "request ended",
            request_id=request.request_id,
            attempt=request.attempt,
            outcome=outcome,
            reason=str(error) if error is not None else None,
            prompt_tokens=request.token_count,
            seconds=round(time.monotonic() - request.arrived_s, 6),
        )
        if not self._requests:
            self._idle.set()
        # Its blocks, or its share of the work kept ahead, may be what others wait for. Not from within _submit().
        asyncio.get_running_loop().call_soon(self._submit)

    def _submit(self) -> None:
        for request, error in self._queue.submit():
            self.fail(request, error)
        if self._queue.out_of_blocks and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_BLOCKS_RETRY_S, self._submit_again)

    def _submit_again(self) -> None:
        self._retry = None
        self._submit()
