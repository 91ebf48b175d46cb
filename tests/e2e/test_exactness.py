"""What a request gets from router, two prefill and two decode instances equals one model run by hand."""

import asyncio
import random
import re
from pathlib import Path

import pytest

from kaveri import AsyncClient, Completion, SamplingParams
from tests.support.devices import DEVICES
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
MAX_TOKENS = 24
SPLIT = {"prefill_count": 2, "decode_count": 2, "colocated_count": 0}
COLOCATED = {"prefill_count": 0, "decode_count": 0, "colocated_count": 2}
GROWING_TOKENS = 100
"""Enough to outgrow a small pool while decoding."""
# Off the block (16) and chunk (512) sizes and on them, from one token to two chunks.
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 23, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200)
LENGTHS += (255, 257, 333, 400, 511, 512, 513, 640, 777, 900)


def make_prompts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]


def reference(folder: Path, device: str, prompts: list[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """Return greedy answers of transformers' own generate, one prompt at a time."""
    model = PlainTransformers(folder, device=device)
    return [tuple(model.answer(prompt, max_tokens)) for prompt in prompts]


async def ask_all(
    client: AsyncClient, prompts: list[tuple[int, ...]], params: list[SamplingParams]
) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.generate(prompt_token_ids=prompt, params=each, timeout_s=100)
            for prompt, each in zip(prompts, params, strict=True)
        )
    )


def preemptions(cluster: LocalCluster, role: str) -> int:
    texts = [cluster.log_text(f"{role}-{number}") for number in range(2)]
    return sum(int(count) for text in texts for count in re.findall(r'"preemptions": (\d+)', text))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("architecture", "kv_cache_blocks", "max_tokens", "counts"),
    # 68 blocks hold one longest request and little else: requests wait on the prefill side and are preempted on decode.
    [
        ("llama", 68, GROWING_TOKENS, SPLIT),
        ("llama", 68, GROWING_TOKENS, COLOCATED),
        ("qwen2", 400, MAX_TOKENS, SPLIT),
        ("opt", 400, MAX_TOKENS, SPLIT),
    ],
)
async def test_greedy_answers_equal_generate_with_all_requests_in_flight(
    device: str, tmp_path: Path, architecture: str, kv_cache_blocks: int, max_tokens: int, counts: dict[str, int]
) -> None:
    folder = make_tiny_model(tmp_path, architecture, vocab_size=VOCAB_SIZE, max_positions=1024, tokenizer=True)
    prompts = make_prompts(seed=1)
    expected = reference(folder, device, prompts, max_tokens)
    head_count = 4 if architecture == "opt" else 2
    block_bytes = 3 * 2 * 16 * head_count * 16 * 4
    settings = {"engine": "transformers", "device": device, "dtype": "float32", **counts}
    async with (
        run_cluster(model=str(folder), kv_cache_memory=str(kv_cache_blocks * block_bytes), **settings) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        answers = await ask_all(client, prompts, [greedy] * len(prompts))
        for length, answer, tokens in zip(LENGTHS, answers, expected, strict=True):
            assert answer.token_ids == tokens, f"prompt of {length} tokens"
            assert answer.finish_reason == "length"
            assert answer.usage.prompt_tokens == length
            if counts is COLOCATED:
                timing = answer.timing.server
                assert timing.prefill_instance_id == timing.decode_instance_id
                assert (timing.kv_bytes, timing.kv_transport) == (0, "none")
        served = {answer.timing.server.prefill_instance_id for answer in answers}
        served |= {answer.timing.server.decode_instance_id for answer in answers}
        assert served == set(cluster.stack.instance_ids) - {"router-0"}
        if kv_cache_blocks < 100:
            assert preemptions(cluster, "colocated" if counts is COLOCATED else "decode") > 0
        if architecture == "qwen2":
            await _check_sampled(client)
        await cluster.wait_for_view(
            lambda view: all(status.load.free_blocks == status.load.total_blocks for status in view.instances.values())
        )


async def _check_sampled(client: AsyncClient) -> None:
    prompts = make_prompts(seed=2)[:12]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7 + 0.05 * number, top_p=0.9, top_k=50, seed=number)
        for number in range(len(prompts))
    ]
    together = await ask_all(client, prompts, params)
    alone = [
        await client.generate(prompt_token_ids=prompt, params=each, timeout_s=60)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    others = await ask_all(client, prompts[::-1], params[::-1])
    tokens = [answer.token_ids for answer in together]
    assert [answer.token_ids for answer in alone] == tokens
    assert [answer.token_ids for answer in others[::-1]] == tokens
    assert len(set(tokens)) == len(tokens)
