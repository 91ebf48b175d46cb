"""The Prometheus metrics that every engine instance has."""

from prometheus_client import CollectorRegistry, Gauge

from kaveri.engine.contract import Engine


def register_block_gauges(engine: Engine, registry: CollectorRegistry) -> None:
    """kaveri_kv_blocks{state="free" | "held"}, read from the engine when scraped."""
    blocks = Gauge("kaveri_kv_blocks", "Blocks of the KV pool by state.", ["state"], registry=registry)
    total = engine.info.total_blocks
    blocks.labels("free").set_function(lambda: engine.stats().free_blocks)
    blocks.labels("held").set_function(lambda: total - engine.stats().free_blocks)
