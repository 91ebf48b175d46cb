"""Panels and rules of deploy/ find series in a Prometheus that scrapes a cluster via /sd. Grafana is not run."""

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView
from tests.support.local_cluster import LocalCluster, all_blocks_free, run_cluster
from tests.support.metrics_pages import read_page
from tests.support.prometheus import PrometheusApi, rule_groups, run_prometheus
from tests.support.reading import Reading
from tests.support.redis_fixture import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

DASHBOARDS = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"
INSTANCES = {
    **dict.fromkeys(("router-0", "router-1"), "router"),
    "gateway-0": "gateway",
    **dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "engine"),
}
"""Roles by instance id."""
WITHIN_S = 100.0
FOR_RARE_EVENTS = {
    "panel Length predictions",
    "alert KaveriNotSeen",
    "alert KaveriEnginesGone",
    "alert KaveriPolicyFaults",
    "alert KaveriGatewayErrors",
}
"""Without series here: no predictor runs, no HTTP request fails, no plug-in is faulty, and something is there."""
ON_SLOW_MACHINES = {
    "KaveriAttemptsLost",
    "KaveriKvWaitsForCredit",
    "KaveriRequestsUnprotected",
    "KaveriTpotHigh",
    "KaveriTtftHigh",
}
"""Alerts that a cluster may raise when it gets too little of its machine."""
_METRIC = re.compile(r"\bkaveri_\w+")
_LABELS = re.compile(r"\{[^}]*\}|\b(?:by|on|without) \([^)]*\)")
_THRESHOLD = re.compile(r"(==|!=|>|<) (?=[\d.]+$)")


class Observed:
    def __init__(self, cluster: LocalCluster, client: AsyncClient, prometheus: PrometheusApi, ports: range) -> None:
        self.cluster = cluster
        self.client = client
        self.prometheus = prometheus
        self._ports = ports

    async def ask(self) -> None:
        body = {"prompt": "hello", "max_tokens": 6, "ignore_eos": True, "stream": True}
        url = f"http://{self.cluster.stack.http_targets[0]}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})

        def post() -> str:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        params = SamplingParams(max_tokens=6, ignore_eos=True)
        completion, events = await asyncio.gather(
            self.client.generate(prompt_token_ids=range(1, 60), params=params), asyncio.to_thread(post)
        )
        assert completion.usage.completion_tokens == 6
        assert events.endswith("data: [DONE]\n\n")

    async def until(self, condition: Callable[[], AsyncIterator[str]]) -> None:
        give_up_at_s = time.monotonic() + WITHIN_S
        # The first is enough: all queries together keep a core busy for a second.
        while missing := await _first(condition()):
            assert time.monotonic() < give_up_at_s, (
                f"after {WITHIN_S} s still: {missing}; of all: {[name async for name in condition()]}"
            )
            await self.ask()

    def discovered(self) -> dict[str, Any]:
        """Targets that the first router's /sd lists, by instance id."""
        groups = json.loads(read_page(f"127.0.0.1:{self._ports[0]}", "sd"))
        return {group["labels"]["kaveri_instance_id"]: group for group in groups}

    def exposed(self) -> set[str]:
        """Names of all metrics that running processes declare, also of those without a series."""
        names: set[str] = set()
        for port in self._ports:
            with contextlib.suppress(OSError):
                page = read_page(f"127.0.0.1:{port}")
                for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
                    ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
                    names |= {name + end for end in ends}
        return names


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    first = free_port()
    routers = [f"127.0.0.1:{port}" for port in (first, first + 1)]
    async with (
        run_cluster(
            router_count=2,
            decode_count=2,
            gateway_count=1,
            metrics_port=first,
            start_timeout_s=200.0,
            decode_flags=("--fake-step-s", "0.02"),
            replication="spread",
            replica_memory="32MiB",
            replica_min_tokens="16",
        ) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=100) as client,
        run_prometheus(tmp_path_factory.mktemp("prometheus"), routers) as prometheus,
    ):
        yield Observed(cluster, client, prometheus, range(first, first + len(INSTANCES)))


