"""The cost of pushing between different block layouts: a mapped push against one between equal layouts.

Each repeat pushes the same tokens to every kind of receiver, one after the other, so ratios compare neighbours in time.
From KvSender.open() to PushAccepted, between two processes; blocks in random order on both sides.

    same       equal blocks: no staging
    N tokens   blocks of N tokens there, put together in staging here
    heads      blocks of equal size whose bytes are in the other order: a head's rows are short
    two ranks  blocks of equal size, half of the heads each: two tickets, accepted when both are
    gather     the copies into staging alone, within this process
"""

import contextlib
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.support.harness import Options, Report, run
from kaveri.kv.layout.block_map import map_blocks
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.layout.regions import copy_regions
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.mapped_pushes import STAGING_BYTES
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, TRANSPORT_NAMES, make_transports
from kaveri.telemetry.logs import configure_logs

LAYOUT = KvLayout("benchmark", 8, block_tokens=16, kv_head_count=8, head_dim=128, dtype="float16")
TOKENS = 2048
KV_BYTES = TOKENS * LAYOUT.token_bytes
HALVES = replace(LAYOUT, tensor_ranks=2)
LAYOUTS = {
    "same": [LAYOUT],
    "32 tokens": [replace(LAYOUT, block_tokens=32)],
    "128 tokens": [replace(LAYOUT, block_tokens=128)],
    "heads": [replace(LAYOUT, order="2HND")],
    "two ranks": [HALVES.rank(0), HALVES.rank(1)],
}
"""Of each kind of receiver: the layouts of its ranks' pools."""
WAIT_S = 60.0


def measure(options: Options, report: Report) -> None:
    """64 MiB of KV, 2,048 tokens of 8 layers, in blocks of 64 KiB here."""
    configure_logs("kv_mapped", "benchmark", level="warning")
    repeats = options.choose(15, 5)
    report.workload = {
        "kv_bytes": KV_BYTES,
        "tokens": TOKENS,
        "block_bytes": LAYOUT.block_bytes,
        "layers": LAYOUT.layer_count,
        "staging_bytes": min(STAGING_BYTES, KV_BYTES),
        "repeats": repeats,
    }
    pool = KvPool(LAYOUT, LAYOUT.block_count(TOKENS))
    pool.memory[:] = np.random.default_rng(1).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    source = np.random.default_rng(0).permutation(pool.block_count).tolist()
    gib = KV_BYTES / 2**30
    gather_s = {name: _gather_s(pool, source, layouts, repeats) for name, layouts in LAYOUTS.items()}
    for name, values in gather_s.items():
        report.row("gather", [gib / value for value in values], "GiB/s", to=name)
    for transport in TRANSPORT_NAMES:
        with _receiving_process(transport) as control, contextlib.ExitStack() as stack:
            events: queue.Queue[PushAccepted | PushFailed] = queue.Queue()
            sender = KvSender(pool, events.put, transports=make_transports((transport,)))
            stack.callback(sender.close)
            elapsed_s: dict[str, list[float]] = {name: [] for name in LAYOUTS}
            cpu_s: dict[str, list[float]] = {name: [] for name in LAYOUTS}
            for repeat in range(-1, repeats):  # the first one warms up: connections, staging
                for name in LAYOUTS:
                    tickets = _ask(control, "grant", name)
                    assert isinstance(tickets, list)
                    began_cpu_s, began_s = _cpu_s(control), time.perf_counter()
                    _push(sender, tickets, source)
                    ended = [events.get(timeout=WAIT_S) for _ in tickets]
                    seconds = time.perf_counter() - began_s
                    assert all(isinstance(event, PushAccepted) for event in ended), ended
                    if repeat >= 0:
                        elapsed_s[name].append(seconds)
                        cpu_s[name].append(_cpu_s(control) - began_cpu_s)
        for name, values in elapsed_s.items():
            report.row("push", [gib / value for value in values], "GiB/s", transport=transport, to=name)
            report.row("cpu of both", [value / gib for value in cpu_s[name]], "s/GiB", transport=transport, to=name)
        for name in LAYOUTS:
            if name != "same":
                pairs = zip(elapsed_s["same"], elapsed_s[name], strict=True)
                report.ratio(f"{name} / same, {transport}", statistics.median(same / ours for same, ours in pairs))
    report.note(f"the two processes share {os.cpu_count()} cores with whatever else runs")


def _gather_s(pool: KvPool, source: Sequence[int], layouts: Sequence[KvLayout], repeats: int) -> list[float]:
    """Seconds in which everything is put together for these layouts, layer by layer."""
    targets = [KvPool(layout, layout.block_count(TOKENS)) for layout in layouts]
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for target in targets:
            block_map, target_ids = map_blocks(LAYOUT, target.layout), range(target.block_count)
            for layer in range(LAYOUT.layer_count):
                copies = block_map.copies(range(TOKENS), source, 0, target_ids, 0)
                copy_regions(copies, pool.memory[layer].reshape(1, -1), target.memory[layer].reshape(1, -1))
        times.append(time.perf_counter() - began_s)
    return times


def _push(sender: KvSender, tickets: list[Ticket], source: Sequence[int]) -> None:
    for ticket in tickets:
        sender.open(ticket, part=len(tickets) > 1)
    for layer in range(LAYOUT.layer_count):
        for ticket in tickets:
            sender.write(ticket.transfer_id, layer, 0, source)
    for ticket in tickets:
        sender.finish(ticket.transfer_id, b"")


def _cpu_s(control: Connection) -> float:
    """What both processes have used so far."""
    return float(str(_ask(control, "cpu"))) + time.process_time()


def _ask(control: Connection, *question: str) -> object:
    control.send(question)
    return control.recv()


@contextlib.contextmanager
def _receiving_process(transport: str) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        control, their_control = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(their_control, transport, folder), daemon=True)
        process.start()
        their_control.close()
        try:
            yield control
        finally:
            control.send(("end",))
            process.join(WAIT_S)
            control.close()


def _receive(control: Connection, transport: str, folder: str) -> None:
    """The receiving process: a receiver for each layout."""
    configure_logs("kv_mapped", "receiver", level="warning")
    receivers: dict[str, list[tuple[KvReceiver, list[int]]]] = {}
    for name, layouts in LAYOUTS.items():
        receivers[name] = []
        for rank, layout in enumerate(layouts):
            pool = KvPool(layout, layout.block_count(TOKENS))
            path = str(Path(folder) / f"{len(receivers)}-{rank}.sock")
            address = path if transport in PATH_NAMES else "127.0.0.1:0"
            receiver = KvReceiver(
                pool,
                lambda _: None,
                listen=[KvEndpoint(transport, address)],
                epoch=len(receivers),
                transports=make_transports((transport,)),
            )
            blocks = np.random.default_rng(2).permutation(pool.block_count).tolist()
            receivers[name].append((receiver, blocks))
    while (order := control.recv())[0] != "end":
        if order[0] == "cpu":
            control.send(time.process_time())
        else:
            control.send([receiver.grant(blocks, TOKENS, WAIT_S) for receiver, blocks in receivers[order[1]]])
    for ranks in receivers.values():
        for receiver, _ in ranks:
            receiver.close()


if __name__ == "__main__":
    run("kv.mapped", measure, description=__doc__)
