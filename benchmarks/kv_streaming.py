"""What streaming KV cache costs: DéjàVu's ablation (arXiv 2403.01876, section 5.1, figure 7), as far as a library goes.

    copies     the KV of a prompt, and the lines of one decode step of a batch, out of their blocks: one region at a
               time, against copied together first; to host memory, a local disk, another process over a Unix socket
    ablation   a prompt and then decode steps, all of it streamed; how much longer that takes than the compute alone:
               one flush per region, + buffered copies, + layer by layer, + tokens beside compute
    steps      decode steps with token streaming against steps without

Compute off the CPU is a wait of known length, as for a GPU's host; on the CPU it is numpy's matrix product on one
thread, which shares the cores with what streams. The other process lands every byte, verified; lines it stores in a
pool of its own.
"""

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is there

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Options, Report, run
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.chunk_link import ChunkReceiver, ChunkSender
from kaveri.kv.disk import LocalDisk
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_file import LineDisk
from kaveri.kv.line_link import LineReceiver, LineSender
from kaveri.kv.line_pool import LinePool
from kaveri.kv.lines import PoolLines
from kaveri.kv.partition import KvPartition
from kaveri.kv.places import FlushPlace
from kaveri.kv.plan import make_plan
from kaveri.kv.pool import KvPool
from kaveri.kv.regions import RegionCopy, copy_regions
from kaveri.kv.staging import StagingBuffers
from kaveri.kv.streams import RequestCache, stream_out
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.token_streamer import LineSink, TokenStreamer
from kaveri.telemetry.logs import configure_logs

LAYOUT = KvLayout("benchmark", 16, block_tokens=16, kv_head_count=8, head_dim=128, dtype="float16")
PLAN = make_plan(KvPartition.even(LAYOUT), KvPartition.even(replace(LAYOUT, block_tokens=64), pipeline_stages=2))
PROMPT_TOKENS = 500
PROMPT_BLOCKS = LAYOUT.block_count(PROMPT_TOKENS)
BATCH = 8
STAGING_BYTES = 4 << 20
WAIT_S = 60.0

Region = npt.NDArray[np.uint8]
KeyT = TypeVar("KeyT")
_WAYS = ("one flush per region", "+ buffered copies", "+ layer by layer", "+ tokens beside compute")


def measure(options: Options, report: Report) -> None:
    """16 layers, 8 KV heads of 128 in float16: 64 KiB a token. One stage with blocks of 16 to two with blocks of 64."""
    configure_logs("kv_streaming", "benchmark", level="error")
    repeats, steps = options.choose(9, 7), options.choose(200, 24)
    layer_s, ablation_step_s, step_s = 0.004, 0.02, 0.01
    report.workload = {
        "token_bytes": LAYOUT.token_bytes,
        "layers": LAYOUT.layer_count,
        "prompt_tokens": PROMPT_TOKENS,
        "batch": BATCH,
        "repeats": repeats,
        "steps": steps,
        "prompt_layer_s": layer_s,
        "ablation_steps": options.choose(64, 8),
        "ablation_step_s": ablation_step_s,
        "step_s": step_s,
    }
    cache = Cache(steps)
    with tempfile.TemporaryDirectory() as folder, _other_process(Path(folder)) as other:
        places: dict[str, FlushPlace] = {"disk": LocalDisk(Path(folder) / "chunks", 1 << 40), "process": other.chunks}
        _measure_copies(report, repeats, cache, places)
        for name, place in places.items():
            _measure_ablation(
                report, options.choose(5, 3), cache, name, place, layer_s, ablation_step_s, options.choose(64, 8)
            )
        for compute_name, compute in (("off the CPU", time.sleep), ("on the CPU", _Multiplier(step_s))):
            _measure_steps(report, repeats, cache, Path(folder), other, compute_name, compute, steps, step_s)
    report.note("extra time is beside the same compute with nothing streamed, taken in the same repeat")
    report.note("disk: files of a temporary folder in the page cache; a flush is a file with a digest, and not synced")
    report.note("the flush after the last step syncs the disk")
    report.note(f"{os.cpu_count()} cores for both processes and whatever else runs")


