"""What TF32 in attention does to the draws of tests/gpu/test_vllm_cuda.py, imitated on a CPU; see docs/vllm.md.

    python scripts/tf32_attention.py

Attention goes over the keys in tiles, as vLLM's Triton kernel does, and rounds the factors of both matrix products to
TF32 (10 bits of mantissa, to nearest) or leaves them in float32. For each query of a run a coin decides between tiles
of 16 and of 32 keys, since the kernel's tiles depend on the batch. Printed for each model: how far the logits of
several runs lie apart, the draws that vary between runs, and those that differ from plain float32 in every run.
"""

import random
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.sampler import draw_tokens
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE, ANSWER_TOKENS, RUNS = 320, 24, 24
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256, 257)
"""The first of the test's, so that the same prompts are drawn; longer ones take long here."""


class TiledAttention:
    """Registered with transformers as an attention implementation. Fields are set between calls of the model."""

    def __init__(self) -> None:
        self.tf32 = False
        self.small_tiles = torch.empty(0, dtype=torch.bool)
        """[tokens]: which queries take tiles of 16."""

    def __call__(
        self, module: object, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        """query, key, value: [1, heads, tokens, head_dim], float32. Returns [1, tokens, heads, head_dim]."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = scaling * (self._rounded(query) @ self._rounded(key).transpose(-1, -2))
        tokens = query.shape[2]
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        small, large = (self._by_tiles(scores, value, tile).transpose(1, 2) for tile in (16, 32))
        return torch.where(self.small_tiles[None, :, None, None], small, large), None

    def _by_tiles(self, scores: Tensor, value: Tensor, tile: int) -> Tensor:
        """Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3, over tiles."""
        largest = torch.full(scores.shape[:-1], -torch.inf)
        weight, total = torch.zeros_like(largest), torch.zeros(*scores.shape[:-1], value.shape[-1])
        for start in range(0, scores.shape[-1], tile):
            part = scores[..., start : start + tile]
            before, largest = largest, torch.maximum(largest, part.max(-1).values)
            shares, kept = (part - largest[..., None]).exp(), (before - largest).exp()
            weight = weight * kept + shares.sum(-1)
            added = self._rounded(shares) @ self._rounded(value[:, :, start : start + tile])
            total = total * kept[..., None] + added
        return total / weight[..., None]

    def _rounded(self, values: Tensor) -> Tensor:
        if not self.tf32:
            return values
        return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def requests_of_the_test() -> list[tuple[list[int], ResolvedParams]]:
    """Prompts and parameters as the test draws them."""
    rng = random.Random(2)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (*LENGTHS, 400, 511, 512, 513, 777, 900, 1000)
    ]
    params = [
        ResolvedParams(
            max_tokens=ANSWER_TOKENS,
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 40]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(2**64),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    return list(zip(prompts, params, strict=True))[: len(LENGTHS)]


def drawn(logits: Tensor, params: ResolvedParams) -> list[int]:
    """Of the rows of an answer."""
    slices = [SequenceSlice([1], 0, [0], True, index, params) for index in range(len(logits))]
    return [token.token_id for token in draw_tokens(logits, slices)]  # type: ignore[union-attr]


def main() -> None:
    """Prints the figures of all models."""
    attention, coins = TiledAttention(), torch.Generator().manual_seed(3)
    AttentionInterface.register("tiled", attention)
    for architecture in ("llama", "qwen2", "opt"):
        sizes: dict[str, Any] = {"word_embed_proj_dim": 256} if architecture == "opt" else {}
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_model(folder, architecture, vocab_size=VOCAB_SIZE, hidden_size=256, **sizes)
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            tiled = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="tiled")
        for number, (prompt, params) in enumerate(requests_of_the_test()):
            token_ids = list(prompt)
            for index in range(ANSWER_TOKENS):
                logits = plain(torch.tensor([token_ids])).logits[0, -1:].detach()
                piece = SequenceSlice([1], 0, [0], True, index, params)
                token_ids.append(draw_tokens(logits, [piece])[0].token_id)  # type: ignore[union-attr]
            answer = token_ids[len(prompt) :]
            for attention.tf32 in (False, True):
                runs = []
                for _ in range(RUNS):
                    attention.small_tiles = torch.rand(len(token_ids) - 1, generator=coins) < 0.5
                    runs.append(tiled(torch.tensor([token_ids[:-1]])).logits[0, len(prompt) - 1 :].detach())
                apart = (torch.stack(runs) - runs[0]).abs().max().item()
                found = [set(tokens) for tokens in zip(*(drawn(logits, params) for logits in runs), strict=True)]
                vary = [index for index, tokens in enumerate(found) if len(tokens) > 1]
                differ = [index for index, tokens in enumerate(found) if answer[index] not in tokens]
                precision = "TF32" if attention.tf32 else "float32"
                print(
                    f"{architecture} answer {number}, {precision}: logits {apart:.1g} apart, "
                    f"tokens that vary {vary}, that differ from float32 {differ}",
                    flush=True,
                )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    main()
