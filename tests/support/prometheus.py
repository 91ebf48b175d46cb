"""Real Prometheus for tests (Debian's package), with the rules and the scrape job of deploy/."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kaveri.local.process import ChildProcess
from tests.support.redis_fixture import free_port
from tests.support.scripted_ports import inherited_tls

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
_START_S = 60.0
_POLL_S = 0.1
_FOR = "2s"


def prometheus_program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`. Skips the test without it, but fails in continuous integration."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian: apt-get install prometheus)"
        assert os.environ.get("CI", "") not in ("true", "1"), f"{reason}; continuous integration must have it"
        pytest.skip(reason)
    return path


def rule_groups() -> list[dict[str, Any]]:
    return [
        group for path in sorted(DEPLOYED.glob("rules/*.yml")) for group in yaml.safe_load(path.read_text())["groups"]
    ]


def _prompt_rule_groups() -> list[dict[str, Any]]:
    """Return the deployed alert rules, but firing after _FOR. test_prometheus.py checks the deployed times."""
    groups = rule_groups()
    for rule in (rule for group in groups for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = _FOR
    return groups


class PrometheusApi:
    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **parameters: str) -> Any:
        """Return `data` of a response of the HTTP API. Raises AssertionError with Prometheus' message on an error."""

        def read() -> Any:
            url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

        return await asyncio.to_thread(read)

    async def values(self, expr: str) -> list[float]:
        """Return the newest value of each series of an expression, without NaN."""
        found = await self.get("query", query=expr)
        assert found["resultType"] == "vector", f"{expr} is a {found['resultType']}"
        values = [float(series["value"][1]) for series in found["result"]]
        return [value for value in values if math.isfinite(value)]

    async def alerts(self) -> dict[str, str]:
        """Return the state of each alert: inactive, pending or firing."""
        rules = [rule for group in (await self.get("rules"))["groups"] for rule in group["rules"]]
        return {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}


@contextlib.asynccontextmanager
async def run_prometheus(folder: Path, routers: Sequence[str]) -> AsyncIterator[PrometheusApi]:
    """Run Prometheus with the deployed configuration, except for its targets, a scrape interval of a second and alerts
    that fire after seconds. folder: for configuration, data and log. routers: "host:port" of their metrics. With --tls
    it uses a client certificate."""
    program = prometheus_program("prometheus")
    config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": _prompt_rule_groups()}))
    config["rule_files"] = [str(folder / "rules.yml")]
    (job,) = config["scrape_configs"]
    scheme, tls = "http", dict[str, Any]()
    if (files := inherited_tls()) is not None:
        pem = {"ca_file": files.authority, "cert_file": files.certificate, "key_file": files.key}
        scheme, tls = "https", {"tls_config": {**pem, "server_name": files.name}}
    job |= {"scheme": scheme, **tls}
    job["http_sd_configs"] = [
        {"url": f"{scheme}://{address}/sd", "refresh_interval": "1s", **tls} for address in routers
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    log_path = folder / "prometheus.log"
    process = ChildProcess.start("prometheus", command, log_path, {**os.environ, "GOMAXPROCS": "1"})
    try:
        await _wait_until_ready(f"http://{address}", process)
        yield PrometheusApi(f"http://{address}")
    finally:
        await process.kill()
        print(log_path.read_text(errors="replace")[-2000:])


async def _wait_until_ready(url: str, process: ChildProcess) -> None:
    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    async with asyncio.timeout(_START_S):
        while not await asyncio.to_thread(is_ready):
            assert process.exit_status is None, process.log_path.read_text(errors="replace")
            await asyncio.sleep(_POLL_S)