def _panels() -> Iterator[tuple[str, str]]:
    """Yield title and expression of each query, with Grafana's variables filled in."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$job", "kaveri").replace("$__rate_interval", "10m")
                yield f"panel {panel['title']}", expr


def _rules() -> Iterator[tuple[str, str]]:
    """Yield name and expression of each rule; a comparison with a threshold gives 0 or 1."""
    for rule in (rule for group in rule_groups() for rule in group["rules"]):
        if "record" in rule:
            yield f"record {rule['record']}", rule["record"]
        else:
            yield f"alert {rule['alert']}", _THRESHOLD.sub(r"\1 bool ", rule["expr"])


async def test_one_routers_sd_names_every_process_and_each_can_be_scraped_there(observed: Observed) -> None:
    await observed.ask()
    await observed.cluster.wait_for_view(all_blocks_free)
    groups = observed.discovered()
    assert {name: group["labels"]["kaveri_role"] for name, group in groups.items()} == INSTANCES
    scraped: dict[str, dict[str, list[Any]]] = {}
    for name, group in groups.items():
        for family in text_string_to_metric_families(read_page(group["targets"][0])):
            for sample in family.samples:
                scraped.setdefault(name, {}).setdefault(sample.name, []).append(sample)
    for name, samples in scraped.items():
        (built,) = samples["kaveri_build_info"]
        assert (built.labels["role"], built.value) == (INSTANCES[name], 1)
        if INSTANCES[name] == "engine":
            (usage,) = samples["kaveri_kv_usage_ratio"]
            assert (usage.labels, usage.value) == ({"model": "kaveri-tiny"}, 0)
            states = {(one.labels["phase"], one.labels["state"]) for one in samples["kaveri_phase_requests"]}
            assert states == {(phase, state) for phase in ("prefill", "decode") for state in ("queued", "running")}
    tpot, e2e = (
        [float(one.labels["le"]) for one in scraped["router-0"][f"kaveri_router_{name}_seconds_bucket"]][:-1]
        for name in ("tpot", "e2e")
    )
    assert (tpot[0], tpot[-1], e2e[-1]) == (0.001, 0.5, 600)


async def test_a_cluster_that_is_well_is_scraped_once_through_two_routers_and_raises_no_alert(
    observed: Observed,
) -> None:
    async def missing() -> AsyncIterator[str]:
        for name in INSTANCES:
            if await observed.prometheus.values(f'count(up{{job="kaveri", instance="{name}"}} == 1)') != [1]:
                yield name
        for name, expr in _rules():
            if name not in FOR_RARE_EVENTS and not await observed.prometheus.values(expr):
                yield f"{name}: {expr}"

    await observed.until(missing)
    groups = (await observed.prometheus.get("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {
        rule.get("alert", rule.get("record")) for group in rule_groups() for rule in group["rules"]
    }
    assert not [rule["lastError"] for rule in rules if rule["health"] == "err"]

    async def raised() -> AsyncIterator[str]:
        for name, state in (await observed.prometheus.alerts()).items():
            if state != "inactive" and name not in ON_SLOW_MACHINES:
                yield f"{name} is {state}"

    await observed.until(raised)


async def test_every_panel_has_series_after_an_instance_was_lost_and_the_loss_raises_an_alert(
    observed: Observed,
) -> None:
    async def unseen() -> AsyncIterator[str]:
        # Prometheus sees an increase only from one scrape to a later one.
        if len(await observed.prometheus.values("kaveri_router_lost_attempts_total")) < 2:
            yield "a router"

    await observed.until(unseen)
    params = SamplingParams(max_tokens=1900, ignore_eos=True)
    reading = Reading(observed.client.stream(prompt_token_ids=range(1, 60), params=params))
    try:
        await reading.has(30)
        view = await observed.cluster.wait_for_view(lambda view: bool(_decoding(view)))
        (owner,) = _decoding(view)
        await observed.cluster.kill(owner)

        async def missing() -> AsyncIterator[str]:
            alerts = await observed.prometheus.alerts()
            for name in ("KaveriAttemptsLost", "KaveriInstancesLost"):
                if alerts[name] != "firing":
                    yield f"{name} does not fire"
            for name, expr in (*_panels(), *_rules()):
                if name not in FOR_RARE_EVENTS and not await observed.prometheus.values(expr):
                    yield f"{name}: {expr}"

        await observed.until(missing)
        assert observed.discovered().keys() == INSTANCES.keys() - {owner}
    finally:
        reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)


async def _first(names: AsyncIterator[str]) -> str | None:
    async for name in names:
        return name
    return None


def _decoding(view: ClusterView) -> list[str]:
    return [name for name in ("decode-0", "decode-1") if view.instances[name].load.context_tokens]


async def test_all_metrics_of_panels_and_rules_exist(observed: Observed) -> None:
    exposed = await asyncio.to_thread(observed.exposed)
    rules = [
        (rule.get("alert", rule.get("record")), rule["expr"]) for group in rule_groups() for rule in group["rules"]
    ]
    used = {(name, metric) for name, expr in (*_panels(), *rules) for metric in _METRIC.findall(_LABELS.sub("", expr))}
    assert len(used) > 80, "the names were not found"
    assert not sorted((name, metric) for name, metric in used if metric not in exposed)
