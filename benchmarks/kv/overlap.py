"""How much of a KV push is hidden behind the prefill that computes it (TetriInfer, section 3.3.4; DéjàVu, 4.1.1).

Between two processes, KvSender to KvReceiver, one prompt whose blocks become ready piece by piece:

    request-level     all of it is pushed once all of it is computed
    chunk-level       every chunk of the prompt once all layers of the chunk are computed
    layer-level       one chunk; every layer once it is computed
    layers of chunks  every layer of every chunk: what the engines do

    hidden = 1 - exposed / transfer     exposed: from the end of the compute to the acceptance
                                        transfer: the same push alone, in the same repeat

Compute takes transfer / (transfer : compute), spread evenly. Off the CPU it is a wait, paced as the timed engine's
steps are: what a GPU's host sees. On the CPU it is numpy's matrix product on one thread in the sender's process, which
shares the cores with the push; the time by which that slows the compute also counts as exposed. A push of n pieces
cannot hide more than 1 - 1/n of itself, because its last piece is computed last.

In the real stack (router, prefill, decode: each a process) on the CPU: time to the first and to the second token of
prompts of 64 to 1,900 tokens, over each transport.
"""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is there

import numpy as np

from benchmarks.support.compute import Multiplier, wait_until
from benchmarks.support.harness import Options, Report, run
from benchmarks.support.single_requests import TimedAnswer, ask
from kaveri import AsyncClient
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.telemetry.logs import configure_logs

TRANSPORTS = ("shm", "unix", "tcp")
LAYOUT = KvLayout("benchmark", 32, block_tokens=16, kv_head_count=8, head_dim=128, dtype="bfloat16")
PROMPT_BLOCKS = 128
CHUNK_BLOCKS = 32
KV_BYTES = LAYOUT.layer_count * PROMPT_BLOCKS * LAYOUT.block_bytes
TRANSFER_TO_COMPUTE = (0.25, 0.5, 1.0)
_SHOWN_RATIO = 0.5
WAIT_S = 30.0

PROMPT_TOKENS = (64, 256, 512, 1024, 1900)
ANSWER_TOKENS = 9
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class _Way:
    name: str
    chunk_blocks: int
    """Blocks that are computed together."""
    by_layer: bool
    pushes_early: bool = True

    @property
    def pieces(self) -> int:
        """How many pushes one after the other."""
        if not self.pushes_early:
            return 1
        return PROMPT_BLOCKS // self.chunk_blocks * (LAYOUT.layer_count if self.by_layer else 1)


WAYS = (
    _Way("request-level", PROMPT_BLOCKS, by_layer=False, pushes_early=False),
    _Way("chunk-level", CHUNK_BLOCKS, by_layer=False),
    _Way("layer-level", PROMPT_BLOCKS, by_layer=True),
    _Way("layers of chunks", CHUNK_BLOCKS, by_layer=True),
)

ComputeUntil = Callable[[float, float], None]
"""(seconds of this piece, when it and all before it should have ended)"""


@dataclass(frozen=True)
class _Timing:
    """Of one push, in seconds."""

    compute_s: float
    exposed_s: float


def measure(options: Options, report: Report) -> None:
    """A prompt of 2,048 tokens of a model of 32 layers and 8 KV heads of 128 in bfloat16, as Llama-3-8B: 256 MiB."""
    configure_logs("kv_overlap", "benchmark", level="error")
    repeats = options.choose(5, 3)
    report.workload = {
        "kv_bytes": KV_BYTES,
        "layers": LAYOUT.layer_count,
        "block_bytes": LAYOUT.block_bytes,
        "prompt_tokens": PROMPT_BLOCKS * LAYOUT.block_tokens,
        "chunk_tokens": CHUNK_BLOCKS * LAYOUT.block_tokens,
        "transfer_to_compute": list(TRANSFER_TO_COMPUTE),
        "repeats": repeats,
        "warm_up": "one push of each kind per transport",
        "stack": {"model": options.model, "prompt_tokens": list(PROMPT_TOKENS), "answer_tokens": ANSWER_TOKENS},
    }
    pool = KvPool(LAYOUT, PROMPT_BLOCKS)
    pool.memory[:] = np.random.default_rng(1).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    multiply = Multiplier()
    computes: dict[str, ComputeUntil] = {
        "off the CPU": lambda piece_s, until_s: wait_until(until_s),
        "on the CPU": lambda piece_s, until_s: multiply(piece_s),
    }
    ratios = options.choose(TRANSFER_TO_COMPUTE, (_SHOWN_RATIO,))
    for transport in TRANSPORTS:
        with _receiving_process(transport, pool) as receiving:
            for compute_name, compute in computes.items():
                _measure_overlap(report, repeats, receiving, transport, compute_name, compute, ratios)
    best = [report.ratios[_ratio_name("off the CPU", name, "layers of chunks")] for name in TRANSPORTS]
    report.compare(
        "DéjàVu, section 5.2.1: prompt streaming hidden behind the prompt's compute",
        "fully, with layer-by-layer streaming",
        f"{min(best):.3f} to {max(best):.3f} of the transfer over {', '.join(TRANSPORTS)}",
        "the last layer of the last chunk is pushed when nothing computes any more, and the acceptance comes back",
    )
    report.note(
        f"no way hides more than 1 - 1/pieces: {', '.join(f'{way.name} {1 - 1 / way.pieces:.3f}' for way in WAYS)}"
    )
    report.note(
        "on the CPU: the push and the receiver run on the cores that compute; what stretches it counts as exposed"
    )
    asyncio.run(_measure_stack(options, report))
    report.note(f"{os.cpu_count()} cores for all processes and whatever else runs")


