"""How tokens are drawn and why a request ends: the domain values behind sampling.proto."""

import enum
import math
from dataclasses import dataclass

from kaveri.errors import InvalidArgument

MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
_UINT64_MAX = 2**64 - 1


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    Construction raises InvalidArgument, naming field, value and limit.
    """

    max_tokens: int | None = None
    """Most tokens to generate, at least 1. None: as many as the model's length leaves after the prompt."""
    temperature: float = 1.0
    """Divides the logits. 0 is greedy."""
    top_p: float = 1.0
    """Draw only from the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    top_k: int = 0
    """Draw only from the top_k most likely tokens. 0: all."""
    seed: int | None = None
    """Keys the draws together with the token's index, in [0, 2**64). None: the router draws one."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the text is cut before the match."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones. None: no report."""

    def __post_init__(self) -> None:
        # One plain string is the commonest slip, and a tuple of its letters the worst reading of it.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidArgument("params.max_tokens", self.max_tokens, "at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument("params.temperature", self.temperature, "a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument("params.top_p", self.top_p, "in (0, 1]")
        if self.top_k < 0:
            raise InvalidArgument("params.top_k", self.top_k, "at least 0")
        if self.seed is not None and not 0 <= self.seed <= _UINT64_MAX:
            raise InvalidArgument("params.seed", self.seed, "in [0, 2**64)")
        if len(self.stop) > MAX_STOP_TEXTS:
            raise InvalidArgument("params.stop", f"{len(self.stop)} texts", f"at most {MAX_STOP_TEXTS} texts")
        for text in self.stop:
            if not 0 < len(text.encode()) <= MAX_STOP_TEXT_BYTES:
                raise InvalidArgument("params.stop", text, f"texts of 1 to {MAX_STOP_TEXT_BYTES} bytes")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            count = f"{len(self.stop_token_ids)} ids"
            raise InvalidArgument("params.stop_token_ids", count, f"at most {MAX_STOP_TOKEN_IDS} ids")
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise InvalidArgument("params.stop_token_ids", self.stop_token_ids, "ids of at least 0")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidArgument("params.logprobs", self.logprobs, f"in [0, {MAX_LOGPROBS}]")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model thought of one generated position, before temperature, top_k and top_p."""

    logprob: float
    """Natural logarithm of the drawn token's probability."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, the likeliest first."""
