"""Resource time: how long instances were busy, from the timings of requests. Pure: no clock, no I/O."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kaveri.domain.view import Phase
from kaveri.loadgen.driver import LoadRun, RequestRecord

Phases = tuple[Phase, ...]
"""The phases of one instance, in the order of Phase."""


@dataclass(frozen=True, slots=True)
class ResourceTime:
    """Resource time of all instances that serve the same phases, in one run."""

    instances: int
    """Number of instances, including idle ones."""
    busy_s: float
    """Sum over the instances of their busy time."""
    held_s: float
    """Instances times the run's duration: what is paid for if all are kept for the whole run."""


def resource_times(run: LoadRun, phases: Mapping[str, Phases]) -> dict[Phases, ResourceTime]:
    """The run's resource time, by the phases that instances serve.

    After TetriInfer's resource usage time (arXiv 2401.11181, section 5.1): the wall time for which prefill and decode
    instances are busy, from a prompt's arrival in the queue to its first token, and from the landing of a request's KV
    to its last token. Overlapping requests count once. Instances measure the lengths of these spans; a span ends when
    the client received the token, so it is shifted by the time from the instance to the client.

    Not counted: failed requests, all attempts but the last of each request, and KV that waits on a prefill instance for
    room at decode.

    phases: by instance id. An instance that is missing gets those that it served in the run.
    """
    spans = busy_spans(run.records)
    served = {
        instance_id: phases.get(instance_id) or tuple(phase for phase in Phase if phase in by_phase)
        for instance_id, by_phase in spans.items()
    }
    counts = Counter((dict(phases) | served).values())
    busy_s: defaultdict[Phases, float] = defaultdict(float)
    for instance_id, by_phase in spans.items():
        busy_s[served[instance_id]] += covered_s(span for of_phase in by_phase.values() for span in of_phase)
    return {key: ResourceTime(count, busy_s[key], count * run.duration_s) for key, count in sorted(counts.items())}


def busy_spans(records: Iterable[RequestRecord]) -> dict[str, dict[Phase, list[tuple[float, float]]]]:
    """For each instance and phase, the busy spans of its answered requests as (begin_s, end_s) of the run."""
    spans: dict[str, dict[Phase, list[tuple[float, float]]]] = {}
    for record in records:
        server = record.server
        if server is None or record.error is not None or record.first_s is None or record.last_s is None:
            continue
        prefill_s = server.prefill_queue_s + server.prefill_s
        phases = spans.setdefault(server.prefill_instance_id, {})
        phases.setdefault(Phase.PREFILL, []).append((record.first_s - prefill_s, record.first_s))
        if server.decode_s > 0 or server.decode_queue_s > 0:
            decode_s = server.decode_queue_s + server.decode_s
            phases = spans.setdefault(server.decode_instance_id or server.prefill_instance_id, {})
            phases.setdefault(Phase.DECODE, []).append((record.last_s - decode_s, record.last_s))
    return spans


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    pieces: list[float] = []
    until_s = -math.inf
    for begin_s, end_s in sorted(spans):
        if end_s > until_s:
            pieces.append(end_s - max(begin_s, until_s))
            until_s = end_s
    return math.fsum(pieces)
