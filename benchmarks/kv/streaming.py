"""What streaming KV cache costs: DéjàVu's ablation (arXiv 2403.01876, section 5.1, figure 7), as far as a library goes.

    copies     the KV of a prompt, and the lines of one decode step of a batch, out of their blocks: one region at a
               time, against copied together first; to host memory, a local disk, another process
    bare       the same to disk and process without the library: one system call for each region, no names, no tickets,
               no digests. What is left of the gain is that of buffered copies alone
    ablation   a prompt and then decode steps, all of it streamed; how much longer that takes than the compute alone:
               one flush per region, + buffered copies, + layer by layer, + tokens beside compute

Compute is off the CPU: a wait of known length, as for a GPU's host. The other process lands every byte, verified, over
a Unix socket; lines it stores in a pool of its own. Token streaming beside real engines is in token_streaming.

Where a token's KV is in pieces depends on the order of a block's bytes: with heads inside tokens (2NHD) K and V of a
layer are one region each, with tokens inside heads (2HND) one for each head.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.streaming_process import LINE_CHUNK_BYTES, STAGING_BYTES, StreamingProcess, streaming_process
from kaveri.kv.disk import LocalDisk
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_link import LineSender
from kaveri.kv.lines import PoolLines
from kaveri.kv.partition import KvPartition
from kaveri.kv.places import FlushPlace
from kaveri.kv.plan import make_plan
from kaveri.kv.pool import KvPool
from kaveri.kv.regions import RegionCopy, copy_regions
from kaveri.kv.staging import StagingBuffers
from kaveri.kv.streams import RequestCache, stream_out
from kaveri.kv.token_streamer import TokenStreamer
from kaveri.telemetry.logs import configure_logs

PROMPT_TOKENS = 500
BATCH = 8
PROMPT_LAYER_S = 0.004
STEP_S = 0.02
WAIT_S = 60.0

Region = npt.NDArray[np.uint8]
KeyT = TypeVar("KeyT")
_WAYS = ("one flush per region", "+ buffered copies", "+ layer by layer", "+ tokens beside compute")
_PAPER = "DéjàVu, figure 7: "


def measure(options: Options, report: Report) -> None:
    """16 layers, 8 KV heads of 128 in float16: 64 KiB a token. One stage with blocks of 16 to two with blocks of 64."""
    configure_logs("kv_streaming", "benchmark", level="error")
    repeats = options.choose(9, 5)
    # The way that flushes each region takes most of the time, and tokens inside heads are in eight times the regions.
    steps = {"2NHD": options.choose(32, 8), "2HND": options.choose(16, 2)}
    ablation_repeats = {"2NHD": options.choose(5, 3), "2HND": options.choose(3, 1)}
    caches = {order: Cache(order, count) for order, count in steps.items()}
    layout = caches["2NHD"].layout
    report.workload = {
        "token_bytes": layout.token_bytes,
        "layers": layout.layer_count,
        "prompt_tokens": PROMPT_TOKENS,
        "prompt_layer_s": PROMPT_LAYER_S,
        "batch": BATCH,
        "step_s": STEP_S,
        "steps": steps,
        "repeats": repeats,
        "ablation_repeats": ablation_repeats,
        "warm_up": "one turn of each way of the copies",
    }
    with tempfile.TemporaryDirectory() as folder:
        for order, cache in caches.items():
            pool_blocks = BATCH * (1 + layout.block_count(max(steps.values())))
            with streaming_process(cache.layout, pool_blocks, "unix") as other:
                places: dict[str, FlushPlace] = {"process": other.chunks}
                if order == "2NHD":
                    places = {"disk": LocalDisk(Path(folder) / "chunks", 1 << 40), **places}
                    _measure_copies(report, repeats, cache, places, other, Path(folder))
                for name, place in places.items():
                    _measure_ablation(report, ablation_repeats[order], cache, name, place, steps[order])
    report.note(
        "extra time is beside the same compute with nothing streamed, taken in the same repeat; in its ratios less "
        "than a millisecond counts as one"
    )
    report.note("disk: files of a temporary folder in the page cache; a flush is a file with a digest, and not synced")
    report.note("a flush of one region to a process is a ticket asked for over a pipe, a push and its acceptance")
    report.note(f"{os.cpu_count()} cores for both processes and whatever else runs")


class Cache:
    """A pool with one prompt of PROMPT_TOKENS in it, and a batch that has room for `steps` tokens each."""

    def __init__(self, order: str, steps: int) -> None:
        self.layout = layout = KvLayout(
            "benchmark", 16, 16, kv_head_count=8, head_dim=128, dtype="float16", order=order
        )
        destination = KvPartition.even(replace(layout, block_tokens=64), pipeline_stages=2)
        self.plan = make_plan(KvPartition.even(layout), destination)
        prompt_blocks, blocks_each = layout.block_count(PROMPT_TOKENS), layout.block_count(steps)
        self.pool = KvPool(layout, prompt_blocks + BATCH * blocks_each)
        self.pool.memory[:] = np.random.default_rng(0).integers(0, 256, self.pool.memory.shape, dtype=np.uint8)
        ids = np.random.default_rng(1).permutation(self.pool.block_count).tolist()
        self.prompt_ids = tuple(ids[:prompt_blocks])
        self.batch_ids = [
            ids[prompt_blocks + i * blocks_each : prompt_blocks + (i + 1) * blocks_each] for i in range(BATCH)
        ]
        self.lines = PoolLines(self.pool)
        # [layer, block, K or V, group, token, byte]: a group is what keeps its tokens in a row, all heads or one.
        groups = 1 if order == "2NHD" else layout.kv_head_count
        self._groups = self.pool.memory.reshape(
            layout.layer_count, self.pool.block_count, 2, groups, layout.block_tokens, -1
        )

    def prompt_regions(self) -> list[Region]:
        """Every contiguous region of the prompt's KV."""
        block_tokens = self.layout.block_tokens
        regions = []
        for layer in self._groups:
            for index, block in enumerate(self.prompt_ids):
                token_count = min(block_tokens, PROMPT_TOKENS - index * block_tokens)
                regions += [group[:token_count].reshape(-1) for half in layer[block] for group in half]
        return regions

    def line_regions(self, token: int) -> list[Region]:
        """Every contiguous region of the batch's lines of one token."""
        index, within = divmod(token, self.layout.block_tokens)
        return [
            group[within]
            for ids in self.batch_ids
            for layer in self._groups
            for half in layer[ids[index]]
            for group in half
        ]

    def gather_prompt(self, into: Region) -> None:
        """Share by share, as stream_out does."""
        layers, position = self.pool.memory.reshape(self.layout.layer_count, -1), 0
        for share in self.plan.shares:
            copies: tuple[RegionCopy, ...] = self.plan.packing(share, range(PROMPT_TOKENS), self.prompt_ids)
            size = len(share.layers) * PROMPT_TOKENS * self.layout.token_bytes // self.layout.layer_count
            piece = into[position : position + size].reshape(len(share.layers), -1)
            copy_regions(copies, layers[share.layers.start : share.layers.stop], piece)
            position += size

    def gather_lines(self, token: int, into: Region) -> None:
        """One request's lines behind the other's."""
        size = self.layout.token_bytes
        for i, ids in enumerate(self.batch_ids):
            self.lines.gather(ids, range(token, token + 1), into[i * size : (i + 1) * size])