def _measure_overlap(
    report: Report,
    repeats: int,
    receiving: "_ReceivingProcess",
    transport: str,
    compute_name: str,
    compute: ComputeUntil,
    ratios: Sequence[float],
) -> None:
    alone = WAYS[0]
    transfer_s = statistics.median(receiving.push(alone, 0.0, compute).exposed_s for _ in range(3))
    for ratio in ratios:
        compute_s = transfer_s / ratio
        alone_s: list[float] = []
        computed_s: list[float] = []
        timings: dict[str, list[_Timing]] = {way.name: [] for way in WAYS}
        for repeat in range(-1, repeats):  # the first one warms up
            computed = receiving.compute_alone(WAYS[-1], compute_s, compute)
            pushed = receiving.push(alone, 0.0, compute).exposed_s
            taken = {way.name: receiving.push(way, compute_s, compute) for way in WAYS}
            if repeat >= 0:
                computed_s.append(computed)
                alone_s.append(pushed)
                for name, timing in taken.items():
                    timings[name].append(timing)
        labels = {"transport": transport, "compute": compute_name, "transfer_to_compute": ratio}
        report.row("transfer alone", [1e3 * value for value in alone_s], "ms", **labels)
        report.row("compute alone", [1e3 * value for value in computed_s], "ms", **labels)
        for way in WAYS:
            exposed_s = [timing.exposed_s for timing in timings[way.name]]
            stretch_s = [
                max(0.0, timing.compute_s - value) for timing, value in zip(timings[way.name], computed_s, strict=True)
            ]
            pairs = list(zip(exposed_s, stretch_s, alone_s, strict=True))
            labels["way"] = way.name
            report.row("tail after the last layer", [1e3 * value for value in exposed_s], "ms", **labels)
            report.row("compute made longer by", [1e3 * value for value in stretch_s], "ms", **labels)
            # Both count as exposed: what comes after the last layer, and what the push takes from the compute.
            shares = [1 - (exposed + stretch) / whole for exposed, stretch, whole in pairs]
            hidden = report.row("hidden", shares, "share", **labels)
            if ratio == _SHOWN_RATIO:
                is_asked = way.by_layer and compute_name == "off the CPU" and transport in ("shm", "tcp")
                report.ratio(_ratio_name(compute_name, transport, way.name), hidden, target=0.9 if is_asked else None)


def _ratio_name(compute_name: str, transport: str, way_name: str) -> str:
    return f"hidden at {_SHOWN_RATIO:g} transfer:compute, compute {compute_name}, {transport}, {way_name}"


