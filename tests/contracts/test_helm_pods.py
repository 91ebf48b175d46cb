"""Pods of deploy/helm/kaveri: how the services read the chart's settings, and which network policies admit them."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import typer.main

from kaveri.cli.main import ListedCommand, app
from kaveri.config.settings import read_settings
from kaveri.engine.factory import listen_endpoints
from kaveri.engine.settings import EngineSettings
from kaveri.programs import settings_types
from services.gateway.config import GatewayConfig
from services.router.config import RouterConfig
from tests.support.helm_chart import (
    COMMANDS,
    ENGINES,
    VALUES,
    ChartInstance,
    environment_of,
    instances_of,
    kinds,
    selected,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=VALUES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def instances(name: str, tmp_path: Path) -> list[ChartInstance]:
    return instances_of(name, tmp_path)


def test_the_command_line_has_the_commands(instances: list[ChartInstance]) -> None:
    for instance in instances:
        command = typer.main.get_command(app)
        for word in COMMANDS.get(instance.role, [instance.role]):
            command = command.commands[word]
            command = command.load() if isinstance(command, ListedCommand) else command


def test_the_services_read_all_that_the_chart_passes(name: str, instances: list[ChartInstance]) -> None:
    for instance in instances:
        own = {f"KAVERI_{field.upper()}" for field in vars(instance.config)} | {"KAVERI_REDIS_URL_FILE"}
        # Settings of all pods may be of some services only.
        shared = {f"KAVERI_{setting.upper()}" for setting in VALUES[name].get("settings", {})}
        passed = [entry["name"] for entry in instance.container["env"]]
        assert {variable for variable in passed if variable.startswith("KAVERI_")} <= own | shared
        assert len(set(passed)) == len(passed)
        assert instance.config.host == "::"
        assert instance.config.instance_id == "kaveri-pod-1"
        assert instance.config.advertised_address(1) == "10.1.2.3:1"
        if not isinstance(instance.config, GatewayConfig):
            assert instance.config.model == VALUES[name].get("model", "kaveri-tiny")


def test_settings_in_values_arrive_as_they_are_written(tmp_path: Path) -> None:
    by_role = {
        manifest["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: manifest
        for manifest in kinds("vllm-rdma", "Deployment")
    }
    (container,) = by_role["prefill"]["spec"]["template"]["spec"]["containers"]
    environment = environment_of(container, tmp_path)
    config = read_settings(settings_types()["prefill"], "kaveri prefill", container["args"][1:], environment).config
    assert config.engine_args == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9}
    assert config.kv_cache_memory == 40 * 2**30
    assert config.dtype == "bfloat16"
    assert config.kv_transports == ("nixl", "tcp")


def test_ports_are_those_that_the_services_listen_on(instances: list[ChartInstance]) -> None:
    for instance in instances:
        config = instance.config
        listened = {"http" if instance.role == "gateway" else "grpc": config.port, "health": config.health_port}
        if config.metrics_port:
            listened["metrics"] = config.metrics_port
        if isinstance(config, EngineSettings) and config.kv_port:
            listened["kv"] = config.kv_port
        if isinstance(config, RouterConfig) and config.public_port:
            listened["public"] = config.public_port
        assert instance.ports == listened
        assert all(listened.values())
        assert len(set(listened.values())) == len(listened)


def test_engines_take_kv_where_their_transports_can_listen(name: str, instances: list[ChartInstance]) -> None:
    secured = name == "secured"
    for instance in instances:
        if isinstance(instance.config, EngineSettings):
            assert listen_endpoints(instance.config)
            assert instance.config.kv_host == "::"
            # Pods share neither memory nor a folder. Nothing goes unencrypted where there are certificates.
            assert not {"shm", "unix"} & set(instance.config.kv_transports)
            assert ("tls" in instance.config.kv_transports) == secured
            assert instance.config.failure_domain == "node-1"


def test_probes_ask_the_plain_health_port(instances: list[ChartInstance]) -> None:
    for instance in instances:
        for probe, path in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert instance.container[probe]["httpGet"] == {"path": path, "port": "health"}


def test_sigkill_does_not_end_a_drain(instances: list[ChartInstance]) -> None:
    for instance in instances:
        sleep_s = instance.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = instance.pod["terminationGracePeriodSeconds"]
        assert grace_s >= sleep_s + instance.config.drain_timeout_s + 10
        # A Service leads to a pod until it has forgotten it.
        assert (sleep_s > 0) == (instance.role in ("router", "gateway"))


def test_all_containers_are_confined(name: str) -> None:
    for manifest in kinds(name, "Deployment"):
        pod = manifest["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        assert "hostNetwork" not in pod
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert set(container["securityContext"]["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
        assert mounted["tmp"] == "/tmp"


def test_files_that_settings_name_are_mounted(name: str, instances: list[ChartInstance]) -> None:
    for instance in instances:
        secrets = {volume["name"]: volume["secret"] for volume in instance.pod["volumes"] if "secret" in volume}
        folders = {mount["mountPath"] for mount in instance.container["volumeMounts"] if mount["name"] in secrets}
        named = {
            value for entry in instance.container["env"] if (value := entry.get("value", "")).startswith("/etc/kaveri/")
        }
        assert {str(Path(value).parent) for value in named} == folders
        # A mount by subPath would not be renewed.
        assert not [mount for mount in instance.container["volumeMounts"] if "subPath" in mount]
        assert bool(secrets) == (name == "secured")
        if name == "secured":
            assert instance.config.tls is not None
            assert instance.config.redis_url == "redis://:secret@redis.example.com:6379/0"
        if name == "secured" and isinstance(instance.config, GatewayConfig | RouterConfig):
            assert instance.config.keys_file
            assert instance.config.public_tls_cert


def test_engines_have_shared_memory_gpus_and_rdma() -> None:
    for manifest in kinds("vllm-rdma", "Deployment"):
        pod = manifest["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        if manifest["metadata"]["name"].removeprefix("kaveri-") not in ENGINES:
            assert "annotations" not in manifest["spec"]["template"]["metadata"]
            continue
        (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        limits = {"nvidia.com/gpu": 2, "rdma/hca_shared_devices_a": 1, "memory": "64Gi"}
        assert container["resources"]["limits"] == limits
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        annotations = manifest["spec"]["template"]["metadata"]["annotations"]
        assert annotations == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}


def test_services_lead_to_ports_of_ready_pods(instances: list[ChartInstance], name: str) -> None:
    services = {service["metadata"]["name"]: service["spec"] for service in kinds(name, "Service")}
    assert services["kaveri-router"]["clusterIP"] == "None"
    for found, spec in services.items():
        if found == "kaveri-redis":
            continue
        (instance,) = [each for each in instances if spec["selector"].items() <= each.labels.items()]
        assert {port["targetPort"] for port in spec["ports"]} <= set(instance.ports)
        assert not spec.get("publishNotReadyAddresses")


def test_every_role_has_a_disruption_budget_and_is_spread(name: str, instances: list[ChartInstance]) -> None:
    budgets = kinds(name, "PodDisruptionBudget")
    for instance in instances:
        matching = [each for each in budgets if selected(each["spec"]["selector"], instance.labels)]
        assert len(matching) == (0 if name == "minimal" else 1)
        for constraint in instance.pod["topologySpreadConstraints"]:
            assert selected(constraint["labelSelector"], instance.labels)


def _admitted(name: str, source: ChartInstance, target: ChartInstance) -> set[str]:
    """Return the target's ports that network policies open to pods like the source. "*": all."""
    found: set[str] = set()
    for policy in kinds(name, "NetworkPolicy"):
        if not selected(policy["spec"]["podSelector"], target.labels):
            continue
        for rule in policy["spec"]["ingress"]:
            peers = rule.get("from", [{}])
            admits = ["ipBlock" not in peer and selected(peer.get("podSelector", {}), source.labels) for peer in peers]
            if any(admits):
                found |= {port["port"] for port in rule.get("ports", [{"port": "*"}])}
    return found


