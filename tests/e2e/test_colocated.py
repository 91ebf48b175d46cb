"""Colocated instances as real processes behind a router: exact answers, cancellation, deaths, mixed clusters."""

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from kaveri import AsyncClient, Chunk, SamplingParams
from kaveri.domain.view import ClusterView, Role
from kaveri.engine.stepwise.fake import FakeModel
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
# Off the block (16) and chunk (512) sizes and on them, from one token to two chunks.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 127, 128, 129, 200, 255, 333, 511, 512, 513, 640, 777, 900)
GROWING_TOKENS = 100
ONLY_COLOCATED = {"prefill_count": 0, "decode_count": 0, "colocated_count": 2}
SLOW = ("--fake-step-s", "0.025", "--chunk-tokens", "64")
FREE_WITHIN_S = 3.0
MODEL = FakeModel()


def make_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(1, vocab_size) for _ in range(length)) for length in lengths]


def is_free(view: ClusterView) -> bool:
    return all(
        status.load.free_blocks == status.load.total_blocks
        and status.load.running_requests == status.load.waiting_requests == 0
        for status in view.instances.values()
        if status.record.role is not Role.ROUTER
    )


async def generate(client: AsyncClient, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], int]:
    """The answer, and how many attempts it took."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    answer = await client.generate(prompt_token_ids=prompt, params=params, timeout_s=60)
    return answer.token_ids, answer.timing.server.attempts


@pytest.mark.timeout(300)
async def test_greedy_answers_equal_generate_in_a_pool_that_one_longest_request_fills(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE, max_positions=1024, tokenizer=True)
    prompts = make_prompts(LENGTHS, VOCAB_SIZE, seed=1)
    model = PlainTransformers(folder)
    expected = [tuple(model.answer(prompt, GROWING_TOKENS)) for prompt in prompts]
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    settings = {"engine": "transformers", "dtype": "float32", "kv_cache_memory": str(68 * block_bytes)}
    async with (
        run_cluster(model=str(folder), **settings, **ONLY_COLOCATED) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        params = SamplingParams(max_tokens=GROWING_TOKENS, temperature=0)
        answers = await asyncio.gather(
            *(client.generate(prompt_token_ids=prompt, params=params, timeout_s=100) for prompt in prompts)
        )
        for length, answer, tokens in zip(LENGTHS, answers, expected, strict=True):
            assert answer.token_ids == tokens, f"prompt of {length} tokens"
            timing = answer.timing.server
            assert timing.prefill_instance_id == timing.decode_instance_id
            assert (timing.kv_bytes, timing.kv_transport) == (0, "none")
        assert {answer.timing.server.decode_instance_id for answer in answers} == {"colocated-0", "colocated-1"}
        logs = [cluster.log_text(f"colocated-{number}") for number in range(2)]
        assert sum(int(count) for text in logs for count in re.findall(r'"preemptions": (\d+)', text)) > 0
        await cluster.wait_for_view(is_free)


async def caught_while(cluster: LocalCluster, phase: str) -> None:
    """Waits until the only request of the cluster is in `phase`."""

    def in_phase(view: ClusterView) -> bool:
        loads = [status.load for status in view.instances.values() if len(status.record.phases) == 2]
        computing = any(load.queued_prefill_tokens for load in loads)
        decoding = any(load.light_requests + load.heavy_requests for load in loads)
        return computing if phase == "computing" else decoding

    await cluster.wait_for_view(in_phase)


@pytest.mark.timeout(180)
async def test_cancel_in_each_phase_frees_every_block() -> None:
    prompt = tuple(range(1, 999)) * 2
    params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)

    async def read_all(client: AsyncClient, request_id: str) -> list[Chunk]:
        async with client.stream(prompt_token_ids=prompt, params=params, request_id=request_id) as stream:
            return [chunk async for chunk in stream]

    async with (
        run_cluster(colocated_flags=SLOW, **ONLY_COLOCATED) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        for phase in ("computing", "decoding"):
            reading = asyncio.create_task(read_all(client, phase))
            await caught_while(cluster, phase)
            assert await client.cancel(phase)
            chunks = await asyncio.wait_for(reading, 10)
            assert chunks[-1].finish_reason == "cancelled", phase
            await cluster.wait_for_view(is_free, within_s=FREE_WITHIN_S)
        # Immediately, at an unknown stage of the request.
        for number in range(20):
            reading = asyncio.create_task(read_all(client, f"request {number}"))
            await asyncio.sleep(0)
            while not await client.cancel(f"request {number}"):
                pass
            await asyncio.wait_for(reading, 10)
        await cluster.wait_for_view(is_free, within_s=FREE_WITHIN_S)


@pytest.mark.timeout(180)
async def test_one_of_two_killed_mid_answer_loses_no_token() -> None:
    prompts = make_prompts([40] * 6 + [300] * 4, MODEL.vocab_size, seed=3)
    async with (
        run_cluster(colocated_flags=SLOW, **ONLY_COLOCATED) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        running = [asyncio.create_task(generate(client, prompt, 80)) for prompt in prompts]
        await cluster.wait_for_view(
            lambda view: (
                view.instances["colocated-0"].load.light_requests > 1
                and view.instances["colocated-1"].load.running_requests > 0
            )
        )
        await cluster.kill("colocated-0")
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*running)
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert tokens == tuple(MODEL.answer(prompt, 0, 80))
        attempts = [count for _, count in answers]
        assert max(attempts) > 1, "the killed one held no request: the test has shown nothing"
        assert min(attempts) == 1, "requests elsewhere were disturbed"
        await cluster.restart("colocated-0")
        await cluster.wait_for_view(lambda view: is_free(view) and "colocated-0" in view.instances)


@pytest.mark.timeout(180)
async def test_both_kinds_in_one_cluster_answer_and_the_colocated_one_suffices_when_decode_dies() -> None:
    prompts = make_prompts([30 + 10 * number for number in range(16)], MODEL.vocab_size, seed=5)

    async def ask_all(client: AsyncClient) -> set[str]:
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        answers = await asyncio.gather(
            *(client.generate(prompt_token_ids=prompt, params=params, timeout_s=60) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == tuple(MODEL.answer(prompt, 0, 60))
        return {answer.timing.server.decode_instance_id for answer in answers}

    async with run_cluster(colocated_count=1) as cluster, AsyncClient(cluster.target) as client:
        assert await ask_all(client) == {"decode-0", "colocated-0"}
        await cluster.kill("decode-0")
        await cluster.wait_for_view(lambda view: "decode-0" not in view.instances)
        assert await ask_all(client) == {"colocated-0"}
        await cluster.restart("decode-0")
        await cluster.wait_for_view(is_free)
