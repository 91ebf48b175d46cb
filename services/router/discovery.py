"""Where the metrics of the whole cluster are, for /sd of the metrics port."""

from typing import Any

from kaveri.domain.view import ClusterView


def metrics_targets(view: ClusterView) -> list[dict[str, Any]]:
    """A target group for each instance that serves metrics, this router too, as Prometheus' HTTP service discovery
    takes them. What has died goes with its lease."""
    return [
        {
            "targets": [status.record.metrics_address],
            "labels": {
                "kaveri_instance_id": status.record.instance_id,
                "kaveri_role": str(status.record.role),
                "__meta_kaveri_phases": ",".join(status.record.phases),
                "__meta_kaveri_model": status.record.model,
                "__meta_kaveri_version": status.record.version,
            },
        }
        for status in view.instances.values()
        if status.record.metrics_address
    ]
