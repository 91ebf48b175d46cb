"""Writes prompts for kaveri-tiny whose answers have widely different lengths.

`python -m training.predictor.make_prompts --out FILE`

One JSON object per line for `kaveri predictor label`: half of them {"prompt": ...}, half {"messages": [...]}. Prompts
that differ in nothing but capitals or the mark at their end count as one and are drawn once, so that a held-out prompt
has no such twin among the others, however they are split.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random

from training.kaveri_tiny.families import FAMILIES

SHARES = {
    "song": 26,
    "count up": 24,
    "story": 14,
    "count down": 10,
    "copy": 8,
    "times table": 4,
    "calendar": 2,
    "greeting": 1,
    "alphabet": 2,
    "repeat": 1,
    "spell": 2,
    "reverse": 2,
    "secret word": 2,
    "arithmetic": 2,
}
"""Percent of the prompts. Few families have long answers, so these get most of the prompts: with equal shares, or those
of the model's own training, nine answers in ten have fewer than 200 tokens, and always saying so would look good."""

_DRAWS_PER_PROMPT = 20


def make_prompts(count: int, seed: int) -> list[str]:
    """Different prompts, in random order; a small family gives fewer than its share when it has no more."""
    rng = Random(seed)
    chosen: dict[str, str] = {}
    for family, share in SHARES.items():
        generate, _ = FAMILIES[family]
        wanted = round(count * share / 100)
        found = 0
        for _ in range(wanted * _DRAWS_PER_PROMPT):
            if found == wanted:
                break
            prompt = generate(rng, 1.0).prompt
            key = prompt.lower().rstrip(".:?!")
            if key not in chosen:
                chosen[key] = prompt
                found += 1
    prompts = list(chosen.values())
    rng.shuffle(prompts)
    return prompts


def as_line(prompt: str, chat: bool) -> str:
    """A line of the file: the prompt raw, or as a conversation of one turn."""
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return json.dumps(content)


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    prompts = make_prompts(given.count, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(as_line(prompt, place % 2 == 0) + "\n" for place, prompt in enumerate(prompts)))
    print(f"{len(prompts)} prompts in {given.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
