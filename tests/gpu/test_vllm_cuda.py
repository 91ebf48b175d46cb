"""On a CUDA device vLLM draws what it draws on the CPU, and instances answer what one plain engine answers.

All share one GPU. vLLM refuses to start beside others unless it is asked to take less of the memory than is free.
"""

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="pip install 'kaveri[vllm]' installs it")

import torch

from kaveri import AsyncClient, SamplingParams
from kaveri.engine.vllm.draws import Draw, keep_drawn
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import run_cluster
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

VOCAB_SIZE = 320
CHUNK_TOKENS = 256
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256, 257, 400, 511, 512, 513, 777, 900, 1000)


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(2**64),
        ignore_eos=True,
    )


def test_the_device_draws_the_tokens_that_the_host_draws() -> None:
    rng = random.Random(1)
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1)) * 2
    placed = [(row, Draw(random_params(rng, 9), 0, 0), rng.randrange(100)) for row in range(len(logits))]
    here, there = logits.clone(), logits.cuda()
    keep_drawn(here, placed)
    keep_drawn(there, placed)
    assert there.argmax(-1).tolist() == here.argmax(-1).tolist()


# Without TRITON_F32_DEFAULT an answer of qwen2 left the plain engine at its 16th token on an H100; those of llama and
# opt did not. Attention in float32 is a Triton kernel of vLLM there, which multiplies in TF32: docs/vllm.md. Not yet
# run with the variable set.
_MAY_PART = pytest.mark.xfail(reason="an answer parted on an H100, where attention was in TF32", strict=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=_MAY_PART), "opt"])
async def test_answers_equal_one_plain_engine_on_the_same_device(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For the processes of both sides.
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    sizes = {"hidden_size": 256} | ({"word_embed_proj_dim": 256} if architecture == "opt" else {})
    folder = make_tiny_model(tmp_path, architecture, vocab_size=VOCAB_SIZE, tokenizer=True, **sizes)
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    params = [random_params(rng, 24) for _ in prompts]
    expected = bare_vllm_answers(
        folder, prompts, params, max_num_batched_tokens=CHUNK_TOKENS, gpu_memory_utilization=0.2
    )
    flags = ("--chunk-tokens", str(CHUNK_TOKENS), "--block-tokens", "32")
    small = ("--engine-args", '{"gpu_memory_utilization": 0.2}')
    async with (
        run_cluster(
            model=str(folder),
            engine="vllm",
            dtype="float32",
            prefill_count=1,
            decode_count=2,
            kv_cache_memory="64MiB",
            prefill_flags=(*flags, *small),
            decode_flags=(*flags, *small),
            start_timeout_s=600.0,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        answers = await asyncio.gather(
            *(
                client.generate(prompt_token_ids=prompt, params=each, timeout_s=200)
                for prompt, each in zip(prompts, params, strict=True)
            )
        )
    assert [answer.token_ids for answer in answers] == expected
