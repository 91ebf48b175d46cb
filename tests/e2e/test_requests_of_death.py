"""Requests that raise an exception wherever they are computed, in a cluster of real processes whose supervisor starts
instances again: each ends alone, and at most two instances end under it."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView
from kaveri.errors import EngineError
from kaveri.models import resolve_model
from tests.support.deadly_engines import BUILDER, DRAW, FORWARD
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.plain_transformers import PlainTransformers

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
ANSWER_TOKENS = 12
DEATHS = [FORWARD + 0, DRAW + 0, FORWARD + 1, DRAW + 4, FORWARD + 7]
BESIDE_EACH = 60


def _answers(prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    plain = PlainTransformers(resolve_model("kaveri-tiny"), ignore_eos=True)
    return {prompt: tuple(plain.answer(prompt, ANSWER_TOKENS)) for prompt in prompts}


def _stops(cluster: LocalCluster) -> int:
    """How often an engine has stopped."""
    return sum(cluster.log_text(name).count("engine_stopped") for name in ENGINES)


@pytest.mark.timeout(240)
async def test_five_requests_of_death_beside_300_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(1, 250) for _ in range(rng.randint(4, 40))) for _ in range(20)]
    answers = await asyncio.to_thread(_answers, prompts)
    settings = {"engine": BUILDER, "dtype": "float32", "kv_cache_memory": "16MiB", "restart": True}
    # Both prefill instances end at once, and take seconds to start: requests wait for them.
    async with (
        run_cluster(prefill_count=2, decode_count=2, **settings) as cluster,
        AsyncClient(cluster.target) as client,
    ):

        async def ask(prompt: tuple[int, ...], **params: object) -> tuple[int, ...]:
            wanted = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True} | params
            answer = await client.generate(
                prompt_token_ids=prompt,
                params=SamplingParams(**wanted),  # type: ignore[arg-type]
                timeout_s=100.0,
            )
            return answer.token_ids

        async def die(seed: int) -> None:
            # In the middle of the others.
            await asyncio.gather(*others[: BESIDE_EACH // 6])
            temperature = 1.0 if seed >= DRAW else 0.0
            with pytest.raises(EngineError, match="deadly") as caught:
                await client.generate(
                    prompt_token_ids=prompts[0],
                    params=SamplingParams(
                        max_tokens=ANSWER_TOKENS, temperature=temperature, seed=seed, ignore_eos=True
                    ),
                    request_id=f"deadly-{seed}",
                    timeout_s=100.0,
                )
            assert "raises" in str(caught.value)

        def is_whole(view: ClusterView) -> bool:
            return view.instances.keys() >= set(ENGINES)

        for seed in DEATHS:
            stopped = _stops(cluster)
            asked = [prompts[number % len(prompts)] for number in range(BESIDE_EACH)]
            others = [asyncio.create_task(ask(prompt)) for prompt in asked]
            await die(seed)
            assert await asyncio.gather(*others) == [answers[prompt] for prompt in asked]
            ended = _stops(cluster) - stopped
            assert 1 <= ended <= 2 if seed < DRAW else ended == 0
            await cluster.wait_for_view(is_whole, 60.0)
