"""Prometheus metrics of the decode phase."""

from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics


def test_steps_whose_tokens_come_together_count_as_equally_long() -> None:
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry)
    metrics.steps.count([4], 1.0, 4)
    metrics.steps.count([4, 3], 1.2, 3)

    def value(name: str, **labels: str) -> object:
        return registry.get_sample_value(f"kaveri_decode_{name}", labels or None)

    assert value("step_seconds_count") == 2
    assert value("step_seconds_bucket", le="0.05") == 0, "no step took less than 0.1 s"
    assert value("step_requests_sum") == value("tokens_total") == 11
