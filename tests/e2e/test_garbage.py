"""Garbage on the ports: bytes that are not gRPC or the KV protocol are refused and disturb no request."""

import asyncio
import random

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.engine.stepwise.fake import FakeModel
from tests.support.local_cluster import LocalCluster, run_cluster

SEED = 7
ANSWER_TOKENS = 300
"""Six seconds of steps."""
PROMPT = tuple(range(1, 50))


def ports_of(cluster: LocalCluster) -> list[str]:
    """Every "host:port" that the cluster listens on, or path of a Unix socket."""
    records = [status.record for status in cluster.view().instances.values()]
    return [record.address for record in records] + [end.address for record in records for end in record.kv_endpoints]


async def send_garbage(address: str, garbage: bytes) -> None:
    """Sends it and waits until the other side hangs up."""
    if address.startswith("/"):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(garbage)
        await writer.drain()
        while await reader.read(65_536):
            pass
    except ConnectionError:
        pass  # It hung up before it had read everything.
    finally:
        writer.close()


@pytest.mark.timeout(120)
async def test_garbage_on_every_port_is_refused_while_a_request_goes_on() -> None:
    garbage = random.Random(SEED).randbytes(100_000)
    flags = ("--fake-step-s", "0.02")
    async with run_cluster(decode_flags=flags) as cluster, AsyncClient(cluster.target) as client:
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        asking = asyncio.create_task(client.generate(prompt_token_ids=PROMPT, params=params))
        await cluster.wait_for_view(lambda view: view.instances["decode-0"].load.running_requests == 1)
        ports = ports_of(cluster)
        assert len(ports) == 9, "router, prefill, decode, and the KV of both over three transports"
        async with asyncio.timeout(30):
            await asyncio.gather(*(send_garbage(port, garbage) for port in ports))
        assert not asking.done(), "the garbage came too late to disturb"
        assert (await asking).token_ids == tuple(FakeModel().answer(PROMPT, 0, ANSWER_TOKENS))
        assert "does not speak Kaveri's KV protocol" in cluster.log_text("decode-0")
        assert (await client.generate(prompt_token_ids=PROMPT, params=params)).finish_reason == "length"
