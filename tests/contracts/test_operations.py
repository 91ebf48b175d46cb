"""docs/operations.md lists every metric that the services register, and no other. Says nothing about the values."""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import services.router.metrics
from kaveri.cluster.metrics import REFUSED_HEARTBEATS
from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from services.decode.metrics import DecodeMetrics
from services.predictor.metrics import PredictorMetrics
from services.prefill.metrics import PrefillMetrics

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"\| `(kaveri_\w+)` \| ([a-z, ]+) \| (\w+) \| `?([a-z, ]*)`? \| (.+) \|")

Facts = tuple[str, str, tuple[str, ...]]
"""Name as scraped, type, labels."""


def _facts(registry: CollectorRegistry) -> Iterator[Facts]:
    for collector in set(registry._collector_to_names):
        for family in collector.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = collector._labelnames if isinstance(collector, MetricWrapperBase) else family._labelnames
            yield name, family.type, tuple(labels)


def _registered() -> dict[str, set[Facts]]:
    engine = build_engine(EngineSettings(engine="fake", kv_cache_memory=2**20))
    try:
        of = {role: CollectorRegistry() for role in ("prefill", "decode", "predictor")}
        PrefillMetrics(engine, of["prefill"])
        DecodeMetrics(engine, of["decode"])
        PredictorMetrics(of["predictor"])
    finally:
        engine.close()
    routers = {id(metric) for metric in vars(services.router.metrics).values()}
    router = CollectorRegistry()
    for collector in set(REGISTRY._collector_to_names):
        if id(collector) in routers:
            router.register(collector)
    of["router"] = router
    for registry in of.values():
        registry.register(REFUSED_HEARTBEATS)
    return {role: set(_facts(registry)) for role, registry in of.items()}


def test_every_metric_is_documented_as_it_is() -> None:
    registered = _registered()
    documented: dict[str, set[Facts]] = {role: set() for role in registered}
    for name, roles, kind, labels, _ in _ROW.findall((ROOT / "docs" / "operations.md").read_text()):
        for role in roles.split(", "):
            documented[role].add((name, kind, tuple(labels.split(", ")) if labels else ()))
    assert all(len(facts) > 5 for facts in registered.values()), "the registries were not read"
    assert documented == registered


def test_each_services_readme_names_its_metrics() -> None:
    for role, facts in _registered().items():
        text = (ROOT / "services" / role / "README.md").read_text()
        missing = [name for name, _, _ in facts if name not in text]
        assert not missing, f"services/{role}/README.md"
