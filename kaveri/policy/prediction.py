"""Decisions about length predictions: which predictor to ask, when, how long to wait, and what an answer is worth.

Pure: no clock, no I/O.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.length import TokenRange
from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError, NoCapacity

_ANSWER_WITHIN_S = 2.0
"""A predictor that takes longer beside the first chunk does not work."""
_FIRST_REST_S = 0.1
_LONGEST_REST_S = 2.0
"""A predictor that came back is found within this time."""
_DOUBLINGS = 5
"""Of the first rest, until it is longer than the longest."""
_SLIPS_ALLOWED = 2
"""Consecutive failures, such as late answers, before a predictor counts as not working."""


class PredictionMode(enum.StrEnum):
    """When the length of an answer is asked for (TetriInfer, arXiv 2401.11181, section 3.3.2)."""

    PARALLEL = "parallel"
    """Beside the first chunk: known by the time of placement, or unknown."""
    SEQUENTIAL = "sequential"
    """Before the prompt enters the queue."""
    OFF = "off"

    @property
    def comes_first(self) -> bool:
        """Whether a request waits for its answer before it is queued."""
        return self is PredictionMode.SEQUENTIAL


class PredictionOutcome(enum.StrEnum):
    """How one request's prediction was used."""

    USED = "used"
    OUTLIVED = "outlived"
    """Earlier attempts have generated more than was predicted."""
    LATE = "late"
    FAILED = "failed"
    NONE = "none"
    """There was no predictor to ask."""


@dataclass(frozen=True, slots=True)
class PredictorStatus:
    """A predictor that may be asked."""

    name: str
    """Its instance id, or the address where an operator said that it is."""
    incarnation: int
    address: str
    waiting_prompts: int
    """As of its last heartbeat, and what was sent from here and not answered."""


class PredictorHealth:
    """What is known of one predictor's answers. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self.outstanding_prompts = 0
        self._incarnation: int | None = None
        self._working: bool | None = None
        self._failures = 0
        self._failed_at_s = -1.0
        self._rests = 0
        self._resting_until_s = -1.0

    def reborn(self, incarnation: int) -> None:
        """Notes which life of it is there. A new one does not rest for the failures of the former one."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._failures = self._rests = 0

    def may_be_asked(self, now_s: float) -> bool:
        """Not while it rests; after that one question at a time until it answers again."""
        return not self._rests or (now_s >= self._resting_until_s and not self.outstanding_prompts)

    def left(self) -> bool:
        """Notes that it is gone from the cluster. True if this changed it to not working."""
        news = self._working is not False
        self._working = False
        return news

    def succeeded(self) -> bool:
        """Notes a good answer. True if this changed it to working."""
        news = self._working is not True
        self._working = True
        self._failures = self._rests = 0
        return news

    def failed(self, asked_s: float, now_s: float, slip: bool) -> bool:
        """Notes a failure. The predictor rests, twice as long each time; a few slips in a row are passed over.

        asked_s: when the question was sent. slip: see is_slip(). True if this changed it to not working.
        """
        if asked_s < self._failed_at_s:
            return False  # sent before the last failure: the same one again
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
    """Seconds that a predictor has. budget_s: those that a request may wait where predictions come first."""
    return budget_s if mode.comes_first else _ANSWER_WITHIN_S


def is_slip(mode: PredictionMode, error: KaveriError) -> bool:
    """Whether a sound predictor fails like this now and then: it is busy or full, or the prompt is odd.

    Only before the queue is the time short: beside the first chunk a sound predictor is never late.
    """
    if isinstance(error, DeadlineExceeded):
        return mode.comes_first
    return isinstance(error, InvalidArgument | NoCapacity)


def failure_outcome(mode: PredictionMode, error: KaveriError) -> PredictionOutcome:
    """How a prediction that ended with an error is counted."""
    late = mode.comes_first and isinstance(error, DeadlineExceeded)
    return PredictionOutcome.LATE if late else PredictionOutcome.FAILED


def choose_predictor(candidates: Sequence[PredictorStatus], rng: random.Random) -> PredictorStatus | None:
    """Of two at random the one with fewer waiting prompts; None when there is none."""
    if not candidates:
        return None
    return min(rng.sample(candidates, min(2, len(candidates))), key=lambda candidate: candidate.waiting_prompts)


def usable_length(
    predicted: TokenRange, generated_count: int, most_tokens: int, least_tokens: int = 0
) -> TokenRange | None:
    """What a prediction says of a whole answer that may have `most_tokens` and has `generated_count` already.

    least_tokens: what it has at its end, at least; min_tokens, which predictors do not know. Not above most_tokens.
    None when the answer goes on beyond the predicted range: then it says nothing.
    """
    length = predicted.from_least(least_tokens).up_to(max(1, most_tokens))
    return length if length.after(generated_count) is not None else None
