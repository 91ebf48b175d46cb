"""Prometheus metrics of an instance's engine, for all its phases."""

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Gauge

from kaveri.domain.view import InstanceLoad, Phase
from kaveri.engine.contract import Engine
from kaveri.hosting.kv_metrics import KvMetrics

BUILD_INFO = Gauge(
    "kaveri_build_info", "1, with the version of this process and what it serves.", ["version", "role", "model"]
)


class PhaseMetrics:
    """Prometheus gauges of each phase's requests and readiness, as of the instance's last heartbeat."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._requests = Gauge(
            "kaveri_phase_requests",
            "Requests of a phase here that are queued, or running; as of the last heartbeat.",
            ["phase", "state", "model"],
            registry=registry,
        )
        self._ready = Gauge(
            "kaveri_phase_ready",
            "1 while this instance takes new requests of a phase, else 0; as of the last heartbeat.",
            ["phase", "model"],
            registry=registry,
        )
        self._model = model

    def note(self, loads: Mapping[Phase, InstanceLoad], ready: Collection[Phase]) -> None:
        """Update the gauges. loads: by served phase; others count as empty. ready: phases that accept requests."""
        for phase in Phase:
            load = loads.get(phase)
            queued, running = (load.waiting_requests, load.running_requests) if load is not None else (0, 0)
            self._requests.labels(phase, "queued", self._model).set(queued)
            self._requests.labels(phase, "running", self._model).set(running)
            self._ready.labels(phase, self._model).set(phase in ready)


def register_engine_metrics(engine: Engine, registry: CollectorRegistry, model: str) -> None:
    """Register gauges of free and held KV blocks, and of KV transfers; read from the engine when scraped."""
    blocks = Gauge("kaveri_kv_blocks", "Blocks of the KV pool by state.", ["state"], registry=registry)
    total = engine.info.total_blocks
    blocks.labels("free").set_function(lambda: engine.stats().free_blocks)
    blocks.labels("held").set_function(lambda: total - engine.stats().free_blocks)
    usage = Gauge(
        "kaveri_kv_usage_ratio", "Share of the KV pool's blocks that is held, 0 to 1.", ["model"], registry=registry
    )
    usage.labels(model).set_function(lambda: 1 - engine.stats().free_blocks / total)
    registry.register(KvMetrics(engine.kv_flow))
