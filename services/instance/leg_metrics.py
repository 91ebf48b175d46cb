"""The Prometheus metrics of the legs of disaggregated requests, which other gateways place."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class LegMetrics:
    """One set per process; tests that host several instances give each a registry of its own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.requests = Counter(
            "kaveri_leg_requests",
            "Generate calls of vllm.grpc.engine by leg, prefill or decode, and outcome: stop, length, abort, gone (its "
            "caller), or a gRPC status in lower case.",
            ["leg", "outcome"],
            registry=registry,
        )
        self.recomputes = Counter(
            "kaveri_leg_recomputes",
            "Prompts that a decode leg computed itself by cause: no_hold (none was named), hold_gone, unreachable (its "
            "prefill instance), push_failed, barred_token (the held token must not begin this answer).",
            ["cause"],
            registry=registry,
        )
