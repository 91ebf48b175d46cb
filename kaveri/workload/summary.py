"""Summarizes a real or simulated run: latencies, SLO attainment, goodput, resource time. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kaveri.workload.requests import HEAVY_OUTPUT_TOKENS, HEAVY_PROMPT_TOKENS, WorkloadClass
from kaveri.workload.resource_time import Phases, resource_times
from kaveri.workload.run_columns import SERVER_LOSSES, SERVER_PHASES, Floats, RunColumns, Whole

LATE_S = 0.02
"""Seconds; a client missed its schedule if 1 % of requests were sent later, or its event loop was delayed by more."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of a request. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, run: RunColumns) -> npt.NDArray[np.bool_]:
        """Mask of the answered requests that met all limits. Without a second token the TPOT limit counts as met."""
        met = run.answered
        if self.ttft_s is not None:
            met &= run.ttft_s() <= self.ttft_s
        if self.tpot_s is not None:
            # NaN exceeds no limit.
            met &= ~(run.tpot_s() > self.tpot_s)
        return met


def summarize(
    run: RunColumns, slo: Slo, phases: Mapping[str, Phases] | None = None, loop_delays_s: Sequence[float] = ()
) -> dict[str, Any]:
    """Summarize one run as JSON values. Latencies are those of answered requests; SLO attainment counts all. phases:
    those that each instance serves, by id, to add resource time. loop_delays_s: event loop delays of the client."""
    answered = run.answered
    met_count = int(slo.met(run).sum())
    late = spread(run.sent_s - run.due_s)
    delay = spread(loop_delays_s)
    return {
        "requests": len(run.due_s),
        "answered": int(answered.sum()),
        "errors": dict(Counter(run.errors[~answered].tolist())),
        "duration_s": run.duration_s,
        "offered_per_s": offered_per_s(run.sent_s),
        "requests_per_s": int(answered.sum()) / run.duration_s,
        "output_tokens_per_s": int(run.tokens.received.sum()) / run.duration_s,
        "ttft_s": spread(run.ttft_s()[answered]),
        "tpot_s": spread(run.tpot_s()[answered]),
        "itl_s": spread(run.gaps.seconds, run.gaps.counts),
        "jct_s": spread(run.jct_s()[answered]),
        "slo_attainment": met_count / len(run.due_s) if slo.is_set else None,
        "goodput_requests_per_s": met_count / run.duration_s if slo.is_set else None,
        "server_s": {phase: spread(run.server[phase][answered]) for phase in SERVER_PHASES},
        "losses": _losses(run),
        "resource_time": {"+".join(key): asdict(times) for key, times in resource_times(run, phases or {}).items()},
        "classes": _classes(run),
        "client": {
            "sent_late_s": late,
            "loop_delay_s": delay,
            "kept_schedule": all(entry is None or entry["p99"] <= LATE_S for entry in (late, delay)),
        },
    }


def offered_per_s(sent_s: Floats) -> float | None:
    """Return the rate at which requests were really sent, per second; None for a single request."""
    span_s = float(sent_s.max() - sent_s.min())
    return (len(sent_s) - 1) / span_s if span_s > 0 else None


def over_runs(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each number over the summaries of several runs that have it."""
    spreads: dict[str, Any] = {}
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        values = [summary[name] for summary in summaries if summary.get(name) is not None]
        nested = [value for value in values if isinstance(value, Mapping)]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if nested:
            spreads[name] = over_runs(nested)
        elif numbers:
            spreads[name] = {"median": median(numbers), "min": min(numbers), "max": max(numbers)}
    return spreads


def spread(values: Sequence[float] | Floats, counts: Whole | None = None) -> dict[str, float] | None:
    """Return mean, percentiles (nearest rank) and maximum, without NaN; None if empty. counts: weights of values."""
    array = np.asarray(values, dtype=np.float64)
    order = np.argsort(array, kind="stable")[: int((~np.isnan(array)).sum())]  # NaN comes last
    if not len(order):
        return None
    ordered = array[order]
    weights = np.ones(len(order), dtype=np.int64) if counts is None else counts[order]
    until = np.cumsum(weights)
    count, total = int(until[-1]), math.fsum((ordered * weights).tolist())
    ranks = {percent: int(np.searchsorted(until, math.ceil(percent / 100 * count))) for percent in (50, 90, 99)}
    percentiles = {f"p{percent}": float(ordered[rank]) for percent, rank in ranks.items()}
    return {"mean": total / count, **percentiles, "max": float(ordered[-1])}


def unless_nan(value: float) -> float | None:
    """Convert a number to JSON, which has no NaN: NaN becomes None."""
    return None if math.isnan(value) else float(value)


def _losses(run: RunColumns) -> dict[str, Any]:
    """Summarize what instance failures cost the answered requests."""
    found = {name: run.server[name][run.answered] for name in SERVER_LOSSES if name in run.server}
    totals = {name: int(np.nansum(column)) for name, column in found.items() if name != "stall_s"}
    stalls_s = found.get("stall_s", np.empty(0))
    return {"requests": int((stalls_s > 0).sum()), **totals, "stall_s": spread(stalls_s[stalls_s > 0])}


def _classes(run: RunColumns) -> dict[str, int]:
    heavy_prompt = run.tokens.prompt > HEAVY_PROMPT_TOKENS
    heavy_output = run.output_tokens > HEAVY_OUTPUT_TOKENS
    codes, firsts, counts = np.unique(heavy_prompt * 2 + heavy_output, return_index=True, return_counts=True)
    names = (WorkloadClass.LPLD, WorkloadClass.LPHD, WorkloadClass.HPLD, WorkloadClass.HPHD)
    # In order of arrival.
    return {names[int(codes[index])].value: int(counts[index]) for index in np.argsort(firsts)}