class Cache:
    """A pool with one prompt of PROMPT_TOKENS in it, and a batch that has room for `steps` tokens each."""

    def __init__(self, steps: int) -> None:
        blocks_each = LAYOUT.block_count(steps)
        self.pool = KvPool(LAYOUT, PROMPT_BLOCKS + BATCH * blocks_each)
        self.pool.memory[:] = np.random.default_rng(0).integers(0, 256, self.pool.memory.shape, dtype=np.uint8)
        ids = np.random.default_rng(1).permutation(self.pool.block_count).tolist()
        self.prompt_ids = tuple(ids[:PROMPT_BLOCKS])
        self.batch_ids = [
            ids[PROMPT_BLOCKS + i * blocks_each : PROMPT_BLOCKS + (i + 1) * blocks_each] for i in range(BATCH)
        ]
        self.lines = PoolLines(self.pool)

    def prompt_copies(self) -> list[tuple[range, tuple[RegionCopy, ...]]]:
        """Of each share: its layers, and its copies in each layer."""
        tokens = range(PROMPT_TOKENS)
        return [(share.layers, PLAN.packing(share, tokens, self.prompt_ids)) for share in PLAN.shares]

    def prompt_regions(self) -> list[Region]:
        """Every contiguous region of the prompt's KV."""
        layers = self.pool.memory.reshape(LAYOUT.layer_count, -1)
        return [
            layers[layer, offset : offset + copy.run_bytes]
            for share_layers, copies in self.prompt_copies()
            for layer in share_layers
            for copy in copies
            for offset in _run_offsets(copy)
        ]

    def line_regions(self, token: int) -> list[Region]:
        """Every contiguous region of the batch's lines of one token: K and V of every layer."""
        rows = self.pool.memory.reshape(LAYOUT.layer_count, self.pool.block_count, 2, LAYOUT.block_tokens, -1)
        index, within = divmod(token, LAYOUT.block_tokens)
        return [
            rows[layer, ids[index], half, within]
            for ids in self.batch_ids
            for layer in range(LAYOUT.layer_count)
            for half in range(2)
        ]

    def gather_prompt(self, into: Region) -> None:
        """Into [layer, K or V, token, head, element], share by share."""
        layers, position = self.pool.memory.reshape(LAYOUT.layer_count, -1), 0
        for held, copies in self.prompt_copies():
            size = len(held) * PROMPT_TOKENS * LAYOUT.token_bytes // LAYOUT.layer_count
            piece = into[position : position + size].reshape(len(held), -1)
            copy_regions(copies, layers[held.start : held.stop], piece)
            position += size

    def gather_lines(self, token: int, into: Region) -> None:
        """One request's lines behind the other's."""
        for i, ids in enumerate(self.batch_ids):
            size = LAYOUT.token_bytes
            self.lines.gather(ids, range(token, token + 1), into[i * size : (i + 1) * size])


def _run_offsets(copy: RegionCopy) -> Iterator[int]:
    for index in np.ndindex(*copy.counts):
        yield copy.source_offset + sum(i * stride for i, stride in zip(index, copy.source_strides, strict=True))


