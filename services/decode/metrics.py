"""The Prometheus metrics of a decode instance."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kaveri.engine.contract import Engine
from kaveri.hosting.kv_metrics import ReceivingMetrics
from kaveri.hosting.metrics import register_block_gauges
from kaveri.telemetry.metrics import LATENCY_BUCKETS_S

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class DecodeMetrics:
    """One set per process; tests that host several instances give each a registry of its own."""

    def __init__(self, engine: Engine | None, registry: CollectorRegistry = REGISTRY) -> None:
        """engine: whose blocks are shown. None: other metrics in the registry show them."""
        self.landing_seconds = Histogram(
            "kaveri_decode_landing_seconds",
            "From a reservation to the landing of its KV.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "kaveri_decode_queue_seconds",
            "From the landing of the KV to the request's first token here.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.decode_seconds = Histogram(
            "kaveri_decode_seconds",
            "From a request's first to its last token here.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.step_seconds = Histogram(
            "kaveri_decode_step_seconds",
            "Between the tokens of two consecutive steps while requests run.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.step_requests = Histogram(
            "kaveri_decode_step_requests",
            "Requests that gained a token in a step.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )
        self.tokens = Counter("kaveri_decode_tokens", "Tokens generated.", registry=registry)
        self.received_bytes = Counter("kaveri_kv_received_bytes", "KV bytes landed and verified.", registry=registry)
        self.preemptions = Counter(
            "kaveri_decode_preemptions", "Requests preempted because blocks ran out.", registry=registry
        )
        self.in_line = Gauge(
            "kaveri_decode_line_requests",
            "Requests that wait for room.",
            registry=registry,
        )
        self.requests = Counter(
            "kaveri_decode_requests",
            "Requests by outcome: finished, aborted, replaced, deadline, no_room, left_line, refused, not_landed, "
            "router_gone or failed.",
            ["outcome"],
            registry=registry,
        )
        if engine is not None:
            register_block_gauges(engine, registry)
            registry.register(ReceivingMetrics(engine.kv_flow))
