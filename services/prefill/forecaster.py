"""Asks predictors how long the answers of requests will be, and keeps what they say until a request is placed.

Predictions only ever improve a decision. Whatever becomes of a question, its request goes on: with the length, or
without it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kaveri.cluster.store import ClusterStore
from kaveri.domain.length import TokenRange
from kaveri.domain.view import Role
from kaveri.engine.contract import PrefillEngine
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, NoCapacity, Unavailable
from kaveri.telemetry.logs import get_logger
from services.prefill.config import PromptConfig
from services.prefill.metrics import PrefillMetrics
from services.prefill.prediction import (
    PredictionMode,
    PredictionOutcome,
    PredictorHealth,
    PredictorStatus,
    choose_predictor,
    usable_length,
)
from services.prefill.predictor_peers import PredictorPeers
from services.prefill.requests import PrefillRequest

_ANSWER_WITHIN_S = 2.0
"""Parallel: a predictor that takes longer does not work."""
_MAX_CALL_PROMPTS = 64
_MAX_CALL_TOKENS = 2**18
"""Of one call, but for a single longer prompt: well within the size limit of a message."""
_LATE_IN_A_ROW = 8
"""Parallel: so many answers that came after their requests were placed are worth a line in the log."""
_SLIPS = (DeadlineExceeded, InvalidArgument, NoCapacity)
"""What a sound predictor may answer now and then: busy, full, or an odd prompt."""


@dataclass(eq=False, slots=True)
class _Call:
    predictor: PredictorStatus
    health: PredictorHealth
    asked_s: float
    requests: list[PrefillRequest] = field(default_factory=list)
    token_count: int = 0
    wanted: set[PrefillRequest] = field(default_factory=set)
    """Those that still wait for the answer."""
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class _Question:
    call: _Call
    then: Callable[[PrefillRequest], None]


class LengthForecaster:
    """The questions of one prefill instance. For one event loop; run() must be running when ask() is called."""

    def __init__(
        self,
        store: ClusterStore,
        model: str,
        mode: PredictionMode,
        budget_s: float,
        address: str,
        max_model_len: int,
        metrics: PrefillMetrics,
        rng: random.Random,
    ) -> None:
        """model: its name in the cluster. mode: not OFF. budget_s: how long sequential waits for an answer.

        address: the predictor to ask, "host:port"; empty: any that is ready in the cluster.
        """
        self.comes_first = mode is PredictionMode.SEQUENTIAL
        """Whether a request waits for its answer before it is queued."""
        self._store = store
        self._model = model
        self._address = address
        self._timeout_s = budget_s if self.comes_first else _ANSWER_WITHIN_S
        self._max_model_len = max_model_len
        self._metrics = metrics
        self._rng = rng
        self._peers = PredictorPeers(model)
        self._health: dict[str, PredictorHealth] = {}
        self._addresses: set[str] = set()
        self._open: dict[PrefillRequest, _Question] = {}
        self._answers: dict[PrefillRequest, TokenRange] = {}
        self._unsent: dict[str, _Call] = {}
        self._watched: dict[str, _Call] = {}
        self._late_in_a_row = 0
        self._tasks = asyncio.TaskGroup()

    @classmethod
    def configured(
        cls,
        config: PromptConfig,
        store: ClusterStore,
        engine: PrefillEngine,
        metrics: PrefillMetrics,
        rng: random.Random,
    ) -> "LengthForecaster | None":
        """As the settings say; None: no predictions."""
        if config.prediction is PredictionMode.OFF:
            return None
        return cls(
            store,
            config.model_name,
            config.prediction,
            config.prediction_budget_s,
            config.predictor_address,
            engine.info.max_model_len,
            metrics,
            rng,
        )

    async def run(self) -> None:
        """Works until cancelled; questions live no longer than this."""
        try:
            async with self._tasks:
                await asyncio.Event().wait()
        finally:
            await self._peers.close()

    def ask(self, request: PrefillRequest, then: Callable[[PrefillRequest], None]) -> bool:
        """Asks about a request. Returns whether a question is under way.

        then(request) is called once it has ended, well or not, unless decide() or forget() is called first.
        """
        now_s = time.monotonic()
        predictor = choose_predictor(self._candidates(now_s), self._rng)
        if predictor is None:
            self._count(PredictionOutcome.NONE)
            return False
        call = self._unsent.get(predictor.name)
        if call is not None and not _has_room(call, request):
            self._send(call)
            call = None
        if call is None:
            # What is accepted in the same turn of the loop goes in one call.
            call = self._unsent[predictor.name] = _Call(predictor, self._health[predictor.name], now_s)
            asyncio.get_running_loop().call_soon(self._send, call)
        call.requests.append(request)
        call.token_count += request.prompt_tokens
        call.wanted.add(request)
        call.health.outstanding_prompts += 1
        self._open[request] = _Question(call, then)
        return True

    def is_open(self, request: PrefillRequest) -> bool:
        """Whether an answer is still awaited."""
        return request in self._open

    def decide(self, request: PrefillRequest) -> None:
        """The request is placed now: gives it the length if it is there. One that comes later is not used."""
        predicted = self._answers.pop(request, None)
        if predicted is not None:
            params = request.engine_request.params
            assert params.max_tokens is not None
            most_tokens = min(params.max_tokens, self._max_model_len - request.prompt_tokens)
            request.predicted_length = usable_length(predicted, request.engine_request.generated_count, most_tokens)
            known = request.predicted_length is not None
            self._count(PredictionOutcome.USED if known else PredictionOutcome.OUTLIVED)
            return
        question = self._open.pop(request, None)
        if question is not None:
            self._count(PredictionOutcome.LATE)
            self._give_up(request, question.call, watch=True)

    def forget(self, request: PrefillRequest) -> None:
        """The request has ended; nobody wants its answer."""
        self._answers.pop(request, None)
        question = self._open.pop(request, None)
        if question is not None:
            self._give_up(request, question.call, watch=False)

    def _candidates(self, now_s: float) -> list[PredictorStatus]:
        known = self._known()
        present = {name for name, _, _, _ in known}
        for name in [name for name in self._health if name not in present]:
            if self._health.pop(name).left():
                get_logger().warning("length predictor left", predictor=name)
        addresses = {address for _, _, address, _ in known}
        if not self._addresses <= addresses:
            self._tasks.create_task(self._peers.retain(addresses))
        self._addresses = addresses
        candidates = []
        for name, incarnation, address, waiting in known:
            health = self._health.setdefault(name, PredictorHealth())
            health.reborn(incarnation)
            if health.may_be_asked(now_s):
                waiting_prompts = waiting + health.outstanding_prompts
                candidates.append(PredictorStatus(name, incarnation, address, waiting_prompts))
        return candidates

    def _known(self) -> list[tuple[str, int, str, int]]:
        """Name, incarnation, address and waiting prompts of every predictor there is."""
        if self._address:
            return [(self._address, 0, self._address, 0)]
        return [
            (status.record.instance_id, status.record.incarnation, status.record.address, status.load.waiting_requests)
            for status in self._store.view().ready(Role.PREDICTOR, self._model)
        ]

    def _send(self, call: _Call) -> None:
        if self._unsent.get(call.predictor.name) is not call:
            return
        del self._unsent[call.predictor.name]
        if call.wanted:
            call.task = self._tasks.create_task(self._follow(call))
            # Not a `finally` in the task: one that is cancelled before its first step would never come to it.
            call.task.add_done_callback(lambda _: self._settle(call))
        else:
            self._settle(call)

    async def _follow(self, call: _Call) -> None:
        try:
            await self._ask_and_take_in(call)
        except Exception:
            # A prediction's bad luck must not end the instance, and nobody may wait for its answer for ever.
            get_logger().exception("length prediction failed", predictor=call.predictor.name)
            self._go_on(call)

    async def _ask_and_take_in(self, call: _Call) -> None:
        try:
            prompts = [request.engine_request.token_ids[: request.prompt_tokens] for request in call.requests]
            ranges = await self._peers.predict(call.predictor.address, prompts, self._timeout_s)
        except KaveriError as error:
            self._failed(call, error)
        except Exception as error:
            get_logger().exception("length prediction failed", predictor=call.predictor.name)
            self._failed(call, Unavailable(repr(error)))
        else:
            self._answered(call, ranges)

    def _answered(self, call: _Call, ranges: Iterable[TokenRange]) -> None:
        self._metrics.prediction_seconds.observe(time.monotonic() - call.asked_s)
        if call.health.succeeded():
            get_logger().info("length predictor works", predictor=call.predictor.name, address=call.predictor.address)
        if not call.wanted:
            self._came_late()
        for request, predicted in zip(call.requests, ranges, strict=True):
            if request in call.wanted:
                self._answers[request] = predicted
        self._go_on(call)

    def _failed(self, call: _Call, error: KaveriError) -> None:
        # Beside the first chunk there was time enough: only before the queue is it short.
        slip = isinstance(error, _SLIPS) and (self.comes_first or not isinstance(error, DeadlineExceeded))
        if call.health.failed(call.asked_s, time.monotonic(), slip):
            get_logger().warning(
                "length predictor does not work; requests go on with unknown length",
                predictor=call.predictor.name,
                address=call.predictor.address,
                reason=str(error),
            )
        late = self.comes_first and isinstance(error, DeadlineExceeded)
        for _ in call.wanted:
            self._count(PredictionOutcome.LATE if late else PredictionOutcome.FAILED)
        self._go_on(call)

    def _go_on(self, call: _Call) -> None:
        # In the order in which they came.
        waiting = [request for request in call.requests if request in call.wanted]
        call.wanted.clear()
        for request in waiting:
            question = self._open.pop(request)
            try:
                question.then(request)
            except Exception:
                get_logger().exception("going on without a prediction failed", request_id=request.request_id)

    def _give_up(self, request: PrefillRequest, call: _Call, watch: bool) -> None:
        """Stops waiting for one answer; the call is cancelled when nobody waits for any of it.

        watch: one such call per predictor goes on, because only its end tells whether the predictor works.
        """
        call.wanted.discard(request)
        if call.wanted or call.task is None:
            return
        if watch and self._watched.setdefault(call.predictor.name, call) is call:
            return
        call.task.cancel()

    def _settle(self, call: _Call) -> None:
        """The call has ended, however it did."""
        call.health.outstanding_prompts -= len(call.requests)
        if self._watched.get(call.predictor.name) is call:
            del self._watched[call.predictor.name]
        if call.wanted:
            self._failed(call, Unavailable("the call was cancelled"))

    def _count(self, outcome: PredictionOutcome) -> None:
        self._metrics.predictions.labels(outcome).inc()
        if outcome is PredictionOutcome.USED:
            if self._late_in_a_row >= _LATE_IN_A_ROW:
                get_logger().info("length predictions come in time again")
            self._late_in_a_row = 0

    def _came_late(self) -> None:
        """An answer came that nobody waited for any more: the predictor works, but is too slow."""
        self._late_in_a_row += 1
        if self._late_in_a_row == _LATE_IN_A_ROW:
            get_logger().warning("length predictions come too late", in_a_row=_LATE_IN_A_ROW)


def _has_room(call: _Call, request: PrefillRequest) -> bool:
    return len(call.requests) < _MAX_CALL_PROMPTS and call.token_count + request.prompt_tokens <= _MAX_CALL_TOKENS
