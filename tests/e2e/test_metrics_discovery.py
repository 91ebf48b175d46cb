"""One router's /sd names every process of a cluster that serves metrics, and each of them can be scraped there."""

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kaveri import AsyncClient, SamplingParams
from tests.support.local_cluster import run_cluster
from tests.support.metrics_pages import read_page
from tests.support.redis_fixture import free_port

_ROLES = {
    "router-0": "router",
    "gateway-0": "gateway",
    "prefill-0": "engine",
    "decode-0": "engine",
    "decode-1": "engine",
}


def _samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def test_a_scrape_of_what_sd_names_covers_every_process_until_its_lease_ends() -> None:
    port = free_port()
    async with run_cluster(decode_count=2, gateway_count=1, metrics_port=port) as cluster:
        async with AsyncClient(cluster.target) as client:
            answer = await client.generate("hello", params=SamplingParams(max_tokens=5, ignore_eos=True))
        assert answer.usage.completion_tokens == 5
        found = read_page(f"127.0.0.1:{port}", "sd")
        groups = {group["labels"]["kaveri_instance_id"]: group for group in json.loads(found)}
        assert {name: group["labels"]["kaveri_role"] for name, group in groups.items()} == _ROLES
        scraped = {name: _samples(read_page(group["targets"][0])) for name, group in groups.items()}
        for name, samples in scraped.items():
            (built,) = samples["kaveri_build_info"]
            assert (built.labels["role"], built.value) == (_ROLES[name], 1)
        for name in ("prefill-0", "decode-0", "decode-1"):
            (usage,) = scraped[name]["kaveri_kv_usage_ratio"]
            assert (usage.labels, usage.value) == ({"model": "kaveri-tiny"}, 0)
            states = {(one.labels["phase"], one.labels["state"]) for one in scraped[name]["kaveri_phase_requests"]}
            assert states == {(phase, state) for phase in ("prefill", "decode") for state in ("queued", "running")}
        bounds = {
            name: [float(one.labels["le"]) for one in scraped["router-0"][f"kaveri_router_{name}_seconds_bucket"]][:-1]
            for name in ("tpot", "e2e")
        }
        assert (bounds["tpot"][0], bounds["tpot"][-1], bounds["e2e"][-1]) == (0.001, 0.5, 600)
        await cluster.kill("decode-1")
        await cluster.wait_for_view(lambda view: "decode-1" not in view.instances)
        left = json.loads(read_page(f"127.0.0.1:{port}", "sd"))
        assert {group["labels"]["kaveri_instance_id"] for group in left} == _ROLES.keys() - {"decode-1"}
