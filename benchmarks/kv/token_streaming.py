"""What streaming every token's KV costs while decoding (DéjàVu, arXiv 2403.01876, section 5.1: within 2 %).

A whole StepwiseEngine decodes a batch; after each step a TokenStreamer is told how far every request is, as an engine
that replicates would, and streams the new lines from its own thread: to nobody, to a local disk, to another process,
which stores them in a pool of its own. The three take turns.

    timed         compute off the CPU, as for a GPU's host: OPT-13B's steps on an A100 (DistServe's profile), with KV of
                  64 KiB a token and of 800 KiB, which is OPT-13B's own
    transformers  kaveri-tiny on one thread: compute on the CPU, which shares the cores with what streams
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.streaming_process import LINE_CHUNK_BYTES, STAGING_BYTES, StreamingProcess, streaming_process
from kaveri.engine.contract import AttemptKey, EngineEvent, EngineRequest, EngineStopped, FirstToken, StepTokens
from kaveri.engine.fake import FakeModel, FakeRunner
from kaveri.engine.latency import load_latency_model
from kaveri.engine.runner import Drawn, LayerListener, ModelRunner, SequenceSlice
from kaveri.engine.stepwise import StepwiseEngine
from kaveri.engine.timed import TimedRunner
from kaveri.engine.transformers.loading import load_runner
from kaveri.kv.line_file import LineDisk, read_line_file
from kaveri.kv.line_link import LineSender
from kaveri.kv.pool import KvPool
from kaveri.kv.token_streamer import LineSink, TokenStreamer
from kaveri.sampling import SamplingParams
from kaveri.telemetry.logs import configure_logs

BATCH = 8
PROMPT_TOKENS = 64
BLOCK_TOKENS = 16
LATENCY_MODEL = "opt-13b-a100-tp1"
TRANSPORT = "tcp"
DESTINATIONS = ("nothing", "disk", "process")
_WAIT_S = 120.0


class StreamedRunner:
    """A ModelRunner that tells a streamer, after each step, how far every decoding sequence has come."""

    def __init__(self, inner: ModelRunner) -> None:
        self.name = inner.name
        self.device = inner.device
        self.layout = inner.layout
        self.max_model_len = inner.max_model_len
        self.vocab_size = inner.vocab_size
        self.eos_token_ids = inner.eos_token_ids
        self.pool: KvPool | None = None
        self.streamer: TokenStreamer | None = None
        """Set between rounds only; None streams nothing."""
        self.block_counts: dict[str, int] = {}
        """Of each request of the round: the blocks that the streamer knows."""
        self._inner = inner

    def attach(self, pool: KvPool) -> None:
        self.pool = pool
        self._inner.attach(pool)

    def landed(self, block_ids: Sequence[int]) -> None:
        self._inner.landed(block_ids)

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """The prompt's own KV is not streamed: its hand-over is another benchmark."""
        drawn = self._inner.run(batch, on_layer)
        if self.streamer is not None:
            self._tell(self.streamer, [part for part in batch if len(part.token_ids) == 1])
        return drawn

    def _tell(self, streamer: TokenStreamer, decoding: Sequence[SequenceSlice]) -> None:
        token_counts = {}
        for part in decoding:
            # No two live sequences have a block in common.
            request = f"request-{part.block_ids[0]}"
            known = self.block_counts.get(request)
            if known is None:
                streamer.open(request, part.block_ids, first_token=part.start)
            elif len(part.block_ids) > known:
                streamer.add_blocks(request, part.block_ids[known:])
            self.block_counts[request] = len(part.block_ids)
            token_counts[request] = part.start + 1
        streamer.advance(token_counts)


class DecodingEngine:
    """An engine that computes prompts and decodes them by itself, a batch at a time."""

    def __init__(self, runner: ModelRunner, total_blocks: int) -> None:
        self.runner = StreamedRunner(runner)
        self._engine = StepwiseEngine(self.runner, total_blocks, max_batch=BATCH)
        self._changed = threading.Condition()
        self._first_count = self._finished_count = 0
        self._last_token_s = 0.0
        self._failure: str | None = None
        self._engine.start(self._listen)

    def decode(self, answer_tokens: int, round_number: int) -> float:
        """Seconds from the admission of a whole batch to its last token."""
        params = SamplingParams(max_tokens=answer_tokens, temperature=0.0, seed=0, ignore_eos=True)
        self._first_count = self._finished_count = 0
        keys = [AttemptKey(f"request {round_number}-{index}", 1) for index in range(BATCH)]
        for index, key in enumerate(keys):
            prompt = tuple(3 + (7 * index + position) % 900 for position in range(PROMPT_TOKENS))
            self._engine.prefill(EngineRequest(key, prompt, 0, params))
        self._wait_until(lambda: self._first_count == BATCH)
        began_s = time.perf_counter()
        for key in keys:
            self._engine.adopt(key)
            self._engine.admit(key)
        self._wait_until(lambda: self._finished_count == BATCH)
        return self._last_token_s - began_s

    def close(self) -> None:
        """Ends the engine's threads."""
        self._engine.close()

    def _listen(self, events: Sequence[EngineEvent]) -> None:
        with self._changed:
            for event in events:
                if isinstance(event, FirstToken):
                    self._first_count += 1
                elif isinstance(event, StepTokens):
                    self._last_token_s = time.perf_counter()
                    self._finished_count += sum(step.finish is not None for step in event.steps)
                elif isinstance(event, EngineStopped):
                    self._failure = event.reason
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self._failure is not None, _WAIT_S)
        if not done or self._failure is not None:
            raise RuntimeError(f"the engine did not decode: {self._failure or 'out of time'}")