def _measure_copies(report: Report, repeats: int, cache: Cache, places: dict[str, FlushPlace]) -> None:
    lines_bytes, prompt_bytes = BATCH * LAYOUT.token_bytes, PROMPT_TOKENS * LAYOUT.token_bytes
    buffers = StagingBuffers(prompt_bytes, 2)
    staging, target = buffers.acquire(WAIT_S), buffers.acquire(WAIT_S)
    works: dict[str, tuple[list[Region], Callable[[Region], None], int]] = {
        "prompt": (cache.prompt_regions(), cache.gather_prompt, prompt_bytes),
        "lines of a step": (cache.line_regions(3), lambda into: cache.gather_lines(3, into), lines_bytes),
    }
    for work, (regions, gather, byte_count) in works.items():
        assert sum(region.nbytes for region in regions) == byte_count
        ways: dict[tuple[str, str], Callable[[], None]] = {}

        def copy_each(regions: list[Region] = regions) -> None:
            position = 0
            for region in regions:
                np.copyto(target[position : position + region.nbytes], region)
                position += region.nbytes

        def copy_buffered(gather: Callable[[Region], None] = gather, byte_count: int = byte_count) -> None:
            gather(staging[:byte_count])

        ways["host", "each region"] = copy_each
        ways["host", "buffered"] = copy_buffered
        for name, place in places.items():

            def flush_each(regions: list[Region] = regions, place: FlushPlace = place) -> None:
                _flush_each(place, regions)

            def flush_buffered(
                gather: Callable[[Region], None] = gather, byte_count: int = byte_count, place: FlushPlace = place
            ) -> None:
                gather(staging[:byte_count])
                _flush_pieces(place, staging[:byte_count])

            ways[name, "each region"] = flush_each
            ways[name, "buffered"] = flush_buffered
        elapsed_s = _interleaved(repeats, ways)
        for (name, way), values in elapsed_s.items():
            labels = {"of": work, "to": name, "regions": len(regions)}
            report.row(way, [1e3 * value for value in values], "ms", **labels)
        for name in ("host", *places):
            ratio = _paired(elapsed_s[name, "each region"], elapsed_s[name, "buffered"])
            report.ratio(f"each region / buffered, {work}, {name}", ratio)
    np.copyto(target, staging)
    plain = _interleaved(
        repeats, {"memcpy": lambda: np.copyto(target, staging), "gather": lambda: cache.gather_prompt(staging)}
    )
    for name, values in plain.items():
        report.row(name, [prompt_bytes / 2**30 / value for value in values], "GiB/s", of="prompt")
    report.ratio("buffered gather / memcpy, prompt", _paired(plain["memcpy"], plain["gather"]))


def _measure_ablation(
    report: Report, repeats: int, cache: Cache, name: str, place: FlushPlace, layer_s: float, step_s: float, steps: int
) -> None:
    """Compute off the CPU. The last way adds a TokenStreamer whose sink flushes to the same place."""

    def one(way: int | None) -> float:
        # Made once in the life of an instance, so not part of what a request takes.
        staging, streamer = StagingBuffers(STAGING_BYTES), None
        if way == 3:
            sink = LineSender(place, "lines", STAGING_BYTES + (1 << 16))
            streamer = TokenStreamer(cache.pool, sink, staging_bytes=STAGING_BYTES)
        began_s = time.perf_counter()
        _prompt(cache, place, way, layer_s, staging)
        _decode(cache, place, way, step_s, steps, staging, streamer)
        elapsed_s = time.perf_counter() - began_s
        if streamer is not None:
            streamer.close()
        return elapsed_s

    compute_s: list[float] = []
    elapsed_s: dict[int, list[float]] = {way: [] for way in range(len(_WAYS))}
    for _ in range(repeats):
        compute_s.append(one(None))
        for way, values in elapsed_s.items():
            values.append(one(way))
    report.row("compute alone", [1e3 * value for value in compute_s], "ms", to=name)
    extra_s = {
        way: [value - alone for value, alone in zip(values, compute_s, strict=True)]
        for way, values in elapsed_s.items()
    }
    for way, values in extra_s.items():
        report.row(f"extra time: {_WAYS[way]}", [1e3 * value for value in values], "ms", to=name)
    for way in range(1, len(_WAYS)):
        # A ratio of what is left over; near zero it says no more than that.
        ratio = statistics.median(extra_s[way - 1]) / max(1e-4, statistics.median(extra_s[way]))
        report.ratio(f"extra time before / with {_WAYS[way]}, {name}", ratio)
    slowdown = statistics.median(elapsed_s[len(_WAYS) - 1]) / statistics.median(compute_s)
    report.ratio(f"time with all of them / compute alone, {name}", slowdown)


def _prompt(cache: Cache, place: FlushPlace, way: int | None, layer_s: float, staging: StagingBuffers) -> None:
    request = RequestCache("prompt", cache.pool, 0, cache.prompt_ids)
    places = {0: place, 1: place}

    def stream(layers: range) -> None:
        stream_out(
            PLAN, request, places, staging, tokens=range(PROMPT_TOKENS), layers=layers, timeout_s=WAIT_S, settle=False
        )

    with ThreadPoolExecutor(1) as background:
        streamed = []
        for layer in range(LAYOUT.layer_count):
            time.sleep(layer_s)
            if way is not None and way >= 2:
                streamed.append(background.submit(stream, range(layer, layer + 1)))
        if way == 0:
            _flush_each(place, cache.prompt_regions())
        elif way == 1:
            stream(range(LAYOUT.layer_count))
        for future in streamed:
            future.result(WAIT_S)
    if way is not None:
        place.settle("", WAIT_S)


