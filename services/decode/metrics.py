"""Prometheus metrics of an instance's decode phase."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kaveri.telemetry.metrics import ANSWER_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS_S

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class RequestGauges:
    """Gauges of requests at decode: waiting for KV blocks, without a stream of their router, ended and kept. Their
    values come from functions, called in the thread that serves metrics."""

    in_line: Gauge
    orphans: Gauge
    kept: Gauge


class StepMetrics:
    """Prometheus metrics of decode steps: duration, requests per step, tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kaveri_decode_step_seconds",
            "Between the tokens of two consecutive steps while requests run.",
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._requests = Histogram(
            "kaveri_decode_step_requests",
            "Requests that gained a token in a step.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )
        self._tokens = Counter("kaveri_decode_tokens", "Tokens generated.", registry=registry)
        self._last_s: float | None = None
        self.step_s = 0.0
        """Seconds of the last step; 0 if no request has run since."""

    def count(self, token_counts: Sequence[int], now_s: float, running_count: int) -> None:
        """Count decode steps whose tokens arrived together, each with an equal share of the time since the last call.
        token_counts: tokens of each step, one per request; at least one step. running_count: requests that continue."""
        step_s = None if self._last_s is None else (now_s - self._last_s) / len(token_counts)
        for token_count in token_counts:
            if step_s is not None:
                self._seconds.observe(step_s)
            self._requests.observe(token_count)
        self._tokens.inc(sum(token_counts))
        self._last_s = now_s if running_count else None
        self.step_s = step_s or self.step_s if running_count else 0.0


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.landing_seconds = histogram(
            "kaveri_decode_landing_seconds", "From a reservation to the landing of its KV.", buckets=LATENCY_BUCKETS_S
        )
        self.queue_seconds = histogram(
            "kaveri_decode_queue_seconds",
            "From the landing of the KV to the request's first token here.",
            buckets=LATENCY_BUCKETS_S,
        )
        self.decode_seconds = histogram(
            "kaveri_decode_seconds", "From a request's first to its last token here.", buckets=ANSWER_BUCKETS_S
        )
        self.steps = StepMetrics(registry)
        self.read_tokens = counter(
            "kaveri_decode_read_tokens", "Tokens that callers have read here, and not at routers."
        )
        self.received_bytes = counter("kaveri_kv_received_bytes", "KV bytes landed and verified.")
        self.preemptions = counter("kaveri_decode_preemptions", "Requests preempted because blocks ran out.")
        self.here = RequestGauges(
            gauge("kaveri_decode_line_requests", "Requests that wait for room."),
            gauge("kaveri_decode_orphans", "Requests that go on without a stream of their router."),
            gauge("kaveri_decode_kept_answers", "Answers that have ended and are kept to be repeated."),
        )
        self.attaches = counter("kaveri_decode_attaches", "Requests that were given to a later session or attempt.")
        self.requests = counter(
            "kaveri_decode_requests",
            "Requests by outcome: finished, aborted, replaced, deadline, no_room, left_line, refused, not_landed, "
            "router_gone, moved or failed.",
            ["outcome"],
        )
