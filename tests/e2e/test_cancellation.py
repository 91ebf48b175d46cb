"""A cancelled request ends everywhere, in every phase, and frees every block."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kaveri import AsyncClient, Chunk, SamplingParams
from kaveri.domain.view import ClusterView
from kaveri.errors import DeadlineExceeded
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
async def test_leaving_the_stream_cancels_everywhere(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.target) as client:
        async with client.stream(prompt_token_ids=PROMPT, params=LONG) as stream:
            async for chunk in stream:
                if chunk.index > 3:
                    break
        await all_free(cluster)


@pytest.mark.timeout(180)
async def test_requests_that_wait_in_queues_are_cancelled_too() -> None:
    # One request fits into the decode pool, so the others wait on the prefill side, and behind them in its queue.
    pool = ("--kv-cache-memory", str(180 * 2 * 2 * 16 * 2 * 8 * 4), "--max-model-len", "2700")
    async with (
        run_cluster(prefill_flags=(*SLOW, *pool), decode_flags=(*SLOW, *pool)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        long_prompt = tuple(range(1, 999)) + tuple(range(1, 702))
        params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)

        async def ask(request_id: str) -> str | None:
            answer = await client.generate(prompt_token_ids=long_prompt, params=params, request_id=request_id)
            return answer.finish_reason

        first = asyncio.create_task(ask("decoding"))
        await cluster.wait_for_view(running("decode-0"), within_s=60)
        waits_for_room = asyncio.create_task(ask("waits for room"))
        await cluster.wait_for_view(
            lambda view: (
                view.instances["prefill-0"].load.free_blocks < 100
                and view.instances["prefill-0"].load.queued_prefill_tokens == 0
            ),
            within_s=60,
        )
        queued = asyncio.create_task(ask("queued"))
        await cluster.wait_for_view(
            lambda view: view.instances["prefill-0"].load.queued_prefill_tokens >= len(long_prompt), within_s=60
        )
        for request_id in ("queued", "waits for room", "decoding"):
            assert await client.cancel(request_id), request_id
        assert [await task for task in (queued, waits_for_room, first)] == ["cancelled"] * 3
        await all_free(cluster)


@pytest.mark.timeout(180)
async def test_a_deadline_ends_the_request_everywhere(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.target) as client:
        with pytest.raises(DeadlineExceeded):
            await read_all(client, "late", timeout_s=1.5)
        await all_free(cluster)


@pytest.mark.timeout(180)
async def test_a_client_that_vanishes_frees_everything(cluster: LocalCluster) -> None:
    client_process = await start_endless_client([cluster.target])
    try:
        await cluster.wait_for_view(running("decode-0"), within_s=30)
    finally:
        client_process.kill()
        await client_process.wait()
    await all_free(cluster)
