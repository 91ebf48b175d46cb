"""Speed of a KV push between two processes: against memcpy, and against a bare link moving the same bytes.

Each repeat moves the same bytes in every way, one after the other, so that ratios compare neighbours in time:

    memcpy   np.copyto within one process, one block at a time
    bare     the same kind of link with nothing around it; see bare_links.py
    grpc     gRPC bytes, beside tcp
    kv       KvSender to KvReceiver, from open() to PushAccepted, with the digests and without
"""

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.bare_links import BareSender, bare_receiver, bare_sender
from benchmarks.harness import Options, Report, run
from kaveri.kv.digest import DigestFactory, NoDigest, xxh3
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import KvReceiver
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.telemetry.logs import configure_logs

LAYOUT = KvLayout("benchmark", 8, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
PUSHED_BLOCKS = 512
POOL_BLOCKS = 2 * PUSHED_BLOCKS
KV_BYTES = LAYOUT.layer_count * PUSHED_BLOCKS * LAYOUT.block_bytes
WAIT_S = 30.0

DIGESTS: dict[str, DigestFactory] = {"xxh3": xxh3, "none": NoDigest}

BARE_LINKS = {
    "tcp": {"bare": "tcp", "grpc": "grpc"},
    "unix": {"bare": "unix"},
    # No kernel copies its bytes, so there is no bare link to compare with.
    "shm": {},
    "nixl": {"bare": "nixl"},
    "gloo": {"bare": "gloo"},
}
"""For each transport: what is measured beside it, as whose kind in bare_links.py."""

_PLAIN = "kv without digests"
_TARGETS = {
    ("kv", "bare", "blocks"): {"tcp": 0.8, "unix": 0.8},
    (_PLAIN, "bare", "blocks"): {"nixl": 0.9, "gloo": 0.9},
    (_PLAIN, "bare", "contiguous"): {"nixl": 0.9, "gloo": 0.9},
    (_PLAIN, "memcpy", "blocks"): {"shm": 0.8},
    (_PLAIN, "memcpy", "contiguous"): {"shm": 0.85},
}
"""Least ratio of (what, to what, shape) for a transport."""


def measure(options: Options, report: Report) -> None:
    """64 MiB in 16 KiB blocks, in random order on both sides ("blocks") and in one run per layer ("contiguous")."""
    configure_logs("kv_transfer", "benchmark", level="warning")
    repeats = options.choose(15, 5)
    report.workload = {
        "kv_bytes": KV_BYTES,
        "block_bytes": LAYOUT.block_bytes,
        "layers": LAYOUT.layer_count,
        "blocks": PUSHED_BLOCKS,
        "pool_blocks": POOL_BLOCKS,
        "repeats": repeats,
    }
    shuffled = np.random.default_rng(0).permutation(POOL_BLOCKS)
    scattered = shuffled[:PUSHED_BLOCKS].tolist(), shuffled[PUSHED_BLOCKS:].tolist()
    contiguous = list(range(PUSHED_BLOCKS)), list(range(PUSHED_BLOCKS))
    pool = KvPool(LAYOUT, POOL_BLOCKS)
    pool.memory[:] = np.random.default_rng(1).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    for transport in BARE_LINKS:
        if transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
            report.note("nixl-cu13 is not installed: nixl was not measured")
            continue
        for shape, (source, target) in (("blocks", scattered), ("contiguous", contiguous)):
            with _receiving_process(transport, pool) as receiving:
                _measure_case(report, repeats, pool, receiving, transport, shape, source, target)
    report.note(
        f"{POOL_BLOCKS} blocks in each pool; the two processes share {os.cpu_count()} cores with whatever else runs"
    )


def _measure_case(
    report: Report,
    repeats: int,
    pool: KvPool,
    receiving: "_ReceivingProcess",
    transport: str,
    shape: str,
    source: Sequence[int],
    target: Sequence[int],
) -> None:
    twin = KvPool(LAYOUT, POOL_BLOCKS)
    elapsed_s: dict[str, list[float]] = {name: [] for name in ("memcpy", *BARE_LINKS[transport], "kv", _PLAIN)}
    cpu_s: dict[str, list[float]] = {name: [] for name in elapsed_s}
    for repeat in range(-1, repeats):  # the first one warms up
        for name in elapsed_s:
            began_cpu_s = receiving.cpu_s() + time.process_time()
            began_s = time.perf_counter()
            if name == "memcpy":
                _copy(pool, twin, source, target)
            elif name in BARE_LINKS[transport]:
                began_s = receiving.bare_copy(name, pool, source, target)
            else:
                began_s = receiving.push(pool, source, target, "xxh3" if name == "kv" else "none")
            seconds = time.perf_counter() - began_s
            spent_s = receiving.cpu_s() + time.process_time() - began_cpu_s
            if repeat >= 0:
                elapsed_s[name].append(seconds)
                cpu_s[name].append(spent_s)
    labels = {"transport": transport, "shape": shape}
    gib = KV_BYTES / 2**30
    for name, values in elapsed_s.items():
        report.row(name, [gib / value for value in values], "GiB/s", **labels)
        report.row(f"{name}: cpu of both processes", [value / gib for value in cpu_s[name]], "s/GiB", **labels)
    for other in (*BARE_LINKS[transport], "memcpy"):
        for name in ("kv", _PLAIN):
            # Neighbours in time are compared, then the median is taken: the machine's load changes between repeats.
            pairs = zip(elapsed_s[other], elapsed_s[name], strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
            target_ratio = _TARGETS.get((name, other, shape), {}).get(transport)
            report.ratio(f"{name} / {other}, {transport}, {shape}", ratio, target=target_ratio)


def _copy(pool: KvPool, twin: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
    for layer in range(LAYOUT.layer_count):
        from_layer, to_layer = pool.memory[layer], twin.memory[layer]
        if source == sorted(source) and target == sorted(target):
            np.copyto(to_layer[target[0] : target[-1] + 1], from_layer[source[0] : source[-1] + 1])
            continue
        for from_block, to_block in zip(source, target, strict=True):
            np.copyto(to_layer[to_block], from_layer[from_block])


class _ReceivingProcess:
    """The other process, with receivers, and bare links beside them."""

    def __init__(self, control: Connection, transport: str, bare: dict[str, BareSender]) -> None:
        """bare: by name."""
        self._control = control
        self._transport = transport
        self._bare = bare
        self._events: queue.Queue[PushAccepted | PushFailed] = queue.Queue()
        self._senders: dict[str, KvSender] = {}

    def cpu_s(self) -> float:
        """What it has used so far."""
        return float(self._ask("cpu"))  # type: ignore[arg-type]

    def bare_copy(self, name: str, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> float:
        """Sends the blocks over a bare link; returns when that began."""
        self._ask("bare", list(target), name)
        began_s = time.perf_counter()
        self._bare[name].send(pool, source, target)
        return began_s

    def push(self, pool: KvPool, source: Sequence[int], target: Sequence[int], digest: str) -> float:
        """Pushes the blocks and waits for the acceptance; returns when that began."""
        ticket = self._ask("grant", list(target), digest)
        assert isinstance(ticket, Ticket)
        if digest not in self._senders:
            transports = make_transports((self._transport,))
            self._senders[digest] = KvSender(pool, self._events.put, transports=transports, digest=DIGESTS[digest])
        sender = self._senders[digest]
        began_s = time.perf_counter()
        sender.open(ticket)
        for layer in range(LAYOUT.layer_count):
            sender.write(ticket.transfer_id, layer, 0, source)
        sender.finish(ticket.transfer_id, b"")
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, PushAccepted), event
        return began_s

    def close(self) -> None:
        """Ends the connections and the process."""
        for sender in self._senders.values():
            sender.close()
        self._control.send(("end",))
        for bare in self._bare.values():
            bare.close()

    def _ask(self, *question: object) -> object:
        self._control.send(question)
        return self._control.recv()


@contextlib.contextmanager
def _receiving_process(transport: str, pool: KvPool) -> Iterator[_ReceivingProcess]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        control, their_control = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(their_control, transport, folder), daemon=True)
        process.start()
        their_control.close()
        bare = {name: bare_sender(kind, pool, control.recv()) for name, kind in BARE_LINKS[transport].items()}
        receiving = _ReceivingProcess(control, transport, bare)
        try:
            yield receiving
        finally:
            receiving.close()
            process.join(WAIT_S)
            control.close()


def _receive(control: Connection, transport: str, folder: str) -> None:
    """The receiving process: does what it is told, one thing at a time."""
    configure_logs("kv_transfer", "receiver", level="warning")
    pool = KvPool(LAYOUT, POOL_BLOCKS)
    receivers: dict[str, KvReceiver] = {}
    for epoch, (name, digest) in enumerate(DIGESTS.items()):
        address = str(Path(folder) / f"{name}.sock") if transport in PATH_NAMES else "127.0.0.1:0"
        receivers[name] = KvReceiver(
            pool,
            lambda _: None,
            listen=[KvEndpoint(transport, address)],
            epoch=epoch,
            transports=make_transports((transport,)),
            digest=digest,
        )
    bare = {}
    for name, kind in BARE_LINKS[transport].items():
        bare[name] = bare_receiver(kind, pool, folder)
        control.send(bare[name].address)
        bare[name].accept()
    while (order := control.recv())[0] != "end":
        if order[0] == "cpu":
            control.send(time.process_time())
        elif order[0] == "grant":
            control.send(receivers[order[2]].grant(order[1], 1, WAIT_S))
        else:
            control.send("ready")
            bare[order[2]].receive(order[1])
    for receiver in receivers.values():
        receiver.close()
    for link in bare.values():
        link.close()


if __name__ == "__main__":
    run("kv_transfer", measure, description=__doc__)
