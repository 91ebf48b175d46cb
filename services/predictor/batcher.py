"""Batches prompts for a length predictor: a bounded queue, one batch at a time. Batches are padded to their longest
prompt (TetriInfer, arXiv 2401.11181, section 3.3.2), so prompts above a limit run alone, not to slow down others."""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.domain.length import TokenRange
from kaveri.errors import KaveriError, NoCapacity, Unavailable
from kaveri.telemetry.logs import get_logger
from services.predictor.metrics import PredictorMetrics
from services.predictor.worker import WorkerThread

_RETRY_AFTER_S = 0.1
"""Delay after which callers should retry when the queue is full: a few batches."""


class LengthModel(Protocol):
    """Interface of a length predictor, implemented by kaveri.predictor.bundle.LengthPredictor."""

    model: str
    """Served name of the model that the predictor was trained for."""
    granularity: int
    """Tokens per bucket."""
    bucket_count: int
    version: str
    vocab_size: int
    """Vocabulary size of the served model's tokenizer."""
    max_prompt_tokens: int

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return a row per prompt (token ids): the probability of each answer-length bucket. Blocks, on one thread."""

    def range_of(self, bucket: int) -> TokenRange:
        """Return the answer lengths, in tokens, that a bucket holds."""


@dataclass(eq=False, slots=True)
class _WaitingPrompt:
    token_ids: Sequence[int]
    arrived_s: float
    answer: asyncio.Future[list[float]]


class PredictionBatcher:
    """Prompt queue of one length predictor. Not thread-safe. Computes only while run() is active."""

    def __init__(
        self,
        model: LengthModel,
        worker: WorkerThread,
        batch_prompts: int,
        long_prompt_tokens: int,
        max_queue: int,
        metrics: PredictorMetrics,
    ) -> None:
        """batch_prompts: batch limit. long_prompt_tokens: longer prompts run alone. max_queue: max waiting."""
        self._model = model
        self._worker = worker
        self._batch_prompts = batch_prompts
        self._long_prompt_tokens = long_prompt_tokens
        self._max_queue = max_queue
        self._metrics = metrics
        self._waiting: dict[_WaitingPrompt, None] = {}
        self.computing_count = 0
        """Number of prompts in the current batch."""
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.waiting.set_function(lambda: self.waiting_count)

    @property
    def waiting_count(self) -> int:
        """Number of prompts waiting for their batch."""
        return len(self._waiting)

    async def predict(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the probability of each answer-length bucket for each prompt, in order. Cancellation drops prompts
        that still wait. Raises NoCapacity when not all prompts fit the queue, Unavailable when the predictor failed."""
        if len(self._waiting) + len(prompts) > self._max_queue:
            self._metrics.prompts.labels("refused").inc(len(prompts))
            raise NoCapacity("predictor", _RETRY_AFTER_S, f"at most {self._max_queue} prompts wait")
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        entries = [_WaitingPrompt(token_ids, now_s, loop.create_future()) for token_ids in prompts]
        self._waiting.update(dict.fromkeys(entries))
        self._arrived.set()
        self._idle.clear()
        try:
            # Not gather(): after one failure it would leave the other errors unread.
            await asyncio.wait([entry.answer for entry in entries])
            return [entry.answer.result() for entry in entries]
        finally:
            self._drop(entries)

    async def wait_idle(self) -> None:
        """Wait until no prompt waits or is being computed."""
        await self._idle.wait()

    async def run(self) -> None:
        """Compute batches until cancelled; then fail the remaining prompts with Unavailable."""
        batch: list[_WaitingPrompt] = []
        try:
            while True:
                await self._arrived.wait()
                batch = self._take_batch()
                if batch:
                    await self._compute(batch)
                if not self._waiting:
                    self._arrived.clear()
                    self._idle.set()
        finally:
            _fail([*batch, *self._waiting], Unavailable("the predictor is stopping"))
            self._waiting.clear()
            self._idle.set()

    def _take_batch(self) -> list[_WaitingPrompt]:
        entries = list(self._waiting)
        lengths = [len(entry.token_ids) for entry in entries]
        batch = [entries[place] for place in choose_batch(lengths, self._batch_prompts, self._long_prompt_tokens)]
        for entry in batch:
            del self._waiting[entry]
        return batch

    async def _compute(self, batch: Sequence[_WaitingPrompt]) -> None:
        started_s = time.monotonic()
        for entry in batch:
            self._metrics.queue_seconds.observe(started_s - entry.arrived_s)
        self._metrics.batch_prompts.observe(len(batch))
        self.computing_count = len(batch)
        try:
            rows = await self._worker.call(self._model.predict, [entry.token_ids for entry in batch])
            check_rows(rows, len(batch), self._model.bucket_count)
        except Exception as error:  # No error of a model may end the service.
            get_logger().exception("prediction_failed", prompts=len(batch), error=repr(error))
            self._metrics.prompts.labels("failed").inc(len(batch))
            _fail(batch, Unavailable(f"the predictor failed: {error!r:.200}"))
            return
        finally:
            self.computing_count = 0
        ended_s = time.monotonic()
        self._metrics.batch_seconds.observe(ended_s - started_s)
        for entry, row in zip(batch, rows, strict=True):
            # The entry may have been cancelled during its computation.
            if not entry.answer.done():
                entry.answer.set_result(row)
                self._metrics.seconds.observe(ended_s - entry.arrived_s)
                self._metrics.prompts.labels("predicted").inc()

    def _drop(self, entries: Iterable[_WaitingPrompt]) -> None:
        for entry in entries:
            self._waiting.pop(entry, None)
            if entry.answer.cancel():
                self._metrics.prompts.labels("dropped").inc()
            elif not entry.answer.cancelled():
                entry.answer.exception()  # asyncio logs errors that are never read


def choose_batch(prompt_tokens: Sequence[int], batch_prompts: int, long_prompt_tokens: int) -> list[int]:
    """Choose the next batch, as ascending indices into waiting prompts of these lengths, in order of arrival. Always
    takes the first, so that none starves: alone if it is long, else with the next short ones. Pure."""
    if not prompt_tokens:
        return []
    if prompt_tokens[0] > long_prompt_tokens:
        return [0]
    batch = []
    for place, tokens in enumerate(prompt_tokens):
        if tokens <= long_prompt_tokens:
            batch.append(place)
            if len(batch) == batch_prompts:
                break
    return batch


def check_rows(rows: Sequence[Sequence[float]], prompt_count: int, bucket_count: int) -> None:
    """Raise ValueError unless each prompt has a row of `bucket_count` probabilities."""
    if len(rows) != prompt_count:
        raise ValueError(f"{len(rows)} predictions for {prompt_count} prompts")
    for row in rows:
        if len(row) != bucket_count or not all(math.isfinite(value) and 0 <= value <= 1.001 for value in row):
            raise ValueError(f"{row!r:.120} are not the probabilities of {bucket_count} buckets")


def _fail(entries: Iterable[_WaitingPrompt], error: KaveriError) -> None:
    for entry in entries:
        if not entry.answer.done():
            entry.answer.set_exception(error)
