"""The transformers engine against model.generate: prompts and answers of one model on one thread, batch 1, 8 and 32.

Ours is a whole StepwiseEngine that plays both sides and pushes to itself over a Unix socket, with chunks of 512 tokens
and blocks of 16. Theirs is `generate` with its default attention (sdpa), prompts padded to the left. Both draw
greedily, past the end-of-sequence token. Prefill is the time to the last first token; decode is what comes after it,
pushes and padding of the prompt left out on either side. They take turns, and a ratio is the median over turns.
"""

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Options, Report, run
from kaveri.engine.contract import (
    AttemptKey,
    EngineEvent,
    EngineRequest,
    EngineStopped,
    FirstToken,
    KvPushFailed,
    Landed,
    LandingFailed,
    StepTokens,
)
from kaveri.engine.stepwise import StepwiseEngine
from kaveri.engine.transformers.loading import load_runner
from kaveri.errors import EngineError
from kaveri.kv.ticket import KvEndpoint
from kaveri.models import resolve_model
from kaveri.sampling import SamplingParams
from kaveri.telemetry.logs import configure_logs

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512
BATCHES = (1, 8, 32)
PROMPT_TOKENS = (32, 160)
# Decode tokens/s at batch 1, 8 and 32 on a 3.4 M parameter model and one thread: a naive prototype in float32, and
# vLLM's CPU build in bfloat16. Other hours, the same kind of machine: for orientation, no ratio is made of them.
YARDSTICKS = {"float32": (530, 2030, 3250), "bfloat16": (460, 2630, 4730)}
_DEADLINE_S = 60.0


class _Ours:
    """The engine, and the clock that reads its events."""

    def __init__(self, model: str, dtype: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        runner = load_runner(model, dtype, "cpu", None, BLOCK_TOKENS)
        self.vocab_size = runner.vocab_size
        self._engine = StepwiseEngine(
            runner,
            total_blocks=2048,
            chunk_tokens=CHUNK_TOKENS,
            max_batch=max(BATCHES),
            listen=[KvEndpoint("unix", str(Path(self._folder.name) / "kv.sock"))],
        )
        self._changed = threading.Condition()
        self._answers: dict[AttemptKey, list[int]] = {}
        self._landed: set[AttemptKey] = set()
        self._failures: list[str] = []
        self._started = 0
        self._finished = 0
        self._awaited: Callable[[], bool] = bool
        self._last_token_at_s = 0.0
        self._engine.start(self._listen)

    def __enter__(self) -> "_Ours":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()
        self._folder.cleanup()

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Seconds of prefill, seconds of decode, and the answers."""
        params = SamplingParams(max_tokens=answer_tokens, temperature=0.0, seed=0, ignore_eos=True)
        requests = [
            EngineRequest(AttemptKey(f"request {index}", 1), tuple(prompt), 0, params)
            for index, prompt in enumerate(prompts)
        ]
        with self._changed:
            self._answers, self._landed = {request.key: [] for request in requests}, set()
            self._started = self._finished = 0
        started = time.perf_counter()
        for request in requests:
            self._engine.prefill(request)
        self._wait_until(lambda: self._started == len(requests))
        prefill_s = self._last_token_at_s - started
        for request in requests:
            self._engine.push_to(request.key, self._engine.reserve(request, _DEADLINE_S).result(_DEADLINE_S))
        self._wait_until(lambda: len(self._landed) == len(requests))
        started = time.perf_counter()
        for request in requests:
            self._engine.admit(request.key)
        self._wait_until(lambda: self._finished == len(requests))
        return prefill_s, self._last_token_at_s - started, [self._answers[request.key] for request in requests]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._awaited = condition
            if not self._changed.wait_for(lambda: condition() or bool(self._failures), _DEADLINE_S):
                raise TimeoutError(f"not done after {_DEADLINE_S} s")
            if self._failures:
                raise EngineError(self._failures[0])

    def _listen(self, events: Sequence[EngineEvent]) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                if isinstance(event, FirstToken):
                    self._answers[event.key].append(event.token_id)
                    self._started += 1
                    self._last_token_at_s = now
                elif isinstance(event, Landed):
                    self._landed.add(event.key)
                elif isinstance(event, KvPushFailed | LandingFailed | EngineStopped):
                    self._failures.append(event.reason)
                elif isinstance(event, StepTokens):
                    self._last_token_at_s = now
                    for step in event.steps:
                        self._answers[step.key].append(step.token_id)
                        self._finished += step.finish is not None
            # Waking the other thread with every step would take time from the engine's.
            if self._failures or self._awaited():
                self._changed.notify_all()


class _Theirs:
    """model.generate."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Seconds of prefill, seconds of decode, and the answers."""
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        token_times_s: list[float] = []

        def note_time(drawn: torch.Tensor, _: torch.Tensor, **__: object) -> torch.Tensor:
            token_times_s.append(time.perf_counter())
            return torch.zeros(len(drawn), dtype=torch.bool)

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
        return token_times_s[0] - started, token_times_s[-1] - token_times_s[0], answers


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    torch.set_num_threads(1)
    configure_logs("benchmark", "engine", level="warning")
    turns = options.choose(5, 3)
    answer_tokens = options.choose(96, 48)
    report.workload = {
        "model": options.model,
        "prompt_tokens": list(PROMPT_TOKENS),
        "answer_tokens": answer_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "threads": 1,
        "warm_up": "one turn per batch size",
    }
    for dtype in ("float32", "bfloat16"):
        with _Ours(options.model, dtype) as ours:
            theirs = _Theirs(options.model, dtype)
            for place, batch in enumerate(BATCHES):
                _compare(report, ours, theirs, dtype, batch, turns, answer_tokens, YARDSTICKS[dtype][place])


def _compare(
    report: Report, ours: _Ours, theirs: _Theirs, dtype: str, batch: int, turns: int, answer_tokens: int, yardstick: int
) -> None:
    source = random.Random(batch)
    shortest, longest = PROMPT_TOKENS
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
            prefill_s, decode_s, results[name] = side.answer(prompts, answer_tokens)
            if turn:  # the first one warms up
                speeds[f"prefill {name}"].append(prompt_tokens / prefill_s)
                speeds[f"decode {name}"].append(decoded_tokens / decode_s)
        if dtype == "float32" and results["ours"] != results["generate"]:
            raise AssertionError(f"batch {batch}: the answers differ from generate's")
    for name, values in speeds.items():
        report.row(name, values, "tokens/s", dtype=dtype, batch=batch)
    for phase in ("prefill", "decode"):
        paired = zip(speeds[f"{phase} ours"], speeds[f"{phase} generate"], strict=True)
        report.ratio(f"{phase}_{dtype}_batch_{batch}", statistics.median(mine / other for mine, other in paired), 1.0)
    report.rows[-2]["yardstick_tokens_per_s"] = yardstick


if __name__ == "__main__":
    run("engine", measure, description=__doc__)
