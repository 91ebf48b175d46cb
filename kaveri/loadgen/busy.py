"""Resource time of a run of records: see kaveri.workload.resource_time."""

from collections.abc import Iterable, Mapping

import numpy as np

from kaveri.domain.view import Phase
from kaveri.loadgen.columns import columns_of, columns_of_records
from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.workload import resource_time
from kaveri.workload.resource_time import ResourceTime

Phases = tuple[Phase, ...]
"""The phases of one instance, in the order of Phase."""


def resource_times(run: LoadRun, phases: Mapping[str, Phases]) -> dict[resource_time.Phases, ResourceTime]:
    """See kaveri.workload.resource_time."""
    return resource_time.resource_times(columns_of(run), phases)


def busy_spans(records: Iterable[RequestRecord]) -> dict[str, dict[Phase, list[tuple[float, float]]]]:
    """Busy spans of answered requests by instance and phase, as (begin_s, end_s) of the run."""
    spans = resource_time.busy_spans(columns_of_records(records))
    return {
        instance_id: {Phase(phase): [tuple(span) for span in rows.tolist()] for phase, rows in by_phase.items()}
        for instance_id, by_phase in spans.items()
    }


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    return resource_time.covered_s(np.array(list(spans), dtype=np.float64).reshape(-1, 2))
