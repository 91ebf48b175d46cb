"""The Prometheus metrics of an instance's prefill phase."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kaveri.telemetry.metrics import LATENCY_BUCKETS_S


class PrefillMetrics:
    """One set per process; tests that host several instances give each a registry of its own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.queue_seconds = Histogram(
            "kaveri_prefill_queue_seconds",
            "From a request's arrival to the start of its first chunk.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "kaveri_prefill_seconds",
            "From the start of a request's first chunk to its first token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "kaveri_kv_transfer_seconds",
            "From the ticket to the acceptance of the KV; overlaps the prefill.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.tail_seconds = Histogram(
            "kaveri_kv_tail_seconds",
            "From the first token to the acceptance of the KV: what the prefill did not hide.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "kaveri_kv_transfer_bytes", "KV bytes pushed and accepted.", ["transport"], registry=registry
        )
        self.tokens = Counter("kaveri_prefill_tokens", "Prompt tokens computed.", registry=registry)
        self.requests = Counter(
            "kaveri_prefill_requests",
            "Requests by outcome: handed_over, finished (with the first token), cancelled, deadline, refused, "
            "given_back (by a drain, before it was begun), released (held, and not pushed), failed.",
            ["outcome"],
            registry=registry,
        )
        self.placements = Counter(
            "kaveri_prefill_placements",
            "Attempts to place a request by outcome: reserved, no_room, unavailable, push_failed.",
            ["outcome"],
            registry=registry,
        )
        self.predictions = Counter(
            "kaveri_predictions",
            "Length predictions by outcome: used, outlived (the answer is longer already), late, failed, none.",
            ["outcome"],
            registry=registry,
        )
        self.prediction_seconds = Histogram(
            "kaveri_prediction_seconds",
            "From asking a predictor to its answer; one sample a call.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.waiting = Gauge("kaveri_prefill_queued_tokens", "Tokens accepted and not computed yet.", registry=registry)
        self.orphans = Gauge(
            "kaveri_prefill_orphans", "Requests that go on without a router that reads about them.", registry=registry
        )
        self.attaches = Counter(
            "kaveri_prefill_attaches", "Requests that were given to a later session.", registry=registry
        )
