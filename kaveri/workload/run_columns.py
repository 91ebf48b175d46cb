"""Outcome of a real or simulated run as columns, one entry per request. Summaries are computed from it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

SERVER_PHASES = ("router_s", "prefill_queue_s", "prefill_s", "kv_transfer_s", "kv_tail_s", "decode_queue_s", "decode_s")
"""Parts of a request's time in the cluster, as in kaveri.client.answer.ServerTiming."""

SERVER_LOSSES = ("resumes", "held_tokens", "recomputed_tokens", "stall_s")
"""What instance failures cost a request, as in kaveri.client.answer.ServerTiming."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of a run: arrays with one entry per request."""

    prompt: Whole
    planned: Whole
    """Requested answer length."""
    received: Whole


@dataclass(frozen=True, slots=True)
class Placements:
    """Instances that served each request of a run, as indices into `instance_ids`; -1: unknown."""

    prefill: Whole
    decode: Whole
    instance_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Time between consecutive tokens of an answer, for all answers of a run, in any order."""

    seconds: Floats
    counts: Whole
    """Number of times that each entry of `seconds` occurred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumns:
    """Outcome of a run: arrays with one entry per request, in planned order. Times: seconds after its start, or NaN."""

    due_s: Floats
    """Planned send time of each request."""
    sent_s: Floats
    first_s: Floats
    """Time of the first received token."""
    last_s: Floats
    """Time of the last received token."""
    tokens: TokenCounts
    errors: npt.NDArray[np.str_]
    """Name of the error that ended each request; empty: answered."""
    server: Mapping[str, Floats]
    """Columns named in SERVER_PHASES, and in SERVER_LOSSES if instances can fail; NaN: not reported."""
    placements: Placements
    gaps: TokenGaps
    duration_s: float
    """Seconds from the first request's due time to the end of the last request."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Mask of the requests that ended without an error."""
        answered: npt.NDArray[np.bool_] = self.errors == ""
        return answered

    @property
    def output_tokens(self) -> Whole:
        """Answer lengths: tokens received, or tokens planned for requests that failed."""
        return np.where(self.answered, self.tokens.received, self.tokens.planned)

    def ttft_s(self) -> Floats:
        """Time to first token of each request, from its due time, so it includes the client's delay."""
        return self.first_s - self.due_s

    def tpot_s(self) -> Floats:
        """Time per output token after the first, of each request; NaN without a second token."""
        several = np.where(self.tokens.received >= 2, self.tokens.received, np.nan)
        tpot_s: Floats = (self.last_s - self.first_s) / (several - 1)
        return tpot_s

    def jct_s(self) -> Floats:
        """Job completion time of each request, from its due time to its last token."""
        return self.last_s - self.due_s
