"""A model's generation_config: real processes answer as transformers' own generate does with the same files."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kaveri import AsyncClient, Completion, SamplingParams
from tests.e2e.test_exactness import VOCAB_SIZE, make_prompts
from tests.support.local_cluster import run_cluster
from tests.support.tiny_models import make_tiny_model

LIKELIEST = {"do_sample": True, "temperature": 0.7, "top_k": 1, "max_new_tokens": 12}
DRAWN = {"do_sample": True, "temperature": 0.75, "top_k": 5, "top_p": 0.875, "repetition_penalty": 1.0}
DRAWS = 300


def write(folder: Path, values: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def generated(folder: Path, prompt: tuple[int, ...], **asked: Any) -> Any:
    """What generate makes of the folder's files and what is asked."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.tensor([prompt])
    return model.generate(token_ids, attention_mask=torch.ones_like(token_ids), pad_token_id=0, **asked)


async def test_unset_parameters_are_those_of_the_models_file_as_in_generate(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE, max_positions=1024, tokenizer=True)
    prompts = make_prompts(seed=5)[:6]
    settings = {"engine": "transformers", "dtype": "float32", "kv_cache_memory": "16MiB", "colocated_count": 1}
    write(folder, LIKELIEST)
    async with (
        run_cluster(model=str(folder), prefill_count=0, decode_count=0, **settings) as cluster,
        AsyncClient(cluster.target, timeout_s=100) as client,
    ):
        answers = await asyncio.gather(*(client.generate(prompt_token_ids=prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == tuple(generated(folder, prompt)[0, len(prompt) :].tolist())
            assert (len(answer.token_ids), answer.finish_reason) == (12, "length")
        greedy = SamplingParams(temperature=0)
        again = await asyncio.gather(*(client.generate(prompt_token_ids=prompt, params=greedy) for prompt in prompts))
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
        (shown,) = await client.list_models()
        assert shown.default_params.chosen.keys() == {"temperature", "top_k", "max_tokens"}
        assert '"event": "generation_config_used"' in cluster.log_text("router-0")

        write(folder, DRAWN)
        await cluster.kill("router-0")
        await cluster.restart("router-0")

        async def draw(**params: Any) -> list[int]:
            wanted = (
                client.generate(prompt_token_ids=prompts[3], params=SamplingParams(max_tokens=1, seed=seed, **params))
                for seed in range(DRAWS)
            )
            found: list[Completion] = await asyncio.gather(*wanted)
            return [answer.token_ids[0] for answer in found]

        drawn = await draw()
        assert drawn == await draw(temperature=0.75, top_k=5, top_p=0.875), "as if the request said it"
        assert set(await draw(temperature=1.0, top_k=0, top_p=1.0)) - set(drawn), "what a request says wins"
    made = generated(folder, prompts[3], max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    likely = {token_id: p for token_id, p in enumerate(made.scores[0][0].softmax(-1).tolist()) if p > 0}
    assert 1 < len(likely) <= 5
    assert set(drawn) <= set(likely)
    counts = Counter(drawn)
    # Four standard deviations; the seeds, and with them the draws, are the same each time.
    for token_id, probability in likely.items():
        assert abs(counts[token_id] / DRAWS - probability) < 4 * (0.25 / DRAWS) ** 0.5
