"""Known and predicted lengths of answers. Pure: no clock, no I/O."""

import enum
from dataclasses import dataclass

from kaveri.domain.sampling import SamplingParams


class RangeEnd(enum.StrEnum):
    """End (low or high) of a predicted range of answer lengths that a policy uses."""

    LOW = "low"
    """Lower end; used by TetriInfer's policies (arXiv 2401.11181, section 5.2.2)."""
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Range of token counts, [low, high), not empty; for instance a predicted answer length."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"[{self.low}, {self.high}) is no range of tokens")

    def after(self, drawn_tokens: int) -> "TokenRange | None":
        """Return the range of tokens that remain of an answer after `drawn_tokens`. None if the answer is longer than
        the range, which was a wrong prediction."""
        if self.high - drawn_tokens <= 1:
            return None
        return TokenRange(max(0, self.low - drawn_tokens), self.high - drawn_tokens)

    def up_to(self, most_tokens: int) -> "TokenRange":
        """Return the range cut to at most `most_tokens` tokens, which is at least 1."""
        if self.high <= most_tokens + 1:
            return self
        return TokenRange(min(self.low, most_tokens), most_tokens + 1)

    def from_least(self, least_tokens: int) -> "TokenRange":
        """Return the range raised to at least `least_tokens` tokens."""
        if self.low >= least_tokens:
            return self
        return TokenRange(least_tokens, max(self.high, least_tokens + 1))

    def at(self, end: RangeEnd) -> int:
        """Return the token count at one end: low, or high - 1."""
        return self.low if end is RangeEnd.LOW else self.high - 1


def known_length(params: SamplingParams, most_tokens: int) -> TokenRange | None:
    """Length of an answer that only max_tokens or the model's length can end; None if it may end earlier. most_tokens:
    answer tokens that the model's length leaves after the prompt, at least 1."""
    if params.max_tokens is None:
        return None
    may_stop = not params.ignore_eos or params.stop or params.stop_token_ids
    if may_stop and params.min_tokens < params.max_tokens:
        return None
    return TokenRange(params.max_tokens, params.max_tokens + 1).up_to(most_tokens)