class _ReceivingProcess:
    """The process that takes the pushes, and the sender to it."""

    def __init__(self, control: Connection, transport: str, pool: KvPool) -> None:
        self._control = control
        self._blocks = list(range(PROMPT_BLOCKS))
        self._events: queue.Queue[tuple[PushAccepted | PushFailed, float]] = queue.Queue()
        self._sender = KvSender(pool, self._on_event, transports=make_transports((transport,)))

    def compute_alone(self, way: _Way, compute_s: float, compute: ComputeUntil) -> float:
        """Seconds that the compute takes with nothing beside it."""
        return self._compute(way, compute_s, compute, lambda layer, first: None, lambda first: None)

    def push(self, way: _Way, compute_s: float, compute: ComputeUntil) -> _Timing:
        """Computes and pushes a prompt."""
        self._control.send("grant")
        ticket = self._control.recv()
        assert isinstance(ticket, Ticket)

        def layer_computed(layer: int, first: int) -> None:
            if way.by_layer:
                self._write(ticket, layer, first, way.chunk_blocks)

        def chunk_computed(first: int) -> None:
            if way.pushes_early and not way.by_layer:
                for layer in range(LAYOUT.layer_count):
                    self._write(ticket, layer, first, way.chunk_blocks)

        self._sender.open(ticket)
        computed_s = self._compute(way, compute_s, compute, layer_computed, chunk_computed) if compute_s else 0.0
        ended_s = time.perf_counter()
        if not way.pushes_early:
            for layer in range(LAYOUT.layer_count):
                self._write(ticket, layer, 0, PROMPT_BLOCKS)
        self._sender.finish(ticket.transfer_id, b"")
        event, accepted_s = self._events.get(timeout=WAIT_S)
        assert isinstance(event, PushAccepted), event
        return _Timing(computed_s, accepted_s - ended_s)

    def close(self) -> None:
        """Ends the connection and the process."""
        self._sender.close()
        self._control.send("end")

    def _compute(
        self,
        way: _Way,
        compute_s: float,
        compute: ComputeUntil,
        layer_computed: Callable[[int, int], None],
        chunk_computed: Callable[[int], None],
    ) -> float:
        chunks = range(0, PROMPT_BLOCKS, way.chunk_blocks)
        piece_s = compute_s / len(chunks) / LAYOUT.layer_count
        began_s = until_s = time.perf_counter()
        for first in chunks:
            for layer in range(LAYOUT.layer_count):
                until_s += piece_s
                compute(piece_s, until_s)
                layer_computed(layer, first)
            chunk_computed(first)
        return time.perf_counter() - began_s

    def _write(self, ticket: Ticket, layer: int, first: int, count: int) -> None:
        self._sender.write(ticket.transfer_id, layer, first, self._blocks[first : first + count])

    def _on_event(self, event: PushAccepted | PushFailed) -> None:
        self._events.put((event, time.perf_counter()))


@contextlib.contextmanager
def _receiving_process(transport: str, pool: KvPool) -> Iterator[_ReceivingProcess]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        control, their_control = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(their_control, transport, folder), daemon=True)
        process.start()
        their_control.close()
        receiving = _ReceivingProcess(control, transport, pool)
        try:
            yield receiving
        finally:
            receiving.close()
            process.join(WAIT_S)
            control.close()


def _receive(control: Connection, transport: str, folder: str) -> None:
    """The receiving process: grants tickets for all of its pool, one at a time."""
    configure_logs("kv_overlap", "receiver", level="error")
    address = str(Path(folder) / "kv.sock") if transport in PATH_NAMES else "127.0.0.1:0"
    receiver = KvReceiver(
        KvPool(LAYOUT, PROMPT_BLOCKS),
        lambda _: None,
        listen=[KvEndpoint(transport, address)],
        epoch=1,
        transports=make_transports((transport,)),
    )
    while control.recv() == "grant":
        blocks = list(range(PROMPT_BLOCKS))
        control.send(receiver.grant(blocks, PROMPT_BLOCKS * LAYOUT.block_tokens, WAIT_S))
    receiver.close()


async def _measure_stack(options: Options, report: Report) -> None:
    """One request at a time. The lengths take turns, so that drift of the machine hits all of them."""
    repeats = options.choose(7, 2)
    for transport in options.choose(TRANSPORTS, ("shm", "tcp")):
        config = StackConfig.of(
            model=options.model,
            prefill_count=1,
            decode_count=1,
            max_model_len=MAX_MODEL_LEN,
            prefill_flags=("--kv-transports", transport),
            decode_flags=("--kv-transports", transport),
        )
        taken: dict[int, list[TimedAnswer]] = {length: [] for length in PROMPT_TOKENS}
        async with LocalStack(config) as stack, AsyncClient(stack.target) as client:
            vocab_size = (await client.list_models())[0].vocab_size
            for repeat in range(-1, repeats):  # the first one warms up
                for length, answers in taken.items():
                    answer = await ask(client, length, ANSWER_TOKENS, vocab_size, seed=100 * repeat + length)
                    assert answer.server.kv_transport == transport, answer
                    if repeat >= 0:
                        answers.append(answer)
        for length, answers in taken.items():
            labels = {"transport": transport, "prompt_tokens": length}
            report.row("TTFT, stack", [1e3 * answer.first_s for answer in answers], "ms", **labels)
            report.row("time to second token, stack", [1e3 * answer.second_s for answer in answers], "ms", **labels)
            later_ms = [1e3 * answer.later_gap_s for answer in answers]
            report.row("gap between later tokens, stack", later_ms, "ms", **labels)
            report.row("tail of the push, stack", [1e3 * answer.server.kv_tail_s for answer in answers], "ms", **labels)
            share = statistics.median(answer.first_s / answer.second_s for answer in answers)
            report.ratio(f"TTFT / time to second token, stack, {transport}, {length} tokens", share)
    report.note(
        "stack: the tail is what the prefill service measured from the first token to the acceptance; the second token "
        "also waits for admission and one decode step"
    )


if __name__ == "__main__":
    run("kv.overlap", measure, description=__doc__)
