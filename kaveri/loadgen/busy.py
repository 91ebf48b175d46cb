"""Resource time: how long instances were busy, from the timings of requests. Pure: no clock, no I/O."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kaveri.domain.view import Role
from kaveri.loadgen.driver import LoadRun, RequestRecord


@dataclass(frozen=True, slots=True)
class RoleTime:
    """Resource time of all instances of one role in one run."""

    instances: int
    """Number of instances, including idle ones."""
    busy_s: float
    """Sum over the instances of their busy time."""
    held_s: float
    """Instances times the run's duration: what is paid for if all are kept for the whole run."""


def resource_times(run: LoadRun, roles: Mapping[str, Role]) -> dict[Role, RoleTime]:
    """The run's resource time by role, after TetriInfer's resource usage time (arXiv 2401.11181, section 5.1).

    That is the wall time for which prefill and decode instances are busy: from a prompt's arrival in the queue to its
    first token, and from the landing of a request's KV to its last token. Overlapping requests count once. Instances
    measure the lengths of these spans; a span ends when the client received the token, so it is shifted by the time
    from the instance to the client.

    Not counted: failed requests, all attempts but the last of each request, and KV that waits on a prefill instance for
    room at decode.

    roles: role by instance id. An instance that is missing gets the role that it had in the run.
    """
    spans = busy_spans(run.records)
    named = {instance_id: roles.get(instance_id) or _role_of(phases) for instance_id, phases in spans.items()}
    counts = Counter((dict(roles) | named).values())
    busy_s: defaultdict[Role, float] = defaultdict(float)
    for instance_id, phases in spans.items():
        busy_s[named[instance_id]] += covered_s(span for of_phase in phases.values() for span in of_phase)
    return {role: RoleTime(count, busy_s[role], count * run.duration_s) for role, count in sorted(counts.items())}


def busy_spans(records: Iterable[RequestRecord]) -> dict[str, dict[Role, list[tuple[float, float]]]]:
    """For each instance and phase, the busy spans of its answered requests as (begin_s, end_s) of the run."""
    spans: dict[str, dict[Role, list[tuple[float, float]]]] = {}
    for record in records:
        server = record.server
        if server is None or record.error is not None or record.first_s is None or record.last_s is None:
            continue
        prefill_s = server.prefill_queue_s + server.prefill_s
        phases = spans.setdefault(server.prefill_instance_id, {})
        phases.setdefault(Role.PREFILL, []).append((record.first_s - prefill_s, record.first_s))
        if server.decode_s > 0 or server.decode_queue_s > 0:
            decode_s = server.decode_queue_s + server.decode_s
            phases = spans.setdefault(server.decode_instance_id or server.prefill_instance_id, {})
            phases.setdefault(Role.DECODE, []).append((record.last_s - decode_s, record.last_s))
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


def _role_of(phases: Iterable[Role]) -> Role:
    only = set(phases)
    return Role.COLOCATED if len(only) > 1 else only.pop()
