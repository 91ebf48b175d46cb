"""The outcome of a run as columns, one entry per request: what the summaries of real and simulated runs are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kaveri.workload.latencies import jct, tpot, ttft

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

SERVER_PHASES = (
    "router_s",
    "prefill_queue_s",
    "prefill_s",
    "kv_transfer_s",
    "kv_tail_s",
    "decode_queue_s",
    "decode_s",
)
"""Where a request spends its time in the cluster; the names are those of kaveri.client.answer.ServerTiming."""

SERVER_LOSSES = ("resumes", "held_tokens", "recomputed_tokens", "stall_s")
"""What losses of instances cost a request; names as above."""


def _no_gaps() -> Floats:
    return np.empty(0)


def _no_losses() -> Mapping[str, Floats]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumns:
    """One run, in planned order. Times are seconds after its start; NaN: it did not happen."""

    due_s: Floats
    """When each request should have been sent."""
    sent_s: Floats
    first_s: Floats
    """First token received."""
    last_s: Floats
    """Last token received."""
    prompt_tokens: Whole
    planned_tokens: Whole
    """Of the answer, as asked for."""
    received_tokens: Whole
    error: Whole
    """Index into error_names, plus 1. 0: it was answered."""
    error_names: tuple[str, ...]
    server: Mapping[str, Floats]
    """For each of SERVER_PHASES, seconds; NaN where the cluster has not said."""
    prefill_instance: Whole
    """Index into instance_ids; -1: not known."""
    decode_instance: Whole
    instance_ids: tuple[str, ...]
    duration_s: float
    """From the first request's time to the end of the last."""
    losses: Mapping[str, Floats] = field(default_factory=_no_losses)
    """For each of SERVER_LOSSES; NaN where the cluster has not said. Empty: nothing is ever lost."""
    gaps_s: Floats = field(default_factory=_no_gaps)
    """Times between tokens of one answer, in any order."""
    gap_counts: Whole | None = None
    """How often each entry of gaps_s occurred. None: once."""
    loop_delays_s: Floats = field(default_factory=_no_gaps)
    """Delays of the client that sent the requests."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which requests ended without an error."""
        answered: npt.NDArray[np.bool_] = self.error == 0
        return answered

    @property
    def output_tokens(self) -> Whole:
        """Of the answer: those received, or those planned where it was not answered."""
        return np.where(self.answered, self.received_tokens, self.planned_tokens)

    def ttft_s(self) -> Floats:
        """See kaveri.workload.latencies."""
        return ttft(self.due_s, self.first_s)

    def tpot_s(self) -> Floats:
        """See kaveri.workload.latencies; NaN where there was no second token."""
        several = np.where(self.received_tokens >= 2, self.received_tokens, np.nan)
        return tpot(self.first_s, self.last_s, several)

    def jct_s(self) -> Floats:
        """See kaveri.workload.latencies."""
        return jct(self.due_s, self.last_s)
