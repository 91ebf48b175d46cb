"""Outcome of a run as columns, one entry per request: input of the summaries of real and simulated runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kaveri.workload.latencies import jct, tpot, ttft

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

SERVER_PHASES = ("router_s", "prefill_queue_s", "prefill_s", "kv_transfer_s", "kv_tail_s", "decode_queue_s", "decode_s")
"""Phases of a request's time in the cluster; the names are those of kaveri.client.answer.ServerTiming."""

SERVER_LOSSES = ("resumes", "held_tokens", "recomputed_tokens", "stall_s")
"""Costs of lost instances per request; names as above."""


def _no_gaps() -> Floats:
    return np.empty(0)


def _no_losses() -> Mapping[str, Floats]:
    return {}


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
    prompt_tokens: Whole
    planned_tokens: Whole
    """Requested answer length."""
    received_tokens: Whole
    error: Whole
    """Index into error_names, plus 1. 0: answered."""
    error_names: tuple[str, ...]
    server: Mapping[str, Floats]
    """Seconds by name in SERVER_PHASES; NaN if the cluster did not report it."""
    prefill_instance: Whole
    """Index into instance_ids; -1: unknown."""
    decode_instance: Whole
    instance_ids: tuple[str, ...]
    duration_s: float
    """Seconds from the first request's time to the end of the last."""
    losses: Mapping[str, Floats] = field(default_factory=_no_losses)
    """Values by name in SERVER_LOSSES; NaN if the cluster did not report it. Empty: instances are never lost."""
    gaps_s: Floats = field(default_factory=_no_gaps)
    """Gaps between tokens of one answer, in any order."""
    gap_counts: Whole | None = None
    """Multiplicity of each entry of gaps_s. None: 1."""
    loop_delays_s: Floats = field(default_factory=_no_gaps)
    """Delays of the client that sent the requests."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Mask of the requests that ended without an error."""
        answered: npt.NDArray[np.bool_] = self.error == 0
        return answered

    @property
    def output_tokens(self) -> Whole:
        """Answer length: tokens received, or tokens planned if it was not answered."""
        return np.where(self.answered, self.received_tokens, self.planned_tokens)

    def ttft_s(self) -> Floats:
        return ttft(self.due_s, self.first_s)

    def tpot_s(self) -> Floats:
        """See kaveri.workload.latencies; NaN without a second token."""
        several = np.where(self.received_tokens >= 2, self.received_tokens, np.nan)
        return tpot(self.first_s, self.last_s, several)

    def jct_s(self) -> Floats:
        return jct(self.due_s, self.last_s)
