"""Clients that read answers at decode instances get the routers' answers. test_vllm_grpc_exactness.py freezes one."""

import asyncio
import random

import pytest

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.domain.view import ClusterView
from tests.support.answer_doors import read_tokens
from tests.support.local_cluster import run_cluster
from tests.support.redis_fixture import free_port

PROMPT_COUNT = 100
SEED = 14
EOS = ("--fake-eos-probability", "0.01")


def _requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(SEED)
    found = []
    for number in range(PROMPT_COUNT):
        params = SamplingParams(
            max_tokens=rng.randint(1, 60),
            temperature=0.0 if number % 2 else 1.0,
            seed=number,
            stop=("e", "the") if number % 3 == 0 else (),
            stop_token_ids=(40, 41, 42) if number % 5 == 0 else (),
            logprobs=2 if number % 4 == 0 else None,
        )
        found.append(([rng.randrange(1, 250) for _ in range(rng.randint(1, 80))], params))
    return found


async def _ask_all(client: AsyncClient, *, streamed: bool) -> list[tuple[object, ...]]:
    async def ask(prompt: list[int], params: SamplingParams) -> Completion:
        if not streamed:
            return await client.generate(prompt_token_ids=prompt, params=params)
        async with client.stream(prompt_token_ids=prompt, params=params) as stream:
            return await stream.collect()

    answers = await asyncio.gather(*(ask(prompt, params) for prompt, params in _requests()))
    return [(one.token_ids, one.text, one.logprobs, one.finish_reason, one.usage) for one in answers]


def _is_free(view: ClusterView) -> bool:
    loads = [status.load for status in view.instances.values()]
    return all(load.free_blocks == load.total_blocks and load.running_requests == 0 for load in loads)


@pytest.mark.timeout(240)
async def test_a_hundred_answers_equal_those_that_routers_relay_and_a_cancelled_one_frees_everything() -> None:
    async with (
        run_cluster(
            router_count=2,
            decode_count=2,
            prefill_flags=EOS,
            decode_flags=(*EOS, "--fake-step-s", "0.01", "--direct-answers", "on"),
            metrics_port=free_port(),
            start_timeout_s=240.0,
        ) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=90) as relayed,
        AsyncClient(cluster.stack.targets, timeout_s=90, direct=True) as direct,
    ):
        for streamed in (False, True):
            before = await read_tokens(cluster)
            expected = await _ask_all(relayed, streamed=streamed)
            assert await read_tokens(cluster) == before
            assert await _ask_all(direct, streamed=streamed) == expected
            assert await read_tokens(cluster) > before
            await cluster.wait_for_view(_is_free)
        before = await read_tokens(cluster)
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        async with direct.stream(prompt_token_ids=[5] * 30, params=params) as stream:
            async for chunk in stream:
                if chunk.index >= 20:
                    break
        assert await read_tokens(cluster) > before
        await cluster.wait_for_view(_is_free)
