"""Chooses an answer-length predictor, tracks predictors' health, and clamps predictions. Pure: no clock, no I/O."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.length import TokenRange
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, NoCapacity

_ANSWER_WITHIN_S = 2.0
"""Timeout of a prediction that runs in parallel with the first prefill chunk."""
_FIRST_REST_S = 0.1
_LONGEST_REST_S = 2.0
"""Max backoff of a failing predictor; bounds how long its recovery goes unnoticed."""
_DOUBLINGS = 5
"""Doublings of the first backoff until it reaches the maximum."""
_SLIPS_ALLOWED = 2
"""Consecutive slips (failures that a healthy predictor may have) before it counts as not working."""


class PredictionMode(enum.StrEnum):
    """When to predict an answer's length (TetriInfer, arXiv 2401.11181, section 3.3.2)."""

    PARALLEL = "parallel"
    """In parallel with the first prefill chunk: known when a decode instance is chosen, or unknown."""
    SEQUENTIAL = "sequential"
    """Before the prompt enters the prefill queue."""
    OFF = "off"

    @property
    def comes_first(self) -> bool:
        """True if a request waits for its prediction before it is queued."""
        return self is PredictionMode.SEQUENTIAL


class PredictionOutcome(enum.StrEnum):
    """Result of one request's length prediction, for metrics."""

    USED = "used"
    OUTLIVED = "outlived"
    """Earlier attempts have already generated more tokens than predicted."""
    LATE = "late"
    FAILED = "failed"
    NONE = "none"
    """No predictor was available."""


@dataclass(frozen=True, slots=True)
class PredictorStatus:
    """Length predictor that can be asked, and its load."""

    name: str
    """Instance id, or the address configured by an operator."""
    incarnation: int
    address: str
    waiting_prompts: int
    """Prompts waiting there as of its last heartbeat, plus unanswered ones sent from here."""


class PredictorHealth:
    """Health of one length predictor, judged by its answers. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self.outstanding_prompts = 0
        self._incarnation: int | None = None
        self._working: bool | None = None
        self._failures = 0
        self._failed_at_s = -1.0
        self._rests = 0
        self._resting_until_s = -1.0

    def reborn(self, incarnation: int) -> None:
        """Record the length predictor's incarnation (number of its process run). A new one clears the backoff."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._failures = self._rests = 0

    def may_be_asked(self, now_s: float) -> bool:
        """Return False during a backoff; after one, allow one prediction at a time until one succeeds."""
        return not self._rests or (now_s >= self._resting_until_s and not self.outstanding_prompts)

    def left(self) -> bool:
        """Record that the predictor left the cluster. Return True if this changed it to not working."""
        news = self._working is not False
        self._working = False
        return news

    def succeeded(self) -> bool:
        """Record a valid prediction, and end the backoff. Return True if this changed it to working."""
        news = self._working is not True
        self._working = True
        self._failures = self._rests = 0
        return news

    def failed(self, asked_s: float, now_s: float, slip: bool) -> bool:
        """Record a failure and back off, twice as long each time. Return True if this changed the predictor to not
        working. asked_s: when the prompt was sent. slip: True for a failure that healthy predictors have; a few in a
        row are tolerated."""
        if asked_s < self._failed_at_s:
            return False  # sent before the last failure, so it is the same failure
        self._failed_at_s = now_s
        self._failures += 1
        if slip and self._failures <= _SLIPS_ALLOWED:
            return False
        self._resting_until_s = now_s + min(_FIRST_REST_S * 2.0**self._rests, _LONGEST_REST_S)
        self._rests = min(self._rests + 1, _DOUBLINGS)
        news = self._working is not False
        self._working = False
        return news


def answer_within_s(mode: PredictionMode, budget_s: float) -> float:
    """Return the timeout of a prediction, in seconds. budget_s: timeout in sequential mode."""
    return budget_s if mode.comes_first else _ANSWER_WITHIN_S


def is_slip(mode: PredictionMode, error: KaveriError) -> bool:
    """Return True if a healthy length predictor may fail like this: it is busy or full, or rejects the prompt. A
    timeout counts only in sequential mode; the timeout of parallel mode is generous."""
    if isinstance(error, DeadlineExceeded):
        return mode.comes_first
    return isinstance(error, InvalidArgument | NoCapacity)


def failure_outcome(mode: PredictionMode, error: KaveriError) -> PredictionOutcome:
    """Return the metric label of a prediction that failed with `error`: LATE or FAILED."""
    late = mode.comes_first and isinstance(error, DeadlineExceeded)
    return PredictionOutcome.LATE if late else PredictionOutcome.FAILED


def choose_predictor(candidates: Sequence[PredictorStatus], rng: random.Random) -> PredictorStatus | None:
    """Return the one of two random predictors with fewer waiting prompts; None if there are none."""
    if not candidates:
        return None
    return min(rng.sample(candidates, min(2, len(candidates))), key=lambda candidate: candidate.waiting_prompts)


def usable_length(
    predicted: TokenRange, generated_count: int, most_tokens: int, least_tokens: int = 0
) -> TokenRange | None:
    """Clamp a predicted answer length to [least_tokens, most_tokens]; None if the answer is already longer.

    generated_count: tokens of the answer so far. least_tokens: the request's min_tokens, unknown to predictors.
    """
    length = predicted.from_least(least_tokens).up_to(max(1, most_tokens))
    return length if length.after(generated_count) is not None else None
