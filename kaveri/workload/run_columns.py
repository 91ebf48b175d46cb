"""Outcome of a run as columns, one entry per request: input of the summaries of real and simulated runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

SERVER_PHASES = ("router_s", "prefill_queue_s", "prefill_s", "kv_transfer_s", "kv_tail_s", "decode_queue_s", "decode_s")
"""Phases of a request's time in the cluster; the names are those of kaveri.client.answer.ServerTiming."""

SERVER_LOSSES = ("resumes", "held_tokens", "recomputed_tokens", "stall_s")
"""Costs of lost instances per request; names as above."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of each request."""

    prompt: Whole
    planned: Whole
    """Requested answer length."""
    received: Whole


@dataclass(frozen=True, slots=True)
class Placements:
    """Instances that served each request, as indices into `instance_ids`; -1: unknown."""

    prefill: Whole
    decode: Whole
    instance_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Gaps between tokens of one answer, in any order."""

    seconds: Floats
    counts: Whole
    """Multiplicity of each entry of `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumns:
    """One run, in planned order. Times are seconds after its start; NaN: it did not happen."""

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
    """Values by name in SERVER_PHASES, and in SERVER_LOSSES if instances can be lost; NaN if the cluster did not report
    it."""
    placements: Placements
    gaps: TokenGaps
    duration_s: float
    """Seconds from the first request's time to the end of the last."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Mask of the requests that ended without an error."""
        answered: npt.NDArray[np.bool_] = self.errors == ""
        return answered

    @property
    def output_tokens(self) -> Whole:
        """Answer length: tokens received, or tokens planned if it was not answered."""
        return np.where(self.answered, self.tokens.received, self.tokens.planned)

    def ttft_s(self) -> Floats:
        """Time to first token, from when the request was due, so a client's delay is included."""
        return self.first_s - self.due_s

    def tpot_s(self) -> Floats:
        """Time per output token after the first; NaN without a second token."""
        several = np.where(self.tokens.received >= 2, self.tokens.received, np.nan)
        tpot_s: Floats = (self.last_s - self.first_s) / (several - 1)
        return tpot_s

    def jct_s(self) -> Floats:
        """Job completion time, from when the request was due to its last token."""
        return self.last_s - self.due_s
