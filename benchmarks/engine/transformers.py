"""The transformers engine against model.generate: prompts and answers of one model on one thread, batch 1, 8 and 32.

On the CPU, or with --device cuda on a GPU, with longer prompts.

Ours is a whole StepwiseEngine that plays both sides and pushes to itself over a Unix socket, with chunks of 512 tokens
and blocks of 16. Theirs is `generate` with its default attention (sdpa), prompts padded to the left. Both draw
greedily, past the end-of-sequence token. Prefill is the time to the last first token; decode is what comes after it,
pushes and padding of the prompt left out on either side. They take turns, and a ratio is the median over turns.
"""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.self_pushing import KV_CACHE_BYTES, PushedAnswers, SelfPushingEngine, build_both_sides
from kaveri.engine.factory import DEFAULT_BLOCK_TOKENS
from kaveri.models import resolve_model
from kaveri.telemetry.logs import configure_logs

CHUNK_TOKENS = 512
BATCHES = (1, 8, 32)
PROMPT_TOKENS = {"cpu": (32, 160), "cuda": (128, 1024)}
POOL_BYTES = {"cpu": KV_CACHE_BYTES, "cuda": 4 * 2**30}
NEAR_TIE = {"float32": 2**-13, "bfloat16": 2**-5}
"""What rounding in different batches may shift, relative to the largest logit: eight times bfloat16's rounding step;
in float32 a thousand, which is what a sum over a thousand products may be off."""
# Decode tokens/s at batch 1, 8 and 32 on a 3.4 M parameter model and one thread: a naive prototype in float32, and
# vLLM's CPU build in bfloat16. Other hours, the same kind of machine: for orientation, no ratio is made of them.
YARDSTICKS = {"float32": (530, 2030, 3250), "bfloat16": (460, 2630, 4730)}


class _Theirs:
    """model.generate."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=getattr(torch, dtype))
        self._model: Any = loaded.to(device).eval()
        self._device = device
        self._model.generation_config.eos_token_id = None

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int) -> PushedAnswers:
        """As ours, with nothing to push."""
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self._device
        )
        token_times_s: list[tuple[float, float]] = []

        def note_time(drawn: torch.Tensor, _: torch.Tensor, **__: object) -> torch.Tensor:
            # A GPU draws later than it is asked to. generate itself waits for each token behind this, too.
            if drawn.is_cuda:
                torch.cuda.synchronize()
            token_times_s.append((time.perf_counter(), time.process_time()))
            return torch.zeros(len(drawn), dtype=torch.bool, device=drawn.device)

        started = time.perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=answer_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
        answers: list[list[int]] = output[:, width:].tolist()
        (first_s, first_cpu_s), (last_s, last_cpu_s) = token_times_s[0], token_times_s[-1]
        return PushedAnswers(first_s - started, last_s - first_s, last_cpu_s - first_cpu_s, answers)

    def is_near_tie(self, token_ids: Sequence[int], one: int, other: int, dtype: str) -> bool:
        """Whether both tokens are about equally likely to follow, within NEAR_TIE of the larger logit."""
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids], device=self._device)).logits[0, -1].float()
        return bool(abs(logits[one] - logits[other]) <= NEAR_TIE[dtype] * logits.abs().max())


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    torch.set_num_threads(1)
    configure_logs("benchmark", "engine", level="warning")
    turns = options.choose(5, 3)
    answer_tokens = options.choose(96, 48)
    report.workload = {
        "model": Path(options.model).name,
        "device": options.device,
        "prompt_tokens": list(PROMPT_TOKENS[options.device]),
        "answer_tokens": answer_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "block_tokens": DEFAULT_BLOCK_TOKENS,
        "threads": 1,
        "warm_up": "one turn per batch size",
    }
    for dtype in ("float32", "bfloat16"):
        engine = build_both_sides(
            "transformers",
            options.model,
            dtype,
            CHUNK_TOKENS,
            max(BATCHES),
            options.device,
            POOL_BYTES[options.device],
        )
        with SelfPushingEngine(engine) as ours:
            theirs = _Theirs(options.model, dtype, options.device)
            for place, batch in enumerate(BATCHES):
                yardstick = YARDSTICKS[dtype][place] if options.device == "cpu" else None
                _compare(report, ours, theirs, options.device, dtype, batch, turns, answer_tokens, yardstick)


def _compare(
    report: Report,
    ours: SelfPushingEngine,
    theirs: _Theirs,
    device: str,
    dtype: str,
    batch: int,
    turns: int,
    answer_tokens: int,
    yardstick: int | None,
) -> None:
    source = random.Random(batch)
    shortest, longest = PROMPT_TOKENS[device]
    lengths = [shortest + (longest - shortest) * (2 * index + 1) // (2 * batch) for index in range(batch)]
    prompts = [[source.randrange(3, ours.vocab_size) for _ in range(length)] for length in lengths]
    prompt_tokens, decoded_tokens = sum(lengths), batch * (answer_tokens - 1)
    speeds: dict[str, list[float]] = {
        "prefill ours": [],
        "prefill generate": [],
        "decode ours": [],
        "decode generate": [],
    }
    for turn in range(turns + 1):
        results = {}
        for name, side in (("ours", ours), ("generate", theirs)):
            prefill_s, decode_s, _, results[name] = side.answer(prompts, answer_tokens)
            if turn:  # the first one warms up
                speeds[f"prefill {name}"].append(prompt_tokens / prefill_s)
                speeds[f"decode {name}"].append(decoded_tokens / decode_s)
        _require_same(theirs, device, dtype, prompts, results["ours"], results["generate"])
    equal = [float(mine == other) for mine, other in zip(results["ours"], results["generate"], strict=True)]
    report.row("answers equal to generate's", [statistics.fmean(equal)], "share", dtype=dtype, batch=batch)
    for name, values in speeds.items():
        report.row(name, values, "tokens/s", dtype=dtype, batch=batch)
        if name.startswith("decode") and device != "cpu":
            step_ms = [1e3 * batch / value for value in values]
            report.row(name.replace("decode", "time per token"), step_ms, "ms", dtype=dtype, batch=batch)
    for phase in ("prefill", "decode"):
        paired = zip(speeds[f"{phase} ours"], speeds[f"{phase} generate"], strict=True)
        report.ratio(f"{phase}_{dtype}_batch_{batch}", statistics.median(mine / other for mine, other in paired), 1.0)
    if yardstick is not None:
        report.rows[-2]["yardstick_tokens_per_s"] = yardstick


def _require_same(
    theirs: _Theirs,
    device: str,
    dtype: str,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    generated: Sequence[list[int]],
) -> None:
    """Raises AssertionError unless answers are equal; they may part at a near tie in low precision, and on a GPU, whose
    kernels for one sequence and for a padded batch add up in different orders."""
    for prompt, mine, other in zip(prompts, ours, generated, strict=True):
        parting = next((index for index, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if parting is None:
            continue
        may_part = dtype != "float32" or device != "cpu"
        near = may_part and theirs.is_near_tie([*prompt, *mine[:parting]], mine[parting], other[parting], dtype)
        if not near:
            raise AssertionError(f"{dtype}: an answer differs from generate's at token {parting}")


if __name__ == "__main__":
    run("engine.transformers", measure, description=__doc__)