def measure(options: Options, report: Report) -> None:
    """A batch of 8, as the paper's."""
    configure_logs("token_streaming", "benchmark", level="error")
    torch.set_num_threads(1)
    repeats = {"timed": options.choose(5, 2), "transformers": options.choose(15, 3)}
    answer_tokens = {"timed": options.choose(100, 25), "transformers": options.choose(128, 64)}
    report.workload = {
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": answer_tokens,
        "latency_model": LATENCY_MODEL,
        "model": options.model,
        "threads": 1,
        "transport": TRANSPORT,
        "staging_bytes": STAGING_BYTES,
        "repeats": repeats,
        "warm_up": "one round with each destination",
    }
    model_len = PROMPT_TOKENS + answer_tokens["timed"]
    for name, layers, heads in (("timed, 64 KiB/token", 16, 8), ("timed, 800 KiB/token", 40, 40)):
        fake = FakeModel(layer_count=layers, kv_head_count=heads, head_dim=64, max_model_len=model_len, verify=False)
        runner = TimedRunner(FakeRunner(fake), load_latency_model(LATENCY_MODEL))
        _measure_engine(report, name, runner, answer_tokens["timed"], repeats["timed"], "")
    tiny = load_runner(options.model, "auto", "cpu", None, BLOCK_TOKENS)
    tiny.max_model_len = PROMPT_TOKENS + answer_tokens["transformers"]
    why = f"compute on the CPU: streaming takes cycles of the {os.cpu_count()} cores that decode; there a GPU decodes"
    _measure_engine(report, options.model, tiny, answer_tokens["transformers"], repeats["transformers"], why)
    report.note("disk: files of a temporary folder in the page cache; the flush after the last step syncs them")
    report.note("CPU of a step: of the engine's process, what streams included")
    report.note(f"{os.cpu_count()} cores for both processes and whatever else runs")


def _measure_engine(report: Report, name: str, runner: ModelRunner, answer_tokens: int, repeats: int, why: str) -> None:
    pool_blocks = BATCH * runner.layout.block_count(PROMPT_TOKENS + answer_tokens)
    engine = DecodingEngine(runner, pool_blocks)
    speeds: dict[str, list[float]] = {destination: [] for destination in DESTINATIONS}
    cpu_s: dict[str, list[float]] = {destination: [] for destination in DESTINATIONS}
    flush_s: dict[str, list[float]] = {destination: [] for destination in DESTINATIONS[1:]}
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory() as folder,
        streaming_process(runner.layout, pool_blocks, TRANSPORT) as other,
        contextlib.closing(engine),
    ):
        for repeat in range(-1, repeats):  # the first one warms up
            for destination in DESTINATIONS:
                streamer = _streamer(destination, engine.runner, Path(folder), other)
                engine.runner.streamer = streamer
                began_cpu_s = time.process_time()
                elapsed_s = engine.decode(answer_tokens, next(numbers))
                spent_s = time.process_time() - began_cpu_s
                flushed_s = 0.0
                if streamer is not None:
                    flushed_s = _end(streamer, engine.runner, destination, Path(folder), answer_tokens)
                if repeat >= 0:
                    speeds[destination].append(BATCH * (answer_tokens - 1) / elapsed_s)
                    cpu_s[destination].append(spent_s / (answer_tokens - 1))
                    if streamer is not None:
                        flush_s[destination].append(flushed_s)
    for destination in DESTINATIONS:
        labels = {"engine": name, "streamed_to": destination}
        report.row("decode", speeds[destination], "tokens/s", **labels)
        report.row("CPU of a step", [1e3 * value for value in cpu_s[destination]], "ms", **labels)
        if destination == "nothing":
            continue
        report.row("flush after the last step", [1e3 * value for value in flush_s[destination]], "ms", **labels)
        pairs = zip(speeds[destination], speeds["nothing"], strict=True)
        ratio = statistics.median(streamed / plain for streamed, plain in pairs)
        report.ratio(f"tokens/s streamed / not streamed, {name}, {destination}", ratio, target=0.98)
        report.compare(
            f"DéjàVu, section 5.1: slowdown, {'local SSD' if destination == 'disk' else 'remote CPU'} ({name})",
            "within 2 %",
            f"{100 * (1 - ratio):.2f} %",
            why,
        )


def _streamer(destination: str, runner: StreamedRunner, folder: Path, other: StreamingProcess) -> TokenStreamer | None:
    if destination == "nothing":
        return None
    sink: LineSink = LineSender(other.lines, "lines", LINE_CHUNK_BYTES)
    if destination == "disk":
        sink = LineDisk(folder / "lines", runner.layout, 1 << 40)
    assert runner.pool is not None
    return TokenStreamer(runner.pool, sink, staging_bytes=STAGING_BYTES)


def _end(streamer: TokenStreamer, runner: StreamedRunner, destination: str, folder: Path, answer_tokens: int) -> float:
    """Waits until all of a round's lines are safe, makes sure that they are, and forgets them. Seconds of the wait."""
    began_s = time.perf_counter()
    streamer.flush(_WAIT_S)
    flushed_s = time.perf_counter() - began_s
    # The last token's KV is written by no step.
    expected = PROMPT_TOKENS + answer_tokens - 1
    for request in runner.block_counts:
        position = streamer.position(request)
        assert position is not None
        assert position.streamed_tokens == expected, position
    assert len(runner.block_counts) == BATCH
    if destination == "disk":
        last = read_line_file(folder / "lines" / f"{next(iter(runner.block_counts))}.kvlines").runs[-1]
        assert last.tokens.stop == expected, last.tokens
    runner.streamer = None
    for request in runner.block_counts:
        streamer.end(request)
    runner.block_counts.clear()
    streamer.flush(_WAIT_S)
    streamer.close()
    return flushed_s


if __name__ == "__main__":
    run("kv.token_streaming", measure, description=__doc__)
