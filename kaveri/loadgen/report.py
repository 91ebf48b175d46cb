"""Summarizes a run of the load generator. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from kaveri.loadgen.driver import LoadRun
from kaveri.workload import summary
from kaveri.workload.resource_time import Phases
from kaveri.workload.run_columns import (
    SERVER_LOSSES,
    SERVER_PHASES,
    Floats,
    Placements,
    RunColumns,
    TokenCounts,
    TokenGaps,
    Whole,
)
from kaveri.workload.summary import Slo, unless_nan

__all__ = ["Slo", "columns_of", "rows", "summarize"]


def summarize(run: LoadRun, slo: Slo, phases: Mapping[str, Phases] | None = None) -> dict[str, Any]:
    """Return kaveri.workload.summary.summarize() of a run."""
    return summary.summarize(columns_of(run), slo, phases, run.loop_delays_s)


def columns_of(run: LoadRun) -> RunColumns:
    """Convert the request records of a run to arrays."""
    records = run.records
    servers = [record.server for record in records]
    prefill_ids = [server.prefill_instance_id if server is not None else "" for server in servers]
    decode_ids = [server.decode_instance_id if server is not None else "" for server in servers]
    instance_ids = tuple(dict.fromkeys(filter(None, (*prefill_ids, *decode_ids))))
    numbers = {instance_id: number for number, instance_id in enumerate(instance_ids)} | {"": -1}
    answers = (record.arrivals_s for record in records if record.error is None)
    gaps_s = _floats(later_s - former_s for arrivals_s in answers for former_s, later_s in pairwise(arrivals_s))
    return RunColumns(
        due_s=_floats(record.due_s for record in records),
        sent_s=_floats(record.sent_s for record in records),
        first_s=_floats(record.first_s for record in records),
        last_s=_floats(record.last_s for record in records),
        tokens=TokenCounts(
            prompt=_whole(record.lengths.prompt_tokens for record in records),
            planned=_whole(record.planned.lengths.output_tokens for record in records),
            received=_whole(record.received_tokens for record in records),
        ),
        errors=np.array([record.error or "" for record in records]),
        server={
            name: _floats(math.nan if server is None else float(getattr(server, name)) for server in servers)
            for name in (*SERVER_PHASES, *SERVER_LOSSES)
        },
        placements=Placements(
            _whole(numbers[instance_id] for instance_id in prefill_ids),
            _whole(numbers[instance_id] for instance_id in decode_ids),
            instance_ids,
        ),
        gaps=TokenGaps(gaps_s, np.ones(len(gaps_s), dtype=np.int64)),
        duration_s=run.duration_s,
    )


def rows(run: LoadRun) -> Iterator[dict[str, Any]]:
    """Yield each request of a run as JSON values."""
    columns = columns_of(run)
    latencies_s = zip(columns.ttft_s(), columns.tpot_s(), columns.jct_s(), strict=True)
    for record, (ttft_s, tpot_s, jct_s) in zip(run.records, latencies_s, strict=True):
        yield {
            "number": record.planned.number,
            "prompt_tokens": record.lengths.prompt_tokens,
            "output_tokens": record.planned.lengths.output_tokens,
            "received_tokens": record.received_tokens,
            "due_s": record.due_s,
            "sent_s": record.sent_s,
            "ttft_s": unless_nan(ttft_s),
            "tpot_s": unless_nan(tpot_s),
            "jct_s": unless_nan(jct_s),
            "error": record.error,
            "reason": record.reason,
            "server": asdict(record.server) if record.server is not None else None,
        }


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def _whole(values: Iterable[int]) -> Whole:
    return np.array(list(values), dtype=np.int64)
