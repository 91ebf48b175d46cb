"""Prometheus metrics of a gateway process, in Prometheus' global registry."""

from prometheus_client import Counter, Gauge, Histogram

from kaveri.security.keys_file import KEYS_FILE_REFUSED  # noqa: F401 - one of these metrics
from kaveri.telemetry.metrics import LATENCY_BUCKETS_S

REQUESTS = Counter("kaveri_gateway_requests", "HTTP requests by path and status.", ["path", "status"])
IN_FLIGHT = Gauge("kaveri_gateway_in_flight_answers", "Answers that routers were asked for and that have not ended.")
BODY_BYTES = Gauge(
    "kaveri_gateway_body_bytes", "Size of the bodies of the requests in flight, and of the reports on their prompts."
)
CONNECTIONS = Gauge("kaveri_gateway_connections", "Open HTTP connections.")
TOKENS = Counter("kaveri_gateway_streamed_tokens", "Tokens of answers that were written as events.")
TTFT_S = Histogram(
    "kaveri_gateway_ttft_seconds", "From an HTTP request's arrival to its first token.", buckets=LATENCY_BUCKETS_S
)