def test_network_policies_let_in_those_who_call(name: str, instances: list[ChartInstance]) -> None:
    if name == "minimal":
        assert not kinds(name, "NetworkPolicy")
        return
    by_role = {instance.role: instance for instance in instances}
    for target in instances:
        policies = [
            each for each in kinds(name, "NetworkPolicy") if selected(each["spec"]["podSelector"], target.labels)
        ]
        assert len(policies) == 1
        ports = {port["port"] for rule in policies[0]["spec"]["ingress"] for port in rule.get("ports", [])}
        assert ports <= set(target.ports)
        assert "health" not in ports, "probes come from the node"
    engines = [by_role[role] for role in ENGINES if role in by_role]
    assert "grpc" in _admitted(name, by_role["gateway"], by_role["router"])
    for engine in engines:
        assert "grpc" in _admitted(name, by_role["router"], engine)
        assert "grpc" in _admitted(name, by_role["gateway"], engine), "it reads answers there"
        assert all("*" in _admitted(name, other, engine) for other in engines)
    if "predictor" in by_role:
        assert "grpc" in _admitted(name, by_role["prefill"], by_role["predictor"])


def test_only_the_cluster_reaches_its_redis(instances: list[ChartInstance], name: str) -> None:
    if name in ("minimal", "secured"):
        return
    (policy,) = [each for each in kinds(name, "NetworkPolicy") if each["metadata"]["name"] == "kaveri-redis"]
    ((peer,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
    assert all(selected(peer["podSelector"], instance.labels) for instance in instances)
    assert not selected(peer["podSelector"], {"app.kubernetes.io/name": "another"})


def test_the_pod_monitor_finds_the_metrics_ports() -> None:
    for name in ("secured", "autoscaled"):
        (monitor,) = kinds(name, "PodMonitor")
        pods = [each["spec"]["template"] for each in kinds(name, "Deployment")]
        for pod in pods:
            is_kaveri = pod["metadata"]["labels"]["app.kubernetes.io/component"] != "redis"
            assert selected(monitor["spec"]["selector"], pod["metadata"]["labels"]) == is_kaveri
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint.get("scheme") == "https") == (name == "secured")


def test_scaled_objects_scale_deployments_on_metrics_that_exist() -> None:
    deployments = {each["metadata"]["name"]: each["spec"] for each in kinds("autoscaled", "Deployment")}
    documented = set(re.findall(r"^\| `(kaveri_\w+)` \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    scaled = {each["spec"]["scaleTargetRef"]["name"]: each["spec"] for each in kinds("autoscaled", "ScaledObject")}
    assert scaled.keys() == {"kaveri-prefill", "kaveri-decode", "kaveri-colocated"}
    for target, spec in scaled.items():
        # The autoscaler would fight with a number of replicas.
        assert "replicas" not in deployments[target]
        assert spec["minReplicaCount"] <= spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert set(re.findall(r"kaveri_\w+(?={)", trigger["metadata"]["query"])) <= documented
            assert f'pod=~"{target}-.*"' in trigger["metadata"]["query"]
            assert float(trigger["metadata"]["threshold"]) > 0
    metrics = [re.findall(r"kaveri_\w+(?={)", json.dumps(scaled[f"kaveri-{role}"])) for role in ENGINES]
    queued, usage = "kaveri_prefill_queued_tokens", "kaveri_kv_usage_ratio"
    assert metrics == [[queued], [usage], [queued, usage]]


@pytest.mark.parametrize(("password", "flags"), [("", []), ("a b$c", ["--requirepass", "a b$c"])])
def test_redis_asks_for_the_password_of_the_secret(password: str, flags: list[str], tmp_path: Path) -> None:
    (redis,) = [each for each in kinds("default", "Deployment") if each["metadata"]["name"] == "kaveri-redis"]
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    # In place of the server: what it would have been given, one word a line.
    stub = tmp_path / "redis-server"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDIS_PASSWORD": password}
    ended = subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    words = ended.stdout.splitlines()
    assert words[:5] == ["--bind", "*", "-::*", "--protected-mode", "no"]
    assert words[words.index("--save") + 1] == ""
    assert words[words.index("--dir") + 2 :] == flags