def _decode(
    cache: Cache,
    place: FlushPlace,
    way: int | None,
    step_s: float,
    steps: int,
    staging: StagingBuffers,
    streamer: TokenStreamer | None,
) -> None:
    if streamer is not None:
        _run_steps(cache, streamer, time.sleep, step_s, steps)
        streamer.flush(WAIT_S)
        return
    for token in range(steps):
        time.sleep(step_s)
        if way == 0:
            _flush_each(place, cache.line_regions(token))
        elif way is not None:
            with staging.lend(WAIT_S) as buffer:
                lines = buffer[: BATCH * LAYOUT.token_bytes]
                cache.gather_lines(token, lines)
                _flush_pieces(place, lines)


def _run_steps(
    cache: Cache, streamer: TokenStreamer | None, compute: Callable[[float], None], step_s: float, steps: int
) -> None:
    names = [f"request-{i}" for i in range(BATCH)]
    if streamer is not None:
        for name, ids in zip(names, cache.batch_ids, strict=True):
            streamer.open(name, ids)
    for token_count in range(1, steps + 1):
        compute(step_s)
        if streamer is not None:
            streamer.advance(dict.fromkeys(names, token_count))


def _measure_steps(
    report: Report,
    repeats: int,
    cache: Cache,
    folder: Path,
    other: "_OtherProcess",
    compute_name: str,
    compute: Callable[[float], None],
    steps: int,
    step_s: float,
) -> None:
    def disk() -> LineSink:
        return LineDisk(folder / "lines", LAYOUT, 1 << 40)

    def process() -> LineSink:
        return LineSender(other.lines, "lines", chunk_bytes=STAGING_BYTES + (1 << 16))

    sinks: dict[str, Callable[[], LineSink] | None] = {"nothing": None, "disk": disk, "process": process}
    elapsed_s: dict[str, list[float]] = {name: [] for name in sinks}
    cpu_s: dict[str, list[float]] = {name: [] for name in sinks}
    late: dict[str, list[float]] = {name: [] for name in sinks if name != "nothing"}
    for repeat in range(-1, repeats):  # the first one warms up
        for name, make_sink in sinks.items():
            streamer = None
            if make_sink is not None:
                streamer = TokenStreamer(cache.pool, make_sink(), staging_bytes=STAGING_BYTES)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            _run_steps(cache, streamer, compute, step_s, steps)
            ended_s = time.perf_counter()
            if repeat >= 0:
                elapsed_s[name].append(ended_s - began_s)
                cpu_s[name].append(time.process_time() - began_cpu_s)
            if streamer is not None:
                streamer.flush(WAIT_S)
                if repeat >= 0:
                    late[name].append(1e3 * (time.perf_counter() - ended_s))
                for i in range(BATCH):
                    streamer.end(f"request-{i}")
                streamer.flush(WAIT_S)
                streamer.close()
    for name, values in elapsed_s.items():
        report.row(f"steps, compute {compute_name}", [steps / value for value in values], "steps/s", streamed_to=name)
        labels = {"streamed_to": name}
        report.row(
            f"CPU of a step, compute {compute_name}", [1e3 * spent / steps for spent in cpu_s[name]], "ms", **labels
        )
    for name, values in late.items():
        report.row(f"flush after the last step, compute {compute_name}", values, "ms", streamed_to=name)
        ratio = _paired(elapsed_s["nothing"], elapsed_s[name])
        report.ratio(f"steps/s with streaming / without, compute {compute_name}, {name}", ratio, target=0.98)


