"""The router's Prometheus metrics, and service discovery for those of the whole cluster."""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kaveri.domain.view import ClusterView
from kaveri.security.keys_file import KEYS_FILE_REFUSED  # noqa: F401 - one of these metrics
from kaveri.telemetry.metrics import ANSWER_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS_S

REQUESTS = Counter("kaveri_router_requests", "Requests that ended, by outcome.", ["outcome"])
IN_FLIGHT = Gauge("kaveri_router_in_flight_requests", "Requests that were taken and have not ended.")
UNREAD = Gauge("kaveri_router_unread_answers", "Ended requests whose slow client has not read the error yet.")
BODY_BYTES = Gauge("kaveri_router_body_bytes", "Size of the requests in flight, as they came.")
WAITING = Gauge("kaveri_router_waiting_requests", "Requests that no prefill instance takes now.")
ATTEMPTS = Counter("kaveri_router_attempts", "Placements of requests on prefill instances.")
LOST_ATTEMPTS = Counter("kaveri_router_lost_attempts", "Placements that failed; the request was placed again.")
SUSPICIONS = Counter("kaveri_router_suspicions", "Times that an instance went silent while requests waited for it.")
REATTACHES = Counter(
    "kaveri_router_reattaches",
    "Requests of clients that re-attached, by outcome: taken_over, placed_again because no instance had them, or "
    "owner_lost: the holder of the replica is asked.",
    ["outcome"],
)
RESUMES = Counter(
    "kaveri_router_resumes",
    "Requests whose decode instance was lost and whose replica's holder was asked to go on, by outcome: resumed, "
    "not_found, no_room, unavailable or refused. All but the first are computed again.",
    ["outcome"],
)
STALL_S = Histogram(
    "kaveri_router_stall_seconds",
    "From the last token before the loss of an instance to the next one, by what came after: resumed or recomputed.",
    ["outcome"],
    buckets=LATENCY_BUCKETS_S,
)
RELAYED_TOKENS = Counter("kaveri_router_relayed_tokens", "Tokens received from decode instances.")
TTFT_S = Histogram("kaveri_router_ttft_seconds", "Arrival to first token.", buckets=LATENCY_BUCKETS_S)
TPOT_S = Histogram(
    "kaveri_router_tpot_seconds", "Mean time per token after the first, one sample a request.", buckets=TOKEN_BUCKETS_S
)
E2E_S = Histogram("kaveri_router_e2e_seconds", "Arrival to last token.", buckets=ANSWER_BUCKETS_S)
MONITOR_LEADING = Gauge("kaveri_monitor_leading", "1 while this router leads the cluster monitor, else 0.")
MONITOR_BROADCASTS = Counter("kaveri_monitor_broadcasts", "Loads of all instances sent to prefill instances.")
MONITOR_TAKEOVERS = Counter("kaveri_monitor_takeovers", "Times that this router began to lead the cluster monitor.")
FLIPS_DECIDED = Counter(
    "kaveri_flips_decided",
    "Decisions of --flip-policy that an instance changes its phase, by the phases that it shall serve.",
    ["phases"],
)
FLIPS_FAILED = Counter(
    "kaveri_flips_failed", "Orders of --flip-policy and of partners that the instance did not accept or answer."
)

_RARE = (
    (FLIPS_DECIDED, ("prefill", "decode", "decode+prefill")),
    (REQUESTS, ("unavailable", "resource_exhausted", "deadline_exceeded", "internal")),
    (REATTACHES, ("taken_over", "placed_again", "owner_lost")),
    (RESUMES, ("resumed", "not_found", "no_room", "unavailable", "refused")),
    (STALL_S, ("resumed", "recomputed")),
)
for _metric, _outcomes in _RARE:
    for _outcome in _outcomes:
        # Create these series at once: Prometheus counts no increase for the first value of a series.
        _metric.labels(_outcome)


def metrics_targets(view: ClusterView) -> list[dict[str, Any]]:
    """One target group per instance with metrics, in the format of Prometheus' HTTP service discovery."""
    return [
        {
            "targets": [status.record.metrics_address],
            "labels": {
                "kaveri_instance_id": status.record.instance_id,
                "kaveri_role": str(status.record.role),
                "__meta_kaveri_phases": ",".join(status.record.phases),
                "__meta_kaveri_model": status.record.model,
                "__meta_kaveri_version": status.record.version,
            },
        }
        for status in view.instances.values()
        if status.record.metrics_address
    ]
