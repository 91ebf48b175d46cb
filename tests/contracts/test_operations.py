"""docs/operations.md lists exactly the metrics and log events of the code. Their values are not checked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import services.gateway.metrics
import services.router.metrics
from kaveri.cluster.metrics import REFUSED_HEARTBEATS
from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.hosting.metrics import BUILD_INFO, PhaseMetrics, register_engine_metrics
from kaveri.hosting.policy_settings import FAULTS
from services.decode.metrics import DecodeMetrics
from services.decode.replica_metrics import ReplicaMetrics
from services.predictor.metrics import PredictorMetrics
from services.prefill.metrics import PrefillMetrics

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"\| `(kaveri_\w+)` \| ([a-z, ]+) \| (\w+) \| `?([a-z, ]*)`? \| (.+) \|")

Facts = tuple[str, str, tuple[str, ...]]
"""(name as scraped, type, labels) of a metric."""


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
        PrefillMetrics(of["prefill"])
        DecodeMetrics(of["decode"])
        ReplicaMetrics(of["decode"])
        for role in ("prefill", "decode"):
            register_engine_metrics(engine, of[role], "tiny")
            PhaseMetrics("tiny", of[role])
        PredictorMetrics(of["predictor"])
    finally:
        engine.close()
    for role, declared in (("router", services.router.metrics), ("gateway", services.gateway.metrics)):
        collectors = {id(metric) for metric in vars(declared).values()}
        of[role] = CollectorRegistry()
        for collector in set(REGISTRY._collector_to_names):
            if id(collector) in collectors:
                of[role].register(collector)
    for registry in of.values():
        registry.register(REFUSED_HEARTBEATS)
        registry.register(BUILD_INFO)
    for role in ("router", "prefill", "decode"):
        of[role].register(FAULTS)
    return {role: set(_facts(registry)) for role, registry in of.items()}


def test_every_metric_is_documented_as_it_is() -> None:
    registered = _registered()
    documented: dict[str, set[Facts]] = {role: set() for role in registered}
    for name, roles, kind, labels, _ in _ROW.findall((ROOT / "docs" / "operations.md").read_text()):
        for role in roles.split(", "):
            documented[role].add((name, kind, tuple(labels.split(", ")) if labels else ()))
    assert all(len(facts) > 5 for facts in registered.values()), "the registries were not read"
    assert documented == registered


_EVENT_ROW = re.compile(r"\| `([a-z_]+)` \| ([a-z, ]+) \| [a-z, ]+ \| `?([a-z_, ]*)`? \| .+ \|")
_LEVEL_OF = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}


def _logged() -> Iterator[tuple[str, str | None, set[str]]]:
    """Yield (event, level, fields) of each logging call in the product. level: None if chosen at run time."""
    paths = [path for room in ("kaveri", "services") for path in (ROOT / room).rglob("*.py")]
    for path in paths:
        if "testing" in path.parts or "v1" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=logger, attr=level), args=[ast.Constant(value=str(event)), *_]):
                    if level not in _LEVEL_OF or not _is_logger(logger):
                        continue
                case ast.Call(
                    func=ast.Call(func=ast.Name(id="getattr"), args=[logger, _]), args=[ast.Constant(value=str(event))]
                ):
                    if not _is_logger(logger):
                        continue
                    level = None
                case _:
                    continue
            fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None} - {"exc_info"}
            yield event, _LEVEL_OF.get(level or ""), fields


def _is_logger(node: ast.expr) -> bool:
    return ast.unparse(node) in ("log", "get_logger()") or ast.unparse(node).startswith("get_logger().bind(")


def test_every_log_event_is_documented_with_level_and_fields_and_no_other_is() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().partition("\n## Logs\n")[2].partition("\n## ")[0]
    documented = {
        event: (set(levels.split(", ")), set(filter(None, fields.split(", "))))
        for event, levels, fields in _EVENT_ROW.findall(text)
    }
    logged = list(_logged())
    assert len(logged) > 50, "the calls were not found"
    assert {event for event, _, _ in logged} == documented.keys()
    for event, level, fields in logged:
        levels, known = documented[event]
        assert level is None or level in levels, f"{event} is logged as {level}"
        assert fields <= known, f"{event} has undocumented fields {fields - known}"


def test_log_events_are_snake_case() -> None:
    names = {event for event, _, _ in _logged()}
    assert not [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name)]
