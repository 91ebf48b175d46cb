"""What penalties, biases and grammars cost a draw, beside the draw itself.

32 rows of logits over 131,072 tokens are sampled by the transformers engine's sampler, alternately as they are, with
all penalties and a bias behind 1,000 tokens of prompt and 500 of answer, and with a JSON schema over the bundled
model's tokens. Greedy rows, too. Then how long a grammar takes to be compiled.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.support.harness import Options, Report, run
from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.token_rules import TokenRules
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.models import KAVERI_TINY
from kaveri.text.grammars import Grammars, compile_grammar, grammar_tokenizer, read_tokenizer

ROWS = 32
VOCAB_SIZE = 131_072
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 500
REPEATS = 12
EOS = frozenset({0})
SCHEMA = Grammar.json_schema({"type": "array", "items": {"type": "object"}, "minItems": 100})
_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((5, 1.0),),
}


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    torch.set_num_threads(1)
    repeats = options.choose(REPEATS, 3)
    report.workload = {"rows": ROWS, "vocabulary": VOCAB_SIZE, "answer_tokens": ANSWER_TOKENS, "threads": 1}
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    for temperature, name in ((1.0, "sampled"), (0.0, "greedy")):
        plain = ResolvedParams(temperature=temperature, seed=1)
        kinds: dict[str, Callable[[int], float]] = {
            "plain": _drawer(logits, plain),
            "penalties and a bias": _drawer(logits, ResolvedParams(temperature=temperature, seed=1, **_PENALTIES)),
            "a schema": _drawer(logits, ResolvedParams(temperature=temperature, seed=1, grammar=SCHEMA)),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(repeats + 1):
            for kind, draw in kinds.items():
                seconds = draw(number)
                # The first makes the state of the answer so far.
                if number:
                    taken[kind].append(1e3 * seconds)
        for kind, values in taken.items():
            report.row(f"{name}, {kind}", values, "ms")
            if kind != "plain":
                ratio = statistics.median(values) / statistics.median(taken["plain"])
                report.ratio(f"{name}, {kind} / plain", ratio)
    tokenizer = grammar_tokenizer(read_tokenizer(KAVERI_TINY), 1536, EOS)
    report.row(
        "compile a schema", [1e3 * _seconds(lambda: compile_grammar(tokenizer, SCHEMA)) for _ in range(20)], "ms"
    )


def _drawer(logits: torch.Tensor, params: ResolvedParams) -> Callable[[int], float]:
    """Return a function that draws the token of each row at an index of the answer; it returns the seconds taken."""
    grammars, rng = Grammars(KAVERI_TINY, VOCAB_SIZE, EOS), random.Random(0)
    histories, rules = [], []
    for _ in range(ROWS):
        answer = ANSWER_TOKENS + REPEATS + 1 if params.grammar is None else 0
        history = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS + answer)]
        histories.append(history)
        rules.append(
            TokenRules(params, history, PROMPT_TOKENS, VOCAB_SIZE, EOS, grammars) if params.has_rules else None
        )
    first = ANSWER_TOKENS if params.grammar is None else 0

    def draw(number: int) -> float:
        index = first + number
        slices = [SequenceSlice((), 0, (), True, index, params, each) for each in rules]
        began_s = time.perf_counter()
        drawn = draw_tokens(logits, slices, EOS)
        seconds = time.perf_counter() - began_s
        if params.grammar is not None:
            for history, token in zip(histories, drawn, strict=True):
                history.append(token.token_id)  # type: ignore[union-attr]
        return seconds

    return draw


def _seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    run("engine.rules", measure, description=__doc__)