def _measure_copies(
    report: Report,
    repeats: int,
    cache: Cache,
    places: dict[str, FlushPlace],
    other: StreamingProcess,
    folder: Path,
) -> None:
    lines_bytes, prompt_bytes = BATCH * cache.layout.token_bytes, PROMPT_TOKENS * cache.layout.token_bytes
    buffers = StagingBuffers(prompt_bytes, 2)
    staging, target = buffers.acquire(WAIT_S), buffers.acquire(WAIT_S)
    works: dict[str, tuple[list[Region], Callable[[Region], None], int]] = {
        "prompt": (cache.prompt_regions(), cache.gather_prompt, prompt_bytes),
        "lines of a step": (cache.line_regions(3), lambda into: cache.gather_lines(3, into), lines_bytes),
    }
    for work, (regions, gather, byte_count) in works.items():
        assert sum(region.nbytes for region in regions) == byte_count
        filled = staging[:byte_count]

        def gather_all(gather: Callable[[Region], None] = gather, filled: Region = filled) -> None:
            gather(filled)

        ways: dict[tuple[str, str], Callable[[], None]] = {
            ("host", "each region"): partial(_copy_each, regions, target),
            ("host", "buffered"): gather_all,
        }
        for name, place in places.items():
            ways[name, "each region"] = partial(_flush_each, place, regions)
            ways[name, "buffered"] = partial(_gather_then, gather_all, partial(_flush_pieces, place, filled))
        write_bare: dict[str, Callable[[Sequence[Region]], None]] = {
            "disk": partial(_write_file, folder / "bare"),
            "process": other.send_bare,
        }
        for name, write in write_bare.items():
            ways[f"{name}, bare", "each region"] = partial(write, regions)
            ways[f"{name}, bare", "buffered"] = partial(_gather_then, gather_all, partial(write, [filled]))
        elapsed_s = _interleaved(repeats, ways)
        for (name, way), values in elapsed_s.items():
            labels = {"of": work, "to": name, "regions": len(regions)}
            report.row(way, [1e3 * value for value in values], "ms", **labels)
        for name in dict.fromkeys(name for name, _ in ways):
            ratio = _paired(elapsed_s[name, "each region"], elapsed_s[name, "buffered"])
            report.ratio(f"each region / buffered, {work}, {name}", ratio)
    np.copyto(target, staging)
    plain = _interleaved(
        repeats, {"memcpy": lambda: np.copyto(target, staging), "gather": lambda: cache.gather_prompt(staging)}
    )
    for name, values in plain.items():
        report.row(name, [prompt_bytes / 2**30 / value for value in values], "GiB/s", of="prompt")
    report.ratio("buffered gather / memcpy, prompt", _paired(plain["memcpy"], plain["gather"]))


