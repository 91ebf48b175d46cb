"""Decisions about length predictions: whom to ask, when not to, what an answer is worth. Pure: no clock, no I/O."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.length import TokenRange

_FIRST_REST_S = 0.1
_LONGEST_REST_S = 2.0
"""A predictor that came back is found within this time."""
_DOUBLINGS = 5
"""Of the first rest, until it is longer than the longest."""
_SLIPS_ALLOWED = 2
"""Late answers and the like, one after the other, before a predictor counts as not working."""


class PredictionMode(enum.StrEnum):
    """When the length of an answer is asked for (TetriInfer, arXiv 2401.11181, section 3.3.2)."""

    PARALLEL = "parallel"
    """Beside the first chunk: known by the time of placement, or unknown."""
    SEQUENTIAL = "sequential"
    """Before the prompt enters the queue."""
    OFF = "off"


class PredictionOutcome(enum.StrEnum):
    """What became of one request's prediction."""

    USED = "used"
    OUTLIVED = "outlived"
    """Earlier attempts have generated more than was predicted."""
    LATE = "late"
    FAILED = "failed"
    NONE = "none"
    """There was nobody to ask."""


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
        """Takes in which life of it is there; a new one need not rest for the former one's failures."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._failures = self._rests = 0

    def may_be_asked(self, now_s: float) -> bool:
        """Not while it rests; after that one question at a time until it answers again."""
        return not self._rests or (now_s >= self._resting_until_s and not self.outstanding_prompts)

    def left(self) -> bool:
        """Takes in that it is gone from the cluster. Returns whether it is news that it does not work."""
        news = self._working is not False
        self._working = False
        return news

    def succeeded(self) -> bool:
        """Takes in a good answer. Returns whether it is news that it works."""
        news = self._working is not True
        self._working = True
        self._failures = self._rests = 0
        return news

    def failed(self, asked_s: float, now_s: float, slip: bool) -> bool:
        """Takes in a failure. It rests after it, twice as long each time; only a slip may pass now and then.

        asked_s: when the question was sent. slip: it may happen to a sound predictor too. Returns whether it is news
        that it does not work.
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


def choose_predictor(candidates: Sequence[PredictorStatus], rng: random.Random) -> PredictorStatus | None:
    """Of two at random the one with fewer waiting prompts; None when there is none."""
    if not candidates:
        return None
    return min(rng.sample(candidates, min(2, len(candidates))), key=lambda candidate: candidate.waiting_prompts)


def usable_length(predicted: TokenRange, generated_count: int, most_tokens: int) -> TokenRange | None:
    """What a prediction says of a whole answer that may have `most_tokens` and has `generated_count` already.

    None when the answer goes on beyond the predicted range: then it says nothing.
    """
    length = predicted.up_to(max(1, most_tokens))
    return length if length.after(generated_count) is not None else None
