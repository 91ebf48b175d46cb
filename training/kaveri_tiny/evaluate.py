"""Measures exact-match per family on held-out prompts, and writes the measurement into the model card.

`python -m training.kaveri_tiny.evaluate --model FOLDER` decodes greedily in float32 and in bfloat16. An answer is right
when it equals the expected one to the letter and the model then stopped by itself. Half of the prompts are rendered by
the chat template, the others are given raw.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from training.kaveri_tiny.families import CLOSED_FAMILIES, FAMILIES, Sample, draw
from training.kaveri_tiny.make_tokenizer import MODEL_FOLDER

TABLE_BEGIN, TABLE_END = "<!-- measured: begin -->", "<!-- measured: end -->"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class FamilyResult:
    """One family's measurement: prompts, how many were right per dtype, longest prompt and answer in tokens."""

    prompts: int
    right: dict[str, int]
    longest_prompt: int
    longest_answer: int


def held_out_samples(family: str, count: int, seed: int) -> list[Sample]:
    """Up to `count` different held-out samples, with lengths spread over the family's whole range."""
    rng = Random(f"{seed} {family}")
    samples: dict[str, Sample] = {}
    for _ in range(count * 4):
        sample = draw(rng, family, 1.0, held_out=True)
        samples.setdefault(sample.prompt, sample)
        if len(samples) == count:
            break
    return list(samples.values())


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """The token ids of a prompt, as a chat of one turn or raw."""
    text = prompt
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def is_right(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding gives exactly this answer and then stops.

    Greedy decoding gives it if and only if, with the answer so far before it, each of its tokens and then the end token
    is the likeliest: one pass tells, where generating would take one per token.
    """
    expected = [*answer, model.config.eos_token_id]
    logits = model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    return bool(logits.argmax(dim=-1).tolist() == expected)


def measure(folder: Path, count: int, seed: int, dtypes: list[str]) -> dict[str, FamilyResult]:
    """Exact-match of every family."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {name: LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[name]).eval() for name in dtypes}
    results = {}
    for family in FAMILIES:
        samples = held_out_samples(family, count, seed)
        prompts = [encode_prompt(tokenizer, sample.prompt, index % 2 == 0) for index, sample in enumerate(samples)]
        expected = [tokenizer(sample.answer)["input_ids"] for sample in samples]
        result = FamilyResult(len(samples), {}, max(map(len, prompts)), max(map(len, expected)))
        for name, model in models.items():
            right = [is_right(model, prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)]
            result.right[name] = sum(right)
        results[family] = result
        print(family, asdict(result), flush=True)
    return results


def table(results: dict[str, FamilyResult]) -> str:
    """The measurement as a Markdown table."""
    dtypes = list(next(iter(results.values())).right)
    exact = " | ".join(f"Exact in {name}" for name in dtypes)
    lines = [
        f"| Family | Prompts | {exact} | Longest prompt, tokens | Longest answer, tokens |",
        f"| --- | ---: |{' ---: |' * len(dtypes)} ---: | ---: |",
    ]
    for family, result in results.items():
        label = f"{family} (trained on)" if family in CLOSED_FAMILIES else family
        shares = " | ".join(f"{100 * result.right[name] / result.prompts:.1f} %" for name in dtypes)
        lines.append(f"| {label} | {result.prompts} | {shares} | {result.longest_prompt} | {result.longest_answer} |")
    return "\n".join(lines)


def write_card(card: Path, text: str) -> None:
    """Replaces what stands between the two markers of the model card."""
    before, rest = card.read_text().split(TABLE_BEGIN)
    _, after = rest.split(TABLE_END)
    card.write_text(f"{before}{TABLE_BEGIN}\n\n{text}\n\n{TABLE_END}{after}")


def main() -> None:
    """Reads the command line, measures and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--count", type=int, default=100, help="prompts per family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append", help="both when not given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the measurement")
    parser.add_argument("--card", type=Path, help="model card whose table to replace")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtypes = arguments.dtype or list(DTYPES)
    results = measure(arguments.model, arguments.count, arguments.seed, dtypes)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n"
        )
    if arguments.card:
        write_card(arguments.card, table(results))


if __name__ == "__main__":
    main()
