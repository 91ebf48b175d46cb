"""Asks predictors for the lengths of answers. A request never fails for lack of a prediction."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kaveri.domain.length import TokenRange
from kaveri.errors import KaveriError, Unavailable
from kaveri.policy.prediction import (
    PredictionMode,
    PredictionOutcome,
    PredictorHealth,
    PredictorStatus,
    answer_within_s,
    failure_outcome,
    is_slip,
)
from kaveri.telemetry.logs import get_logger
from services.prefill.metrics import PrefillMetrics
from services.prefill.predictors import Predictors

_MAX_CALL_PROMPTS = 64
_MAX_CALL_TOKENS = 2**18
"""Limits of a call, except for a single longer prompt: well within the size limit of a message."""
_LATE_IN_A_ROW = 8
"""Consecutive calls, each answered after all its requests were placed, that are logged."""


@dataclass(eq=False, slots=True)
class Question:
    """Pending prediction of one answer's length; a call to a predictor has several."""

    prompt: Sequence[int]
    answered: Callable[[TokenRange | None], None]
    call: "_Call"


@dataclass(eq=False, slots=True)
class _Call:
    predictor: PredictorStatus
    health: PredictorHealth
    asked_s: float
    questions: list[Question] = field(default_factory=list)
    open: set[Question] = field(default_factory=set)
    """Questions that still wait for their answers."""
    task: asyncio.Task[None] | None = None

    def has_room(self, prompt: Sequence[int]) -> bool:
        token_count = sum(len(question.prompt) for question in self.questions)
        return len(self.questions) < _MAX_CALL_PROMPTS and token_count + len(prompt) <= _MAX_CALL_TOKENS


class LengthForecaster:
    """Asks predictors for the lengths of the answers to one prefill instance's prompts. Not thread-safe; run() must be
    running when ask() is called."""

    def __init__(self, predictors: Predictors, mode: PredictionMode, budget_s: float, metrics: PrefillMetrics) -> None:
        """mode: when predictions are asked for. budget_s: limit on a request's wait for one before it is queued."""
        self._mode = mode
        self._predictors = predictors
        self._timeout_s = answer_within_s(mode, budget_s)
        self._metrics = metrics
        self._unsent: dict[str, _Call] = {}
        self._watched: dict[str, _Call] = {}
        """Calls that continue only to learn whether the predictor works; by its name."""
        self._late_in_a_row = 0
        self._tasks = asyncio.TaskGroup()

    @property
    def comes_first(self) -> bool:
        """True if a request waits for its predicted length before it is queued."""
        return self._mode.comes_first

    async def run(self) -> None:
        """Send calls to predictors until cancelled, which ends pending ones."""
        try:
            async with self._tasks:
                await asyncio.Event().wait()
        finally:
            await self._predictors.close()

    def ask(self, prompt: Sequence[int], answered: Callable[[TokenRange | None], None]) -> Question | None:
        """Ask a predictor for the length of the answer to a prompt (token ids of the served model). None: predictions
        are off, or no predictor can be asked. answered() is called once, later, with the length of the whole answer or,
        without a prediction, None; unless decided() or drop() is called first."""
        if self._mode is PredictionMode.OFF:
            return None
        now_s = time.monotonic()
        chosen = self._predictors.choose(now_s)
        if chosen is None:
            self._count(PredictionOutcome.NONE)
            return None
        predictor, health = chosen
        call = self._unsent.get(predictor.name)
        if call is not None and not call.has_room(prompt):
            self._send(call)
            call = None
        if call is None:
            # Questions of one turn of the loop go in one call.
            call = self._unsent[predictor.name] = _Call(predictor, health, now_s)
            asyncio.get_running_loop().call_soon(self._send, call)
        question = Question(prompt, answered, call)
        call.questions.append(question)
        call.open.add(question)
        health.outstanding_prompts += 1
        return question

    def decided(self, question: Question, outcome: PredictionOutcome) -> None:
        """Close the question of a request that is being placed at decode. outcome: use of the prediction, for the
        metric; LATE: no prediction came in time."""
        self._count(outcome)
        call, task = question.call, _close(question)
        # One such call per predictor continues, because its outcome shows whether the predictor works.
        if task is not None and self._watched.setdefault(call.predictor.name, call) is not call:
            task.cancel()

    def drop(self, question: Question) -> None:
        """Close the question of a request that has ended, without counting an outcome."""
        if (task := _close(question)) is not None:
            task.cancel()

    def _send(self, call: _Call) -> None:
        if self._unsent.get(call.predictor.name) is not call:
            return
        del self._unsent[call.predictor.name]
        if call.open:
            call.task = self._tasks.create_task(self._follow(call))
            # Not a `finally` in the task: a task that is cancelled before its first step does not run it.
            call.task.add_done_callback(lambda _: self._finish(call))
        else:
            self._finish(call)

    async def _follow(self, call: _Call) -> None:
        try:
            prompts = [question.prompt for question in call.questions]
            lengths = await self._predictors.predict(call.predictor, prompts, self._timeout_s)
        except KaveriError as error:
            self._failed(call, error)
        except Exception as error:
            get_logger().exception("predictor_call_failed", predictor=call.predictor.name)
            self._failed(call, Unavailable(repr(error)))
        else:
            self._answered(call, lengths)

    def _answered(self, call: _Call, lengths: Sequence[TokenRange]) -> None:
        self._metrics.forecasts.seconds.observe(time.monotonic() - call.asked_s)
        if call.health.succeeded():
            get_logger().info("predictor_works", predictor=call.predictor.name, address=call.predictor.address)
        if not call.open:
            self._came_late()
        self._answer(call, lengths)

    def _failed(self, call: _Call, error: KaveriError) -> None:
        if call.health.failed(call.asked_s, time.monotonic(), is_slip(self._mode, error)):
            get_logger().warning(
                "predictor_failing",
                predictor=call.predictor.name,
                address=call.predictor.address,
                reason=str(error),
            )
        for _ in call.open:
            self._count(failure_outcome(self._mode, error))
        self._answer(call, [None] * len(call.questions))

    def _answer(self, call: _Call, lengths: Sequence[TokenRange | None]) -> None:
        """Pass the lengths (None: unknown), one for each question of the call in order, to the open questions."""
        for question, length in zip(call.questions, lengths, strict=True):
            # One answer may end other requests of the call.
            if question in call.open:
                call.open.discard(question)
                try:
                    question.answered(length)
                except Exception:
                    get_logger().exception("prediction_not_taken", predictor=call.predictor.name)

    def _finish(self, call: _Call) -> None:
        call.health.outstanding_prompts -= len(call.questions)
        if self._watched.get(call.predictor.name) is call:
            del self._watched[call.predictor.name]
        if call.open:
            self._failed(call, Unavailable("the call was cancelled"))

    def _count(self, outcome: PredictionOutcome) -> None:
        self._metrics.forecasts.outcomes.labels(outcome).inc()
        if outcome is PredictionOutcome.USED:
            if self._late_in_a_row >= _LATE_IN_A_ROW:
                get_logger().info("predictions_in_time")
            self._late_in_a_row = 0

    def _came_late(self) -> None:
        """Count a call answered after all its requests were placed: the predictor works, but is too slow."""
        self._late_in_a_row += 1
        if self._late_in_a_row == _LATE_IN_A_ROW:
            get_logger().warning("predictions_late", in_a_row=_LATE_IN_A_ROW)


def _close(question: Question) -> asyncio.Task[None] | None:
    """Close a question. Returns the task of its call if the call has no other open question, else None."""
    call = question.call
    if question not in call.open:
        return None
    call.open.remove(question)
    return call.task if not call.open else None
