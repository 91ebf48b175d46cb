"""Resource time: how long instances were busy, computed from request timings. Pure: no clock, no I/O."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kaveri.workload.run_columns import Floats, RunColumns

Phases = tuple[str, ...]
"""The phases of one instance: prefill, decode or both, in this order."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class ResourceTime:
    """Time in one run for which all instances that serve the same phases were busy, and were kept (busy or idle)."""

    instances: int
    """Number of instances, including idle ones."""
    busy_s: float
    """Sum over the instances of their busy time."""
    held_s: float
    """Instances times the run's duration: what is paid for if all are kept for the whole run."""


def resource_times(run: RunColumns, phases: Mapping[str, Phases]) -> dict[Phases, ResourceTime]:
    """Return the resource time of a run, by the phases that instances serve. phases: by instance id; if missing, those
    seen in the run.

    TetriInfer's resource usage time (arXiv 2401.11181, section 5.1): wall time for which an instance is busy: prefill
    from a prompt's arrival in the queue to its first token, decode from the arrival of a request's KV to its last
    token. Overlapping requests count once. Instances measure the lengths of these spans; each is placed to end when the
    client received the token, later than it did on the instance.

    Not counted: failed requests, earlier placements of a retried request, and KV that waits on a prefill instance.
    """
    spans = busy_spans(run)
    served = {
        instance_id: phases.get(instance_id) or tuple(phase for phase in (PREFILL, DECODE) if phase in by_phase)
        for instance_id, by_phase in spans.items()
    }
    counts = Counter((dict(phases) | served).values())
    busy_s: defaultdict[Phases, float] = defaultdict(float)
    for instance_id, by_phase in spans.items():
        busy_s[served[instance_id]] += covered_s(np.concatenate(list(by_phase.values())))
    return {key: ResourceTime(count, busy_s[key], count * run.duration_s) for key, count in sorted(counts.items())}


def busy_spans(run: RunColumns) -> dict[str, dict[str, Floats]]:
    """Return the busy spans of each instance by phase: rows of (begin, end) in seconds, one per answered request."""
    server, placements = run.server, run.placements
    known = run.answered & ~np.isnan(server["prefill_s"]) & ~np.isnan(run.last_s)
    prefill_s = server["prefill_queue_s"] + server["prefill_s"]
    decode_s = server["decode_queue_s"] + server["decode_s"]
    decode_at = np.where(placements.decode >= 0, placements.decode, placements.prefill)
    spans: dict[str, dict[str, Floats]] = {}
    for phase, mask, at, ends_s, taken_s in (
        (PREFILL, known, placements.prefill, run.first_s, prefill_s),
        (DECODE, known & (decode_s > 0), decode_at, run.last_s, decode_s),
    ):
        numbers = np.nonzero(mask)[0]
        numbers = numbers[np.argsort(at[numbers], kind="stable")]
        pairs = np.column_stack((ends_s[numbers] - taken_s[numbers], ends_s[numbers]))
        instances, starts = np.unique(at[numbers], return_index=True)
        for instance, rows in zip(instances.tolist(), np.split(pairs, starts[1:]), strict=False):
            spans.setdefault(placements.instance_ids[instance], {})[phase] = rows
    return spans


def covered_s(spans: Floats) -> float:
    """Return the total length of the union of spans, given as rows of (begin, end)."""
    if not len(spans):
        return 0.0
    ordered = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    begins, ends = ordered[:, 0], ordered[:, 1]
    until = np.concatenate(([-np.inf], np.maximum.accumulate(ends)[:-1]))
    return math.fsum(np.maximum(0.0, ends - np.maximum(begins, until)).tolist())
