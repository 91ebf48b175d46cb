"""Greedy answers of a checkpoint by transformers alone, to compare with Kaveri's engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class PlainTransformers:
    """`generate` of a checkpoint, in float32. ignore_eos: past end-of-sequence ids. loading: for from_pretrained()."""

    def __init__(self, folder: Path | str, *, ignore_eos: bool = False, device: str = "cpu", **loading: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **loading).to(device)
        if ignore_eos:
            self._model.generation_config.eos_token_id = None

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        """Return the greedy answer to a prompt; shorter if the model ends it."""
        prompt = torch.tensor([list(token_ids)], device=self._model.device)
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=token_count, do_sample=False, pad_token_id=0
        )
        answer: list[int] = output[0, len(token_ids) :].tolist()
        return answer

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities after each token: [tokens, vocabulary], float32, on the CPU."""
        logits = self._model(torch.tensor([list(token_ids)], device=self._model.device)).logits
        return torch.log_softmax(logits[0].float(), -1).cpu()
