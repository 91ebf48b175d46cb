"""The compose file, as docker-compose reads it, against the services' settings. Builds and runs no image."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kaveri.config.settings import read_settings
from kaveri.programs import setting_sections
from kaveri.rpc.process import ServiceConfig
from services.gateway.config import GatewayConfig
from services.instance.config import ColocatedConfig, DecodeConfig, PrefillConfig
from services.predictor.config import PredictorConfig
from services.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "deploy" / "compose" / "docker-compose.yml"
BALANCER_FILE = COMPOSE_FILE.parent / "haproxy.cfg"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
INSTANCES: dict[str, type[ServiceConfig]] = {
    "router-0": RouterConfig,
    "router-1": RouterConfig,
    "gateway-0": GatewayConfig,
    "gateway-1": GatewayConfig,
    "prefill-0": PrefillConfig,
    "prefill-1": PrefillConfig,
    "decode-0": DecodeConfig,
    "decode-1": DecodeConfig,
    "predictor": PredictorConfig,
}
COMMANDS = {"predictor": ["predictor", "serve"]}
"""Commands of the services whose command is not their role."""
PORT_OWNERS = {"router-0": "50051", "router-1": "50052", "balancer": "8000"}
OBSERVERS = {"prometheus": "9090", "grafana": "3000", "jaeger": "16686"}
"""Services of the profile `observability`, with their ports."""
OBSERVABILITY_ENV = COMPOSE_FILE.parent / "observability.env"


def _compose_command() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], check=False, capture_output=True).returncode == 0
    ):
        return plugin
    return None


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return _resolved()


def _resolved(*flags: str) -> dict[str, dict[str, Any]]:
    command = _compose_command()
    if command is None:
        reason = "neither docker-compose nor docker compose is installed"
        assert os.environ.get("CI", "") not in ("true", "1"), f"{reason}; continuous integration must have one"
        pytest.skip(reason)
    # The JSON of `config --format json` is not in v1; YAML of both versions is read by a YAML reader.
    profiles = ("--profile", "colocated", "--profile", "observability")
    shown = subprocess.run(
        [*command, "-f", COMPOSE_FILE, *profiles, *flags, "config"], check=False, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    resolved: dict[str, dict[str, Any]] = yaml.safe_load(shown.stdout)["services"]
    return resolved


def _image_environment(target: str) -> dict[str, str]:
    """Return the KAVERI_ variables that the Dockerfile sets in an image, with those of its base stage."""
    stages: dict[str, dict[str, str]] = {}
    name = ""
    for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines():
        words = line.split()
        if line.startswith("FROM "):
            name = words[3]
            stages[name] = dict(stages.get(words[1], {}))
        elif line.startswith("ENV "):
            assignments = (word.partition("=") for word in words[1:])
            stages[name] |= {key: value for key, _, value in assignments if key.startswith("KAVERI_")}
    return stages[target]


def test_the_stack_is_redis_two_instances_of_each_role_a_predictor_and_a_balancer(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name for name, service in services.items() if not service.get("profiles")} == {
        "redis",
        "balancer",
        *INSTANCES,
    }
    for name in INSTANCES:
        role = name.partition("-")[0]
        assert services[name]["build"]["target"] == ("kaveri" if role in ("router", "gateway") else "kaveri-engine")
        assert services[name]["command"] == COMMANDS.get(name, [role])


def test_routers_and_the_gateways_balancer_are_reached_from_this_machine_only(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name for name, service in services.items() if service.get("ports")} == {*PORT_OWNERS, *OBSERVERS}
    for name, port in (PORT_OWNERS | OBSERVERS).items():
        ports = json.dumps(services[name]["ports"])
        assert port in ports
        assert "127.0.0.1" in ports, "an unprotected port for the whole network"


def test_all_containers_are_confined(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # Those whose images have a folder for data of their own.
        other_user = {"prometheus": "65534:65534", "grafana": "472:0"}.get(name)
        assert service["user"] == (other_user or "10001:10001"), name
        assert not service.get("privileged"), name
        assert service["restart"] == "on-failure", name


def test_images_run_as_a_number_under_an_init() -> None:
    stages = DOCKERFILE.read_text().split("\nFROM ")
    images = [stage for stage in stages if stage.partition(" AS ")[2].startswith("kaveri")]
    assert len(images) == 3
    for image in images:
        # Kubernetes' runAsNonRoot refuses a user's name.
        assert "\nUSER 10001:10001\n" in image
        assert '\nENTRYPOINT ["tini", "--", "kaveri"]\n' in image
        assert image.count("/opt/kaveri/ready.py") == 2, "the health check has no file"


def test_the_balancer_asks_each_gateways_health_port(services: dict[str, dict[str, Any]]) -> None:
    text = BALANCER_FILE.read_text()
    servers = re.findall(r"^  server (\S+) (\S+)$", text, re.MULTILINE)
    assert servers == [
        (name, f"{name}:{GatewayConfig().port}") for name in INSTANCES if INSTANCES[name] is GatewayConfig
    ]
    checked = re.findall(r"check port (\d+)", text)
    assert checked == [_image_environment("kaveri")["KAVERI_HEALTH_PORT"]]


def test_a_profile_adds_a_colocated_instance(services: dict[str, dict[str, Any]]) -> None:
    assert {name for name, service in services.items() if service.get("profiles") == ["colocated"]} == {"colocated-0"}
    assert services["colocated-0"]["command"] == ["colocated"]
    assert services["colocated-0"]["build"]["target"] == "kaveri-engine"


def test_a_profile_adds_prometheus_grafana_and_jaeger_with_the_files_that_they_read(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name for name, service in services.items() if service.get("profiles") == ["observability"]} == {*OBSERVERS}
    deployed = COMPOSE_FILE.parents[1]
    provisioned = {
        name: yaml.safe_load((deployed / "grafana" / "provisioning" / name / "kaveri.yml").read_text())
        for name in ("datasources", "dashboards")
    }
    (provider,) = provisioned["dashboards"]["providers"]
    mounts = {
        "prometheus": {deployed / "prometheus": "/etc/prometheus"},
        "grafana": {
            deployed / "grafana" / "provisioning": "/etc/grafana/provisioning",
            deployed / "grafana" / "dashboards": provider["options"]["path"],
        },
    }
    for name, folders in mounts.items():
        shown = json.dumps(services[name]["volumes"])
        for folder, target in folders.items():
            assert str(folder) in shown
            assert target in shown
    for source in provisioned["datasources"]["datasources"]:
        assert source["url"] == f"http://{source['uid']}:{OBSERVERS[source['uid']]}"


def test_prometheus_asks_both_routers_where_the_metrics_are(services: dict[str, dict[str, Any]]) -> None:
    config = yaml.safe_load((COMPOSE_FILE.parents[1] / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    port = services["router-0"]["environment"]["KAVERI_METRICS_PORT"]
    assert [found["url"] for found in job["http_sd_configs"]] == [
        f"http://{name}:{port}/sd" for name in INSTANCES if INSTANCES[name] is RouterConfig
    ]


def test_the_services_send_traces_to_jaeger_only_with_the_observability_file(
    services: dict[str, dict[str, Any]],
) -> None:
    given = dict(line.split("=", 1) for line in OBSERVABILITY_ENV.read_text().splitlines() if not line.startswith("#"))
    assert given.pop("COMPOSE_PROFILES") == "observability"
    assert given["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4317"
    traced = _resolved("--env-file", str(OBSERVABILITY_ENV))
    for name in (*INSTANCES, "colocated-0"):
        environment = services[name]["environment"]
        assert not [key for key, value in environment.items() if key.startswith("OTEL_") and value is not None], name
        assert traced[name]["environment"] == environment | given, name


@pytest.mark.parametrize("name", [*INSTANCES, "colocated-0"])
def test_the_services_take_the_settings_and_are_reached_under_their_names(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    environment = _image_environment(service["build"]["target"]) | service["environment"]
    config_type = INSTANCES.get(name, ColocatedConfig)
    config = read_settings(config_type, f"kaveri {name}", [], environment, setting_sections).config
    known = {f"KAVERI_{field.upper()}" for field in vars(config)}
    assert {key for key in service["environment"] if key.startswith("KAVERI_")} <= known, "an unread variable"
    assert config.instance_id in (name, f"{name}-0")
    assert config.host == "0.0.0.0"
    assert config.advertised_address(config.port) == f"{name}:{config.port}"
    assert config.port > 0
    assert config.health_port > 0, "the image's health check has no port"
    assert config.redis_url == "redis://redis:6379/0"
    if isinstance(config, DecodeConfig):
        settings = config
        assert (settings.kv_host, settings.kv_advertise_host) == ("0.0.0.0", name)
        assert settings.kv_port > 0
    # SIGKILL must not come before the drain is over.
    grace = str(service["stop_grace_period"]).removesuffix("s")
    assert float(grace) > config.drain_timeout_s
