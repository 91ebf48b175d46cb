"""Prometheus metrics of an instance's prefill phase."""

from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kaveri.telemetry.metrics import LATENCY_BUCKETS_S


@dataclass(frozen=True, slots=True)
class TransferMetrics:
    """Prometheus metrics of KV pushes to decode instances."""

    seconds: Histogram
    tail_seconds: Histogram
    bytes: Counter


@dataclass(frozen=True, slots=True)
class ForecastMetrics:
    """Prometheus metrics of predicted answer lengths: outcomes, and duration of predictor calls."""

    outcomes: Counter
    seconds: Histogram


class PrefillMetrics:
    """Prometheus metrics of an instance's prefill phase; one set per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=LATENCY_BUCKETS_S)
        self.queue_seconds = histogram(
            "kaveri_prefill_queue_seconds", "From a request's arrival to the start of its first chunk."
        )
        self.prefill_seconds = histogram(
            "kaveri_prefill_seconds", "From the start of a request's first chunk to its first token."
        )
        self.transfers = TransferMetrics(
            histogram(
                "kaveri_kv_transfer_seconds", "From the ticket to the acceptance of the KV; overlaps the prefill."
            ),
            histogram(
                "kaveri_kv_tail_seconds",
                "From the first token to the acceptance of the KV: what the prefill did not hide.",
            ),
            counter("kaveri_kv_transfer_bytes", "KV bytes pushed and accepted.", ["transport"]),
        )
        self.tokens = counter("kaveri_prefill_tokens", "Prompt tokens computed.")
        self.requests = counter(
            "kaveri_prefill_requests",
            "Requests by outcome: handed_over, finished (with the first token), cancelled, deadline, refused, "
            "given_back (by a drain, before it was begun), released (held, and not pushed), failed.",
            ["outcome"],
        )
        self.placements = counter(
            "kaveri_prefill_placements",
            "Attempts to place a request by outcome: reserved, no_room, unavailable, push_failed.",
            ["outcome"],
        )
        self.forecasts = ForecastMetrics(
            counter(
                "kaveri_predictions",
                "Length predictions by outcome: used, outlived (the answer is longer already), late, failed, none.",
                ["outcome"],
            ),
            histogram("kaveri_prediction_seconds", "From asking a predictor to its answer; one sample a call."),
        )
        self.waiting = gauge("kaveri_prefill_queued_tokens", "Tokens accepted and not computed yet.")
        self.orphans = gauge("kaveri_prefill_orphans", "Prompts that go on without a stream of their router.")
        self.attaches = counter("kaveri_prefill_attaches", "Requests that were given to a later session.")
