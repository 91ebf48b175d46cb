"""The same seed gives the same trace: in one process, in another, and with another order of hashes."""

import os
import subprocess
import sys

from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster.draw import draw_plan
from tests.simulation.cluster.schedule import run_schedule

SEEDS = range(500, 503)


def _hashes_elsewhere(hash_seed: str) -> dict[int, str]:
    command = [sys.executable, "-m", "tests.simulation.cluster", "--hashes"]
    command += ["--seed", str(SEEDS.start), "--count", str(len(SEEDS)), "--stop-after", str(len(SEEDS))]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False).stdout
    lines = (line.split() for line in printed.splitlines())
    return {int(words[0]): words[1] for words in lines if len(words) == 2 and words[0].isdigit()}


def test_the_same_seed_gives_the_same_trace_under_every_order_of_hashes(tokenizer: ModelTokenizer) -> None:
    here = {seed: run_schedule(draw_plan(seed), tokenizer).hash for seed in SEEDS}
    # This process hashes strings with a seed of its own.
    assert _hashes_elsewhere("1") == here
    assert len(set(here.values())) == len(SEEDS)
    assert {seed: run_schedule(draw_plan(seed), tokenizer).hash for seed in SEEDS} == here


def test_a_kept_trace_does_not_change_what_happens(tokenizer: ModelTokenizer) -> None:
    plan = draw_plan(SEEDS.start)
    assert run_schedule(plan, tokenizer, lines=True).hash == run_schedule(plan, tokenizer).hash