@dataclass(frozen=True)
class _Stage:
    """What one way of the ablation has: as many of the optimisations as its number."""

    number: int | None
    """Of _WAYS; None streams nothing."""
    cache: Cache
    place: FlushPlace
    staging: StagingBuffers
    streamer: TokenStreamer | None


def _measure_ablation(report: Report, repeats: int, cache: Cache, name: str, place: FlushPlace, steps: int) -> None:
    """The last way adds a TokenStreamer whose sink flushes to the same place."""

    def one(number: int | None) -> float:
        # Made once in the life of an instance, so not part of what a request takes.
        streamer = None
        if number == len(_WAYS) - 1:
            sink = LineSender(place, "lines", LINE_CHUNK_BYTES)
            streamer = TokenStreamer(cache.pool, sink, staging_bytes=STAGING_BYTES)
        stage = _Stage(number, cache, place, StagingBuffers(STAGING_BYTES), streamer)
        began_s = time.perf_counter()
        _prompt(stage)
        _decode(stage, steps)
        elapsed_s = time.perf_counter() - began_s
        if streamer is not None:
            streamer.close()
        return elapsed_s

    compute_s: list[float] = []
    elapsed_s: dict[int, list[float]] = {number: [] for number in range(len(_WAYS))}
    for repeat in range(-1, repeats):  # the first one warms up
        alone_s = one(None)
        with_way_s = [one(number) for number in elapsed_s]
        if repeat >= 0:
            compute_s.append(alone_s)
            for number, value in enumerate(with_way_s):
                elapsed_s[number].append(value)
    labels = {"to": name, "order": cache.layout.order}
    report.row("compute alone", [1e3 * value for value in compute_s], "ms", **labels)
    slowdowns = []
    extra_s = []
    for number, values in elapsed_s.items():
        pairs = list(zip(values, compute_s, strict=True))
        row = [1e3 * (value - alone) for value, alone in pairs]
        extra_s.append(report.row(f"extra time: {_WAYS[number]}", row, "ms", **labels) / 1e3)
        slowdowns.append(
            report.row(f"slowdown: {_WAYS[number]}", [value / alone for value, alone in pairs], "x", **labels)
        )
    where = f"{name}, {cache.layout.order}"
    for number in range(1, len(_WAYS)):
        report.ratio(f"extra time before / with {_WAYS[number]}, {where}", _gain(extra_s[number - 1], extra_s[number]))
    report.ratio(f"slowdown before / with {_WAYS[1]}, {where}", slowdowns[0] / slowdowns[1])
    report.ratio(f"slowdown with {_WAYS[1]} / with all of them, {where}", slowdowns[1] / slowdowns[-1])
    report.ratio(f"slowdown with all of them, {where}", slowdowns[-1])
    if name == "process":
        regions = len(cache.line_regions(0))
        report.compare(
            f"{_PAPER}buffered copies over one transfer per region ({cache.layout.order})",
            "95x",
            f"{slowdowns[0] / slowdowns[1]:.3g}x of the latency, {_gain(extra_s[0], extra_s[1]):.3g}x of the extra "
            "time",
            f"the more regions, the more it gains: here {regions} a step of {1e3 * STEP_S:.0f} ms; there K is a tensor "
            "of six dimensions, whose heads are in pieces too, and a piece a call of cudaMemcpy",
        )
        report.compare(
            f"{_PAPER}the other two optimisations ({cache.layout.order})",
            "1.4x",
            f"{slowdowns[1] / slowdowns[-1]:.3g}x of the latency, {_gain(extra_s[1], extra_s[-1]):.3g}x of the "
            "extra time",
            "what there is left to hide depends on the time of a buffered transfer in a step's time",
        )
        report.compare(
            f"{_PAPER}slowdown with all three ({cache.layout.order})",
            "within 2 %",
            f"{100 * (slowdowns[-1] - 1):.2f} %",
            f"the prompt's tail and the flush behind the last step, once in a run of {1e3 * min(compute_s):.0f} ms; "
            "there once in 500 tokens. See token_streaming for decode steps alone",
        )


