"""deploy/prometheus and deploy/grafana against promtool, the code's metrics and the docs. Starts no Prometheus."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

import services.router.metrics  # noqa: F401 - declares its metrics
from tests.support.prometheus import DEPLOYED, prometheus_program, rule_groups

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(DEPLOYED / "prometheus.yml")),
        ("test", "rules", str(Path(__file__).parent / "prometheus_alerts.yml")),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    command = [prometheus_program("promtool"), *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_has_a_row_in_the_docs_and_no_other_has() -> None:
    alerts = {
        rule["alert"]: rule["labels"]["severity"]
        for group in rule_groups()
        for rule in group["rules"]
        if "alert" in rule
    }
    assert dict(re.findall(r"^\| `(Kaveri\w+)` \| (\w+) \|", OPERATIONS, re.MULTILINE)) == alerts


def test_the_docs_name_every_measure_that_has_vllms_name() -> None:
    records = {rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in records}
    assert set(re.findall(r"`(vllm:\w+)`", OPERATIONS)) == families


def test_the_dashboards_are_what_the_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("grafana_dashboards", ROOT / "scripts" / "grafana_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert written == kept, "run python scripts/grafana_dashboards.py"


def test_grafana_asks_as_often_as_prometheus_scrapes() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "kaveri.yml").read_text())["datasources"]
    (interval,) = [source["jsonData"]["timeInterval"] for source in sources if source["type"] == "prometheus"]
    assert interval == yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())["global"]["scrape_interval"]


def test_series_of_failures_are_there_before_the_first_one() -> None:
    outcomes = {
        outcome
        for group in rule_groups()
        for rule in group["rules"]
        for found in re.findall(r'kaveri_router_requests_total\{outcome=~?"([a-z_|]+)"', rule["expr"])
        if "alert" in rule
        for outcome in found.split("|")
    }
    assert len(outcomes) > 3
    for outcome in outcomes:
        assert REGISTRY.get_sample_value("kaveri_router_requests_total", {"outcome": outcome}) is not None
    for outcome in ("resumed", "recomputed"):
        assert REGISTRY.get_sample_value("kaveri_router_stall_seconds_count", {"outcome": outcome}) is not None
