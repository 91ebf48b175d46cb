"""deploy/helm/kaveri, rendered by Helm's own library, against Kubernetes' schemas. Nothing is installed. Only the top
fields of custom resources (cert-manager, Prometheus operator, KEDA) are checked."""

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helm_chart import CHART, VALUES, Manifest, helm, kinds, render, render_values
from tests.support.prometheus import rule_groups

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES_VERSIONS = ("1.30", "1.34", "1.37")
"""Oldest version that Chart.yaml allows, one between, and the newest that the validator knows."""
CUSTOM_RESOURCES = {
    ("monitoring.coreos.com/v1", "PodMonitor"): ({"selector", "podMetricsEndpoints"}, set()),
    ("monitoring.coreos.com/v1", "PrometheusRule"): ({"groups"}, set()),
    ("keda.sh/v1alpha1", "ScaledObject"): (
        {"scaleTargetRef", "triggers"},
        {"minReplicaCount", "maxReplicaCount", "pollingInterval", "fallback", "advanced"},
    ),
    ("cert-manager.io/v1", "Certificate"): (
        {"secretName", "issuerRef"},
        {"commonName", "dnsNames", "usages", "privateKey", "duration", "renewBefore"},
    ),
}
"""(required, optional) fields of `spec` of each custom resource."""


@pytest.fixture(params=VALUES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def validate() -> Iterator[Callable[..., Any]]:
    """Yield the schema validator, which reads megabytes of definitions for each manifest; cached here."""
    pytest.importorskip("kubernetes_validate")
    validator = importlib.import_module("kubernetes_validate.utils")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validator, "schema_contents", functools.cache(validator.schema_contents))
        yield validator.validate


def _refusal(values: dict[str, Any]) -> str:
    with pytest.raises(helm().HelmError) as refused:
        render_values(values)
    return str(refused.value)


def test_there_are_five_sets_of_values() -> None:
    assert set(VALUES) == {"default", "minimal", "secured", "vllm-rdma", "autoscaled"}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_takes_every_manifest_and_knows_every_field(
    name: str, version: str, validate: Callable[..., Any]
) -> None:
    checked = 0
    for manifest in render(name):
        kind = (manifest["apiVersion"], manifest["kind"])
        if kind in CUSTOM_RESOURCES:
            needed, others = CUSTOM_RESOURCES[kind]
            assert needed <= manifest["spec"].keys() <= needed | others, kind
            continue
        validate(manifest, version, strict=True)
        checked += 1
    assert checked >= 7


def test_helm_finds_no_fault_in_the_chart(name: str) -> None:
    report = helm().lint(CHART, VALUES[name], strict=True)
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] > 1]


def test_the_chart_allows_the_oldest_version_that_is_checked() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES_VERSIONS[0]}.0-0"


def test_names_are_unique_and_in_the_release_namespace(name: str) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in render(name)]
    assert len(set(names)) == len(names)
    assert {manifest["metadata"]["namespace"] for manifest in render(name)} == {"serving"}
    # KAVERI_PORT would become an address where service links are on.
    assert "kaveri" not in [found for kind, found in names if kind == "Service"]


def test_no_password_is_in_a_manifest() -> None:
    refusal = _refusal({"redis": {"internal": False, "url": "redis://:hunter2@redis:6379/0"}})
    assert "redis.existingSecret" in refusal
    assert "hunter2" not in refusal
    for manifest in render("secured"):
        assert manifest["kind"] != "Secret"


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(declared: Manifest, given: Any, where: str) -> None:
        if "$ref" in declared:
            declared = schema["definitions"][declared["$ref"].rpartition("/")[2]]
        # Maps of the user's own, and parts that are left out by default.
        if declared.get("additionalProperties") is not False or not given:
            return
        assert declared["properties"].keys() - {"global", "claims"} == given.keys(), where
        for key, value in given.items():
            compare(declared["properties"][key], value, f"{where}.{key}")

    compare(schema, defaults, "values")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 3}, "replicas"),
        ({"decode": {"replica": 3}}, "replica"),
        ({"prefill": {"autoscaling": {"kvUsage": 0.5}}}, "kvUsage"),
        ({"decode": {"settings": {"port": 1}}}, "port"),
        ({"settings": {"tls_cert": "a.pem"}}, "tls_cert"),
        ({"env": [{"name": "KAVERI_PORT", "value": "1"}]}, "/env/0/name"),
        ({"redis": {"internal": False}}, "redis.url"),
        ({"redis": {"url": "redis://other:6379/0"}}, "redis.internal"),
        ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
        ({"router": {"public": {"enabled": True, "address": "a:1"}}}, "apiKeys.secret"),
        ({"router": {"public": {"enabled": True}}, "apiKeys": {"secret": "keys"}}, "router.public.address"),
        ({"kv": {"transports": ["tls"]}}, "kv.transports"),
        ({"decode": {"enabled": False}}, "decode.enabled"),
        ({"decode": {"autoscaling": {"enabled": True}}}, "autoscaling.prometheusAddress"),
        (
            {
                "decode": {"autoscaling": {"enabled": True, "minReplicas": 9}},
                "autoscaling": {"prometheusAddress": "http://prometheus:9090"},
            },
            "decode.autoscaling.minReplicas",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    assert named in _refusal(values)


def test_what_the_chart_sets_itself_cannot_be_set_twice(name: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    owned = set(schema["definitions"]["settings"]["propertyNames"]["not"]["enum"])
    given = {*VALUES[name].get("settings", {})}
    for manifest in kinds(name, "Deployment"):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        passed = {entry["name"] for entry in container.get("env", []) if entry["name"].startswith("KAVERI_")}
        assert {variable.removeprefix("KAVERI_").lower() for variable in passed} - given <= owned


def _values_of_the_page() -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    return [values for values in map(yaml.safe_load, blocks) if "scrape_configs" not in values]


def test_the_chart_takes_the_values_that_the_page_shows() -> None:
    pages = _values_of_the_page()
    assert len(pages) == 4
    for values in pages:
        assert render_values(values)


def test_colocated_instances_need_no_others() -> None:
    values = {"prefill": {"enabled": False}, "decode": {"enabled": False}, "colocated": {"enabled": True}}
    manifests = render_values(values, release="one")
    names = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Deployment"]
    assert sorted(names) == ["one-kaveri-colocated", "one-kaveri-gateway", "one-kaveri-redis", "one-kaveri-router"]


def test_rules_and_dashboards_are_those_that_are_tested_with_prometheus() -> None:
    (rules,) = kinds("autoscaled", "PrometheusRule")
    assert rules["spec"]["groups"] == rule_groups()
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    (shown,) = [
        found for found in kinds("autoscaled", "ConfigMap") if found["metadata"]["name"].endswith("-dashboards")
    ]
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    folder = ROOT / "deploy" / "grafana" / "dashboards"
    assert shown["data"] == {f"kaveri-{path.name}": path.read_text() for path in folder.iterdir()}


def test_a_pod_monitor_gives_the_labels_that_rules_and_dashboards_ask_for() -> None:
    (monitor,) = kinds("autoscaled", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert {"instance", "model_name", "kaveri_role"} <= {rule["targetLabel"] for rule in endpoint["relabelings"]}