class _Multiplier:
    """Compute on the CPU: so many products of matrices as take step_s on an idle core."""

    def __init__(self, step_s: float) -> None:
        self._matrix = np.random.default_rng(0).random((256, 256), np.float32)
        self._out = np.empty_like(self._matrix)
        self._count = 1
        self(0.0)
        once_s = min(self._time() for _ in range(50))
        self._count = max(1, round(step_s / once_s))

    def __call__(self, step_s: float) -> None:
        for _ in range(self._count):
            np.matmul(self._matrix, self._matrix, self._out)

    def _time(self) -> float:
        began_s = time.perf_counter()
        self(0.0)
        return time.perf_counter() - began_s


def _flush_each(place: FlushPlace, regions: Sequence[Region]) -> None:
    for i, region in enumerate(regions):
        place.flush(f"region-{i}", region, WAIT_S)
    place.settle("", WAIT_S)


def _flush_pieces(place: FlushPlace, chunk: Region) -> None:
    for i in range(0, chunk.nbytes, STAGING_BYTES):
        place.flush(f"piece-{i}", chunk[i : i + STAGING_BYTES], WAIT_S)
    place.settle("", WAIT_S)


def _interleaved(repeats: int, ways: dict[KeyT, Callable[[], None]]) -> dict[KeyT, list[float]]:
    elapsed_s: dict[KeyT, list[float]] = {key: [] for key in ways}
    for repeat in range(-1, repeats):  # the first one warms up
        for key, way in ways.items():
            began_s = time.perf_counter()
            way()
            if repeat >= 0:
                elapsed_s[key].append(time.perf_counter() - began_s)
    return elapsed_s


def _paired(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Median ratio of neighbours in time."""
    return statistics.median(one / other for one, other in zip(slower, faster, strict=True))


class _OtherProcess:
    """The flushing ends towards a process that lands chunks, and one that stores lines."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()
        self.chunks = ChunkSender(lambda *asked: self._grant("chunks", *asked), block_count=1024)
        self.lines = ChunkSender(lambda *asked: self._grant("lines", *asked), block_count=256)

    def close(self) -> None:
        """Ends the connections and the process."""
        self.chunks.close()
        self.lines.close()
        self._control.send(None)

    def _grant(self, which: str, name: str, byte_count: int, expires_in_s: float) -> Ticket:
        with self._lock:
            self._control.send((which, name, byte_count, expires_in_s))
            ticket = self._control.recv()
        assert isinstance(ticket, Ticket), ticket
        return ticket


@contextlib.contextmanager
def _other_process(folder: Path) -> Iterator[_OtherProcess]:
    spawn = multiprocessing.get_context("spawn")
    control, their_control = spawn.Pipe()
    process = spawn.Process(target=_receive, args=(their_control, folder), daemon=True)
    process.start()
    their_control.close()
    other = _OtherProcess(control)
    try:
        yield other
    finally:
        other.close()
        process.join(WAIT_S)


def _receive(control: Connection, folder: Path) -> None:
    """The other process: grants tickets, forgets chunks as they land, stores lines."""
    configure_logs("kv_streaming", "receiver", level="error")
    pool = KvPool(LAYOUT, 256)
    allocator = BlockAllocator(pool.block_count)

    def blocks_of(request: str, token_count: int) -> Sequence[int]:
        missing = LAYOUT.block_count(token_count) - len(allocator.blocks_of(request))
        allocator.allocate(request, max(0, missing))
        return allocator.blocks_of(request)

    def release(request: str) -> None:
        allocator.release(request)

    def forget(name: str, byte_count: int) -> None:
        chunks.discard(name)

    chunks = ChunkReceiver(
        listen=[KvEndpoint("unix", str(folder / "chunks.sock"))], epoch=1, block_count=2048, on_landed=forget
    )
    lines = LineReceiver(
        LinePool(pool, LAYOUT, blocks_of, release),
        listen=[KvEndpoint("unix", str(folder / "lines.sock"))],
        epoch=2,
        chunk_bytes=STAGING_BYTES + (1 << 16),
    )
    while (asked := control.recv()) is not None:
        which, *details = asked
        control.send((chunks if which == "chunks" else lines).grant(*details))
    chunks.close()
    lines.close()


if __name__ == "__main__":
    run("kv_streaming", measure, description=__doc__)
