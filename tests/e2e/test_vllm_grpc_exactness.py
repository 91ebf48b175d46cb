"""Greedy answers over other doors are the SDK's, token for token. On vLLM: tests/vllm/test_doors.py."""

import asyncio
from typing import Any

import openai
import pytest

from kaveri import AsyncClient, SamplingParams
from tests.support.answer_doors import WITHIN_S, asked_doors, door_settings, read_tokens, read_tokens_at_each
from tests.support.local_cluster import LocalCluster, run_cluster

LONG_TOKENS = 400


@pytest.mark.timeout(400)
async def test_greedy_answers_are_the_sdks_whole_and_streamed() -> None:
    settings = door_settings() | {"engine": "transformers", "prefill_count": 2, "decode_count": 2}
    async with run_cluster(**settings) as cluster:
        async with asked_doors(cluster) as doors:
            await doors.check_router()
            await doors.check_direct()
        await _check_frozen(cluster)


async def _check_frozen(cluster: LocalCluster) -> None:
    prompts = [f"Count from {number} to {number + 40}." for number in range(1, 7)]
    params = SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)
    async with AsyncClient(cluster.target, timeout_s=WITHIN_S) as relayed:
        asking = (relayed.generate(prompt, params=params) for prompt in prompts)
        expected = [answer.text for answer in await asyncio.gather(*asking)]
    fields: dict[str, Any] = {"model": "kaveri-tiny", "max_tokens": LONG_TOKENS, "temperature": 0}
    url, before = f"http://{cluster.stack.http_targets[0]}/v1", await read_tokens_at_each(cluster)
    async with (
        AsyncClient(cluster.target, timeout_s=WITHIN_S, direct=True) as client,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S) as http,
    ):
        by_sdk = [asyncio.create_task(client.generate(prompt, params=params)) for prompt in prompts]
        async with asyncio.timeout(WITHIN_S):
            while (read := await read_tokens_at_each(cluster)) == before:
                await asyncio.wait(by_sdk, timeout=0.02)
        name = max(read, key=lambda name: read[name] - before[name])
        whole = asyncio.create_task(
            http.completions.create(**fields, prompt=prompts, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
        )
        async with asyncio.timeout(WITHIN_S):
            while await read_tokens(cluster) < sum(before.values()) + 8 * len(prompts):
                await asyncio.wait([*by_sdk, whole], timeout=0.02)
        cluster.freeze(name)
        try:
            answers, by_http = await asyncio.gather(asyncio.gather(*by_sdk), whole)
        finally:
            cluster.thaw(name)
    assert [answer.text for answer in answers] == expected, "the SDK"
    assert [choice.text for choice in by_http.choices] == expected, "HTTP"
    timings = [answer.timing.server for answer in answers]
    assert any(timing.attempts > 1 or timing.reattaches for timing in timings), f"{name} had no request any more"
