"""Interference between requests in one engine: how much a request slows down when others share its steps.

TetriInfer's study (arXiv 2401.11181, section 2.2, figures 3 to 5) on one StepwiseEngine in this process that plays both
sides: prefill beside prefill, decode beside prefill and prefill beside decode, decode beside decode. Light prompts have
18 tokens and heavy ones 512; a light answer has 20 to 100 tokens, a heavy one 513 to 1,024. Measured twice: with steps
that take all waiting prompts, as in the paper ("whole"), and with chunks of 512 tokens ("chunked").

Engines: transformers computes kaveri-tiny on one CPU thread. Timed takes the time that DistServe's fit gives for
OPT-13B on an A100, so its figures follow from that formula and the engine's batches. For a step with prompts and
answers only the larger constant counts, because the weights are read once; Sarathi (arXiv 2308.16369) mixes decodes
into chunks for this reason.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from benchmarks.support.harness import Options, Report, run
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    FirstToken,
    PrefillStarted,
    StepTokens,
)
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.engine.transformers.loading import load_runner
from kaveri.latency.model import load_latency_model
from kaveri.telemetry.logs import configure_logs

LIGHT_PROMPT, HEAVY_PROMPT = 18, 512
LIGHT_ANSWER, HEAVY_ANSWER = (20, 100), (513, 1024)
CHUNK_TOKENS = 512
MAX_BATCH = 128
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 2048
TOTAL_BLOCKS = 8192
LATENCY_MODEL = "opt-13b-a100-tp1"
HEAVY_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_MODES = {"whole": TOTAL_BLOCKS * BLOCK_TOKENS, "chunked": CHUNK_TOKENS}
_LONG_ANSWER = 1_000
"""Tokens of a request that must run during the whole measurement."""
_GAPS = 8
"""Decode steps whose median is the time of a step without other requests."""
_DEADLINE_S = 120.0


class Lab:
    """One engine with both phases on it. Requests that are submitted together share the next step."""

    def __init__(self, runner: ModelRunner, chunk_tokens: int) -> None:
        self._vocab_size = runner.vocab_size
        self._engine = StepwiseEngine(runner, TOTAL_BLOCKS, chunk_tokens=chunk_tokens, max_batch=MAX_BATCH)
        self._rng = random.Random(1)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._started_s: dict[EngineKey, float] = {}
        self._first_s: dict[EngineKey, float] = {}
        self._steps_s: dict[EngineKey, list[float]] = {}
        self._errand: tuple[EngineKey, Callable[[], None]] | None = None
        self._failure = ""
        self._engine.start(self._listen)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def request(self, prompt_tokens: int, answer_tokens: int = 1) -> EngineRequest:
        """Random ids: what they say does not matter, how many there are does."""
        token_ids = tuple(self._rng.randrange(3, self._vocab_size) for _ in range(prompt_tokens))
        params = ResolvedParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True, seed=0)
        return EngineRequest(EngineKey(f"request {next(self._numbers)}", 1), token_ids, 0, params)

    def submit_together(self, requests: Sequence[EngineRequest]) -> float:
        """Submits them between two steps, from the engine's own thread; returns when that was."""
        gate = self.request(1)
        submitted_s: list[float] = []

        def submit() -> None:
            submitted_s.append(time.perf_counter())
            for request in requests:
                self._engine.prefill(request)

        self._errand = (gate.key, submit)
        self._engine.prefill(gate)
        self._wait(lambda: bool(submitted_s))
        return submitted_s[0]

    def decode(self, requests: Sequence[EngineRequest], steps: int) -> None:
        """Runs them until each has drawn so many tokens after its first."""
        self.submit_together(requests)
        self.wait_for_steps(requests, steps)

    def wait_for_steps(self, requests: Sequence[EngineRequest], steps: int) -> None:
        """Until each has drawn so many tokens after its first."""
        self._wait(lambda: all(len(self._steps_s.get(request.key, ())) >= steps for request in requests))

    def wait_for_first(self, requests: Sequence[EngineRequest]) -> None:
        """Until each has its first token."""
        self._wait(lambda: all(request.key in self._first_s for request in requests))

    def end(self, requests: Sequence[EngineRequest]) -> None:
        """Aborts them, and waits until their blocks are free."""
        for request in requests:
            self._engine.abort(request.key)
        give_up_at_s = time.monotonic() + _DEADLINE_S
        while self._engine.stats().free_blocks < TOTAL_BLOCKS:
            if time.monotonic() > give_up_at_s:
                raise RuntimeError(f"blocks are still held: {self._engine.stats()}")
            time.sleep(0.001)

    def first_s(self, request: EngineRequest) -> float:
        """When its first token came."""
        return self._first_s[request.key]

    def prefill_s(self, request: EngineRequest) -> float:
        """From the start of its first chunk to its first token."""
        return self._first_s[request.key] - self._started_s[request.key]

    def steps_s(self, request: EngineRequest) -> list[float]:
        """When its tokens after the first one came."""
        return self._steps_s[request.key]

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._failure) or condition(), _DEADLINE_S) or self._failure:
                raise RuntimeError(self._failure or "the engine does not come to an end")

    def _listen(self, events: Sequence[EngineEvent]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for event in events:
                self._take(event, now_s)
            self._changed.notify_all()

    def _take(self, event: EngineEvent, now_s: float) -> None:
        if isinstance(event, PrefillStarted):
            self._started_s[event.key] = now_s
        elif isinstance(event, FirstToken):
            self._first_s[event.key] = now_s
            if event.finish is None:
                self._engine.adopt(event.key)
                self._engine.admit(event.key)
            if self._errand is not None and event.key == self._errand[0]:
                (_, submit), self._errand = self._errand, None
                submit()
        elif isinstance(event, StepTokens):
            for step in event.steps:
                self._steps_s.setdefault(step.key, []).append(now_s)
        elif isinstance(event, EngineStopped):
            self._failure = event.reason


def prefill_beside_prefill(lab: Lab, measured_tokens: int, other_tokens: int, others: int) -> float:
    """Seconds to the first token of a prompt that comes at once with others, half of them before it."""
    measured = lab.request(measured_tokens)
    company = [lab.request(other_tokens) for _ in range(others)]
    everybody = [*company[: others // 2], measured, *company[others // 2 :]]
    submitted_s = lab.submit_together(everybody)
    lab.wait_for_first(everybody)
    lab.end(())
    return lab.first_s(measured) - submitted_s


def decode_beside_prefill(lab: Lab, prompt_tokens: int, others: int) -> tuple[float, float]:
    """Seconds of a decode step alone, and of the longest while prompts are computed beside it."""
    measured = lab.request(LIGHT_PROMPT, _LONG_ANSWER)
    lab.decode([measured], _GAPS + 1)
    company = [lab.request(prompt_tokens) for _ in range(others)]
    before = len(lab.steps_s(measured))
    lab.submit_together(company)
    lab.wait_for_first(company)
    lab.wait_for_steps([measured], len(lab.steps_s(measured)) + 1)
    times_s = lab.steps_s(measured).copy()
    lab.end([measured])
    alone_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(times_s[: _GAPS + 1]))
    return alone_s, max(later - earlier for earlier, later in itertools.pairwise(times_s[before - 1 :]))


def prefill_beside_decode(lab: Lab, prompt_tokens: int, others: int) -> float:
    """Seconds of a prompt's own steps while so many light answers are decoded in them."""
    company = [lab.request(LIGHT_PROMPT, _LONG_ANSWER) for _ in range(others)]
    if company:
        lab.decode(company, 2)
    measured = lab.request(prompt_tokens)
    lab.submit_together([measured])
    lab.wait_for_first([measured])
    lab.end(company)
    return lab.prefill_s(measured)


def decode_beside_decode(lab: Lab, heavy: int, batch: int, steps: int) -> list[float]:
    """Seconds of consecutive steps of a batch of which `heavy` requests have heavy answers.

    Contexts are those of such a batch at a random moment: a short prompt, and a uniformly drawn part of the answer.
    """
    rng = random.Random(heavy)
    requests = []
    for number in range(batch):
        answer = rng.randint(*(HEAVY_ANSWER if number < heavy else LIGHT_ANSWER))
        requests.append(lab.request(LIGHT_PROMPT + rng.randint(0, answer), _LONG_ANSWER))
    # Requests whose prompts end first decode until the last prompt ends; from then on all are in every step.
    lab.submit_together(requests)
    lab.wait_for_first(requests)
    last = max(requests, key=lab.first_s)
    lab.wait_for_steps([last], steps + 2)
    times_s = lab.steps_s(last)[1 : steps + 2]
    lab.end(requests)
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def make_runner(engine: str, model: str) -> ModelRunner:
    if engine == "transformers":
        return load_runner(model, "auto", "cpu", MAX_MODEL_LEN, BLOCK_TOKENS)
    fake = FakeModel(max_model_len=MAX_MODEL_LEN, block_tokens=BLOCK_TOKENS, verify=False)
    return TimedRunner(fake, load_latency_model(LATENCY_MODEL))


def study_prefill(lab: Lab, report: Report, options: Options, engine: str, mode: str) -> None:
    """Figure 3."""
    counts = options.choose((7, 15, 31, 63), (7,))
    few = options.choose((1, 3, 7), (1,))
    cases = (
        ("light", LIGHT_PROMPT, "light", LIGHT_PROMPT, counts),
        ("light", LIGHT_PROMPT, "heavy", HEAVY_PROMPT, few),
        ("heavy", HEAVY_PROMPT, "light", LIGHT_PROMPT, counts),
        ("heavy", HEAVY_PROMPT, "heavy", HEAVY_PROMPT, few),
    )
    for kind, tokens, other_kind, other_tokens, others in cases:

        def measured(count: int, tokens: int = tokens, other_tokens: int = other_tokens) -> float:
            return prefill_beside_prefill(lab, tokens, other_tokens, count)

        _slowdowns(report, options, f"{kind} prefill beside {other_kind} prefills", measured, others, engine, mode)


def study_prefill_and_decode(lab: Lab, report: Report, options: Options, engine: str, mode: str) -> None:
    """Figure 4."""
    repeats = options.choose(5, 1)
    few = options.choose((1, 3, 7), (1,))
    for kind, tokens in (("light", LIGHT_PROMPT), ("heavy", HEAVY_PROMPT)):
        name = f"light decode beside {kind} prefills"
        for count in few:
            decode_beside_prefill(lab, tokens, count)
            pairs = [decode_beside_prefill(lab, tokens, count) for _ in range(repeats)]
            report.row(name, [1e3 * beside for _, beside in pairs], "ms", engine=engine, step=mode, others=count)
            if count in _shown(few, mode):
                slowdown = statistics.median(beside / alone for alone, beside in pairs)
                report.ratio(f"{name}: slowdown by {count}, {engine}, {mode}", slowdown)
    for kind, tokens in (("light", LIGHT_PROMPT), ("heavy", HEAVY_PROMPT)):

        def measured(count: int, tokens: int = tokens) -> float:
            return prefill_beside_decode(lab, tokens, count)

        name = f"{kind} prefill beside light decodes"
        _slowdowns(report, options, name, measured, options.choose((7, 31, 127), (7, 31)), engine, mode)


def study_decode(lab: Lab, report: Report, options: Options, engine: str) -> None:
    """Figure 5. Nothing is prefilled, so the chunk does not matter."""
    batch = 128
    steps = options.choose(30, 8)
    medians = {}
    for share in options.choose(HEAVY_SHARES, (0.0, 0.5)):
        gaps_s = decode_beside_decode(lab, round(share * batch), batch, steps)
        labels = {"engine": engine, "batch": batch, "heavy": round(share * batch)}
        medians[share] = report.row("decode step", [1e3 * gap_s for gap_s in gaps_s], "ms", **labels)
        report.row("decode throughput", [batch / gap_s for gap_s in gaps_s], "tokens/s", **labels)
    for share, median in medians.items():
        if share:
            name = f"decode beside decode: {share:.0%} heavy of {batch}, {engine}"
            report.ratio(f"{name}, step time", median / medians[0.0])
            report.ratio(f"{name}, throughput", medians[0.0] / median)


def _shown(others: Sequence[int], mode: str) -> tuple[int, ...]:
    """Of which there is a ratio; the rows have all."""
    ends = (others[0], others[-1]) if mode == "whole" else (others[-1],)
    return tuple(dict.fromkeys(ends))


def _slowdowns(
    report: Report,
    options: Options,
    name: str,
    measured: Callable[[int], float],
    others: Sequence[int],
    engine: str,
    mode: str,
) -> None:
    """Rows of the time alone and beside others, taken in turn, and the ratios between them."""
    repeats = options.choose(5, 1)
    times_s: dict[int, list[float]] = {count: [] for count in (0, *others)}
    # One uncounted turn each, then turn by turn, so that drift of the machine hits all.
    for repeat in range(-1, repeats):
        for count, taken_s in times_s.items():
            seconds = measured(count)
            if repeat >= 0:
                taken_s.append(seconds)
    for count, taken_s in times_s.items():
        report.row(name, [1e3 * seconds for seconds in taken_s], "ms", engine=engine, step=mode, others=count)
    for count in _shown(others, mode):
        pairs = zip(times_s[count], times_s[0], strict=True)
        slowdown = statistics.median(beside / alone for beside, alone in pairs)
        report.ratio(f"{name}: slowdown by {count}, {engine}, {mode}", slowdown)


def measure(options: Options, report: Report) -> None:
    """Both engines, whole and chunked."""
    torch.set_num_threads(1)
    configure_logs("benchmark", "interference", "error")
    report.workload = {
        "model": options.model,
        "dtype": "auto",
        "latency_model": LATENCY_MODEL,
        "prompt_tokens": {"light": LIGHT_PROMPT, "heavy": HEAVY_PROMPT},
        "answer_tokens": {"light": list(LIGHT_ANSWER), "heavy": list(HEAVY_ANSWER)},
        "chunk_tokens": _MODES,
        "others": "half of them before the measured one, all in the same moment",
        "threads": 1,
    }
    for engine in ("timed", "transformers"):
        for mode, chunk_tokens in _MODES.items():
            with Lab(make_runner(engine, options.model), chunk_tokens) as lab:
                study_prefill(lab, report, options, engine, mode)
                study_prefill_and_decode(lab, report, options, engine, mode)
        with Lab(make_runner(engine, options.model), CHUNK_TOKENS) as lab:
            study_decode(lab, report, options, engine)
    report.note(
        "The paper, OPT-13B on a V100, whole prompts in a step: a light prefill takes 2 times as long beside 7 light "
        "ones, 8 times beside 63, more than 10 times beside heavy ones; a heavy one 3 times beside light ones; a step "
        "of decode 5 times beside one heavy prefill; prefills up to 2.5 times beside light decodes; with half of 128 "
        "decodes heavy the throughput is 16 % less and the latency 23 % more."
    )
    report.note(
        "Where the paper says more or less: sizes follow from how many tokens cost as much as a step's constant, about "
        "180 in the fit of OPT-13B on an A100 and far fewer for kaveri-tiny on a CPU core, which no step is too small "
        "to keep busy, so that company costs more there. Decode beside decode depends on how long heavy contexts are, "
        "here up to 1,042 tokens; the paper says only that heavy answers have more than 512."
    )


if __name__ == "__main__":
    run("papers.interference", measure, description=__doc__)
