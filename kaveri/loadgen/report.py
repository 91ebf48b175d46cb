"""Summarizes a run: the cluster's figures, and whether the client was fast enough to measure them. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kaveri.loadgen.busy import Phases, resource_times
from kaveri.loadgen.driver import LoadRun, RequestRecord

LATE_S = 0.02
"""The client missed its schedule if 1 % of requests were sent later than this, or its loop was delayed by more."""
_SERVER_PHASES = (
    "router_s",
    "prefill_queue_s",
    "prefill_s",
    "kv_transfer_s",
    "kv_tail_s",
    "decode_queue_s",
    "decode_s",
)


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits that a request must meet. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether any limit is set."""
        return self.ttft_s is not None or self.tpot_s is not None

    def met_by(self, record: RequestRecord) -> bool:
        """False for a failed request. A request without a second token has no TPOT and meets that limit."""
        if record.error is not None:
            return False
        ttft, tpot = ttft_s(record), tpot_s(record)
        ttft_met = self.ttft_s is None or (ttft is not None and ttft <= self.ttft_s)
        return ttft_met and (self.tpot_s is None or tpot is None or tpot <= self.tpot_s)


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token, from when the request was due, so a client's delay is included."""
    return None if record.first_s is None else record.first_s - record.due_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first."""
    if record.first_s is None or record.last_s is None or record.received_tokens < 2:
        return None
    return (record.last_s - record.first_s) / (record.received_tokens - 1)


def jct_s(record: RequestRecord) -> float | None:
    """Job completion time, from when the request was due to its last token."""
    return None if record.last_s is None else record.last_s - record.due_s


def offered_per_s(run: LoadRun) -> float | None:
    """Requests per second as actually sent. None: a single request has no rate."""
    times_s = [record.sent_s for record in run.records]
    span_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / span_s if span_s > 0 else None


def summarize(run: LoadRun, slo: Slo, phases: Mapping[str, Phases] | None = None) -> dict[str, Any]:
    """One run as JSON values. Latencies are those of answered requests; SLO attainment counts all requests.

    phases: those of each instance, by its id, for the resource time.
    """
    answered = [record for record in run.records if record.error is None]
    met = sum(slo.met_by(record) for record in run.records)
    received = sum(record.received_tokens for record in run.records)
    late = spread([record.sent_s - record.due_s for record in run.records])
    delay = spread(run.loop_delays_s)
    return {
        "requests": len(run.records),
        "answered": len(answered),
        "errors": dict(Counter(record.error for record in run.records if record.error is not None)),
        "duration_s": run.duration_s,
        "offered_per_s": offered_per_s(run),
        "requests_per_s": len(answered) / run.duration_s,
        "output_tokens_per_s": received / run.duration_s,
        "ttft_s": _spread_of(ttft_s, answered),
        "tpot_s": _spread_of(tpot_s, answered),
        "itl_s": spread([gap_s for record in answered for gap_s in record.gaps_s]),
        "jct_s": _spread_of(jct_s, answered),
        "slo_attainment": met / len(run.records) if slo.is_set else None,
        "goodput_requests_per_s": met / run.duration_s if slo.is_set else None,
        "server_s": {
            phase: spread([getattr(record.server, phase) for record in answered if record.server is not None])
            for phase in _SERVER_PHASES
        },
        "resource_time": {"+".join(key): asdict(times) for key, times in resource_times(run, phases or {}).items()},
        "classes": dict(Counter(record.lengths.workload_class.value for record in run.records)),
        "client": {
            "sent_late_s": late,
            "loop_delay_s": delay,
            "kept_schedule": all(entry is None or entry["p99"] <= LATE_S for entry in (late, delay)),
        },
    }


def row(record: RequestRecord) -> dict[str, Any]:
    """One request as JSON values."""
    server = record.server
    return {
        "number": record.planned.number,
        "prompt_tokens": record.lengths.prompt_tokens,
        "output_tokens": record.planned.lengths.output_tokens,
        "received_tokens": record.received_tokens,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ttft_s": ttft_s(record),
        "tpot_s": tpot_s(record),
        "jct_s": jct_s(record),
        "error": record.error,
        "reason": record.reason,
        "server": asdict(server) if server is not None else None,
    }


def over_runs(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of at least one run: the median, smallest and largest value of each.

    Runs that lack a figure are ignored for that figure. Values that are not numbers are left out.
    """
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


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and maximum; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in (50, 90, 99)}
    return {"mean": math.fsum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def _spread_of(
    measure: Callable[[RequestRecord], float | None], records: Sequence[RequestRecord]
) -> dict[str, float] | None:
    return spread([value for record in records if (value := measure(record)) is not None])
