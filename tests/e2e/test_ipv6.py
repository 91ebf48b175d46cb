"""A cluster whose processes have IPv6 addresses alone: gRPC, KV over TCP, HTTP and metrics."""

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.local import config
from tests.support.local_cluster import run_cluster
from tests.support.metrics_pages import read_page
from tests.support.redis_fixture import free_port

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists() or not socket.has_ipv6, reason="this machine has no IPv6"
)
_FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


async def test_every_part_of_a_cluster_speaks_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both spellings: that of engines, and that of routers and gateways.
    monkeypatch.setattr(config, "LOOPBACK", "[::1]")
    port = free_port()
    settings = {"host": "::1", "gateway_count": 1, "metrics_port": port, "kv_transports": "tcp"}
    async with run_cluster(**settings) as cluster:
        addresses = {name: each.record.address for name, each in cluster.view().instances.items()}
        assert all(address.startswith("[::1]:") for address in addresses.values()), addresses
        async with AsyncClient(cluster.target) as client:
            answer = await client.generate("hello", params=_FIVE)
            assert answer.usage.completion_tokens == 5
            assert answer.timing.server.attempts == 1
        body = json.dumps({"model": "kaveri-tiny", "prompt": "hello", "max_tokens": 5}).encode()
        request = urllib.request.Request(
            f"http://{cluster.stack.http_targets[0]}/v1/completions", body, {"content-type": "application/json"}
        )
        assert await asyncio.to_thread(_status, request) == 200
        for group in json.loads(read_page(f"[::1]:{port}", "sd")):
            (target,) = group["targets"]
            assert target.startswith("[::1]:")
            assert "kaveri_build_info" in read_page(target)
        status, output, _ = await cluster.command("status")
        assert (status, "[::1]:" in output) == (0, True)


def _status(request: urllib.request.Request) -> int:
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)
