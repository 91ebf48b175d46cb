"""Prompts of random tokens."""

import random


def prompt(seed: int, token_count: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(token_count)]
