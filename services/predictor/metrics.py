"""Prometheus metrics of a predictor instance."""

from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kaveri.telemetry.metrics import LATENCY_BUCKETS_S

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class PredictorMetrics:
    """Prometheus metrics of one predictor instance, registered in the given registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.seconds = histogram(
            "kaveri_predictor_seconds", "From a prompt's arrival to its prediction.", buckets=LATENCY_BUCKETS_S
        )
        self.queue_seconds = histogram(
            "kaveri_predictor_queue_seconds",
            "From a prompt's arrival to the start of its batch.",
            buckets=LATENCY_BUCKETS_S,
        )
        self.batch_seconds = histogram(
            "kaveri_predictor_batch_seconds", "Computing one batch.", buckets=LATENCY_BUCKETS_S
        )
        self.batch_prompts = histogram("kaveri_predictor_batch_prompts", "Prompts of a batch.", buckets=_BATCH_BUCKETS)
        self.waiting = Gauge(
            "kaveri_predictor_waiting_prompts", "Prompts that wait for their batch.", registry=registry
        )
        self.prompts = counter(
            "kaveri_predictor_prompts",
            "Prompts by outcome: predicted, refused (queue full), dropped (cancelled or expired), failed.",
            ["outcome"],
        )
        self.truncated = counter(
            "kaveri_predictor_truncated_prompts", "Prompts that were longer than the predictor reads."
        )
