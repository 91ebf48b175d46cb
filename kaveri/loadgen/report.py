"""Summarizes a run of the load generator with kaveri.workload.summary, as for simulated runs. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kaveri.loadgen.columns import columns_of
from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.workload import summary
from kaveri.workload.latencies import jct_s, tpot_s, ttft_s
from kaveri.workload.resource_time import Phases
from kaveri.workload.summary import Slo, over_runs, spread

__all__ = ["Slo", "jct_s", "over_runs", "row", "spread", "summarize", "tpot_s", "ttft_s"]


def summarize(run: LoadRun, slo: Slo, phases: Mapping[str, Phases] | None = None) -> dict[str, Any]:
    return summary.summarize(columns_of(run), slo, phases)


def row(record: RequestRecord) -> dict[str, Any]:
    """Convert one request to JSON values."""
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