def _gain(before_s: float, after_s: float) -> float:
    """Less than a millisecond counts as one: what is left over is as small as the noise then."""
    return before_s / max(1e-3, after_s)


def _prompt(stage: _Stage) -> None:
    """16 layers one after the other, streamed as the stage can."""
    cache, number, place = stage.cache, stage.number, stage.place
    request = RequestCache("prompt", cache.pool, 0, cache.prompt_ids)
    places = {0: place, 1: place}
    tokens = range(PROMPT_TOKENS)

    def stream(layers: range) -> None:
        stream_out(
            cache.plan,
            request,
            places,
            stage.staging,
            tokens=tokens,
            layers=layers,
            timeout_s=WAIT_S,
            settle=False,
        )

    layer_count = cache.layout.layer_count
    with ThreadPoolExecutor(1) as background:
        streamed = []
        for layer in range(layer_count):
            time.sleep(PROMPT_LAYER_S)
            if number is not None and number >= 2:
                streamed.append(background.submit(stream, range(layer, layer + 1)))
        if number == 0:
            _flush_each(place, cache.prompt_regions())
        elif number == 1:
            stream(range(layer_count))
        for future in streamed:
            future.result(WAIT_S)
    if number is not None:
        place.settle("", WAIT_S)


def _decode(stage: _Stage, steps: int) -> None:
    """Steps of the whole batch, streamed as the stage can."""
    cache, streamer = stage.cache, stage.streamer
    names = [f"request-{i}" for i in range(BATCH)]
    if streamer is not None:
        for name, ids in zip(names, cache.batch_ids, strict=True):
            streamer.open(name, ids)
    for token in range(steps):
        time.sleep(STEP_S)
        if streamer is not None:
            streamer.advance(dict.fromkeys(names, token + 1))
        elif stage.number == 0:
            _flush_each(stage.place, cache.line_regions(token))
        elif stage.number is not None:
            with stage.staging.lend(WAIT_S) as buffer:
                lines = buffer[: BATCH * cache.layout.token_bytes]
                cache.gather_lines(token, lines)
                _flush_pieces(stage.place, lines)
    if streamer is not None:
        streamer.flush(WAIT_S)


def _copy_each(regions: Sequence[Region], target: Region) -> None:
    position = 0
    for region in regions:
        np.copyto(target[position : position + region.nbytes], region)
        position += region.nbytes


def _gather_then(gather: Callable[[], None], send: Callable[[], None]) -> None:
    gather()
    send()


def _write_file(path: Path, regions: Sequence[Region]) -> None:
    with path.open("wb", buffering=0) as file:
        for region in regions:
            file.write(region.data)


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


if __name__ == "__main__":
    run("kv.streaming", measure, description=__doc__)
