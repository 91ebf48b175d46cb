"""A cancelled request ends everywhere, in every phase, and frees every block."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kaveri import AsyncClient, Chunk, SamplingParams
from kaveri.domain.view import ClusterView
from tests.support.endless_client import start_endless_client
from tests.support.local_cluster import LocalCluster, run_cluster

# A second for the cancellation, the rest for heartbeats and a busy machine.
FREE_WITHIN_S = 3.0
LONG = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
PROMPT = tuple(range(1, 999))
SLOW = ("--fake-step-s", "0.05", "--chunk-tokens", "64")


# One cluster, and one event loop, for the module: starting one is most of a test's time.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    """A slow cluster of one instance per role; every test leaves it with all blocks free."""
    async with run_cluster(prefill_flags=SLOW, decode_flags=SLOW) as cluster:
        yield cluster


def running(instance_id: str) -> Callable[[ClusterView], bool]:
    return lambda view: view.instances[instance_id].load.running_requests > 0


async def caught_while(cluster: LocalCluster, phase: str) -> ClusterView:
    """Waits until the only request of the cluster is in `phase`."""

    def in_phase(view: ClusterView) -> bool:
        prefill, decode = view.instances["prefill-0"].load, view.instances["decode-0"].load
        held_here = prefill.free_blocks < prefill.total_blocks
        held_there = decode.free_blocks < decode.total_blocks
        return {
            "prefilling": held_here and prefill.queued_prefill_tokens > 0,
            "pushing": held_here and held_there,
            "decoding": not held_here and decode.running_requests > 0,
        }[phase]

    return await cluster.wait_for_view(in_phase)


async def all_free(cluster: LocalCluster) -> None:
    def is_free(view: ClusterView) -> bool:
        return all(
            status.load.free_blocks == status.load.total_blocks
            and status.load.running_requests == status.load.waiting_requests == 0
            for status in view.instances.values()
        )

    await cluster.wait_for_view(is_free, within_s=FREE_WITHIN_S)


async def read_all(client: AsyncClient, request_id: str, timeout_s: float = 60.0) -> list[Chunk]:
    async with client.stream(
        prompt_token_ids=PROMPT, params=LONG, request_id=request_id, timeout_s=timeout_s
    ) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.timeout(180)
async def test_cancel_in_each_phase_frees_every_block_and_ends_the_stream(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.target) as client:
        for phase in ("prefilling", "pushing", "decoding"):
            reading = asyncio.create_task(read_all(client, phase))
            await caught_while(cluster, phase)
            assert await client.cancel(phase)
            chunks = await asyncio.wait_for(reading, 10)
            assert chunks[-1].finish_reason == "cancelled", phase
            await all_free(cluster)
        assert not await client.cancel("decoding"), "a request that has ended is not found"


@pytest.mark.timeout(180)
async def test_a_client_that_vanishes_frees_everything(cluster: LocalCluster) -> None:
    client_process = await start_endless_client([cluster.target])
    try:
        await cluster.wait_for_view(running("decode-0"), within_s=30)
    finally:
        client_process.kill()
        await client_process.wait()
    await all_free(cluster)
