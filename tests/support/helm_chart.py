"""Renders deploy/helm/kaveri with Helm's own library, and reads its Deployments as the services do."""

import functools
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kaveri.config.settings import read_settings
from kaveri.programs import setting_sections, settings_types
from kaveri.rpc.process import ServiceConfig

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "kaveri"
VALUES: dict[str, dict[str, Any]] = {"default": {}} | {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("ci/*.yaml"))
}
"""Sets of chart values under test: the chart's own, and those in its folder ci."""
COMMANDS = {"predictor": ["predictor", "serve"]}
"""Commands of the roles whose command is not their name."""
ENGINES = ("prefill", "decode", "colocated")

Manifest = dict[str, Any]


def helm() -> Any:
    """Return Helm's library, which has no wheel for some machines. Skips the test without it, but fails in CI."""
    if os.environ.get("CI", "") in ("true", "1"):
        return importlib.import_module("helm_python")
    return pytest.importorskip("helm_python", reason="Helm's library is not installed")


def render_values(values: dict[str, Any], release: str = "kaveri") -> tuple[Manifest, ...]:
    """Return all manifests of a release in the namespace `serving`. Raises HelmError."""
    with helm().Chart.load(CHART) as chart:
        rendered = chart.render(values, name=release, namespace="serving")
    texts = (text for path, text in sorted(rendered.items()) if path.endswith(".yaml"))
    return tuple(manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest)


@functools.cache
def render(name: str) -> tuple[Manifest, ...]:
    return render_values(VALUES[name])


def kinds(name: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in render(name) if manifest["kind"] == kind]


@dataclass(frozen=True)
class ChartInstance:
    """Deployment of Kaveri in the chart, with its service's settings."""

    role: str
    pod: Manifest
    labels: dict[str, str]
    container: Manifest
    config: ServiceConfig

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def instances_of(name: str, secrets: Path) -> list[ChartInstance]:
    """Return a ChartInstance per Deployment of Kaveri. name: in VALUES. secrets: folder for the content of Secrets."""
    found = []
    for manifest in kinds(name, "Deployment"):
        template = manifest["spec"]["template"]
        role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if role == "redis":
            continue
        (container,) = template["spec"]["containers"]
        command = COMMANDS.get(role, [role])
        assert container["args"][: len(command)] == command
        flags = container["args"][len(command) :]
        environment = environment_of(container, secrets)
        config = read_settings(settings_types()[role], f"kaveri {role}", flags, environment, setting_sections).config
        found.append(ChartInstance(role, template["spec"], template["metadata"]["labels"], container, config))
    assert len(found) >= 4
    return found


def environment_of(container: Manifest, secrets: Path) -> dict[str, str]:
    """Return a container's environment as the kubelet sets it. secrets: folder for files of Secrets."""
    fields = {"metadata.name": "kaveri-pod-1", "status.podIP": "10.1.2.3", "spec.nodeName": "node-1"}
    filled = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath")
        filled[entry["name"]] = entry.get("value") or (fields[field] if field else "from a Secret")
    if "KAVERI_REDIS_URL_FILE" in filled:
        (secrets / "url").write_text("redis://:secret@redis.example.com:6379/0\n")
        filled["KAVERI_REDIS_URL_FILE"] = str(secrets / "url")
    return filled


def selected(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return True if a Kubernetes label selector matches the labels. Supports only `In` in expressions."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []))
