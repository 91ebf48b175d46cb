"""The Prometheus metrics of an instance's engine, whatever phases it serves."""

from prometheus_client import CollectorRegistry, Gauge

from kaveri.engine.contract import Engine
from kaveri.hosting.kv_metrics import ReceivingMetrics, SendingMetrics


def register_engine_metrics(engine: Engine, registry: CollectorRegistry) -> None:
    """kaveri_kv_blocks{state="free" | "held"} and the flow of KV, read from the engine when scraped."""
    blocks = Gauge("kaveri_kv_blocks", "Blocks of the KV pool by state.", ["state"], registry=registry)
    total = engine.info.total_blocks
    blocks.labels("free").set_function(lambda: engine.stats().free_blocks)
    blocks.labels("held").set_function(lambda: total - engine.stats().free_blocks)
    registry.register(SendingMetrics(engine.kv_flow))
    registry.register(ReceivingMetrics(engine.kv_flow))
