"""Speed of a KV push between two processes: against memory copies, and against a bare link moving the same bytes.

Each round moves the same bytes in every way, one after the other in rotating order, so ratios compare neighbours in
time:

    kv                 KvSender to KvReceiver, from open() to PushAccepted
    kv, no digest      the same without the digests, which no bare link takes
    bare               the same kind of link with nothing around it (for tls: plain tcp); see bare_links.py
    grpc               gRPC bytes, beside tcp
    memcpy             beside shm, of contiguous blocks: np.copyto, a layer at a time, within one process
    gather + scatter   beside shm, of scattered blocks: into a buffer of 512 KiB, and from there to their places
    copy of each       beside shm, of scattered blocks: np.copyto, a block at a time, from place to place

One thing varies at a time: bytes from 1 MiB to 1 GiB, at 16 KiB a block and contiguous; blocks from 4 KiB to
contiguous, at 64 MiB. "contiguous" is one run per layer on both sides, the others are in random order on both sides.
"""

import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.local_copies import EACH, GATHER_SCATTER, MEMCPY, LocalCopies
from benchmarks.support.receiving_process import ReceivingProcess, receiving_process
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.telemetry.logs import configure_logs

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYER_COUNT = 8
HEAD_DIMS = {16 * KIB: 32, 4 * KIB: 8, 64 * KIB: 128}
"""By bytes of a block."""
MAIN_BLOCK_BYTES = 16 * KIB
MAIN_BYTES = 64 * MIB
SIZES = (MIB, 16 * MIB, MAIN_BYTES, GIB)
REPEATS = 3

BARE_KINDS = {
    "tcp": ("tcp", "grpc"),
    "tls": ("tcp",),
    "unix": ("unix",),
    "shm": (),
    "nixl": ("nixl",),
    "gloo": ("gloo",),
}
"""For each transport: what is measured beside it, as its kind in bare_links.py."""

_PLAIN = "kv, no digest"
_TARGETS = {"bare": 0.9, MEMCPY: 0.85, GATHER_SCATTER: 0.8}
"""Least ratio to each."""


@dataclass(frozen=True)
class TransferCase:
    """What is moved."""

    kv_bytes: int
    block_bytes: int
    is_contiguous: bool

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.kv_bytes // GIB} GiB" if self.kv_bytes >= GIB else f"{self.kv_bytes // MIB} MiB"

    @property
    def shape(self) -> str:
        """In words."""
        return "contiguous" if self.is_contiguous else f"{self.block_bytes // KIB} KiB"

    @property
    def is_main(self) -> bool:
        """Whether its ratios are results: short transfers, and odd blocks, are figures."""
        return self.kv_bytes >= MAIN_BYTES and self.block_bytes == MAIN_BLOCK_BYTES

    def rounds(self) -> int:
        """Of a repeat: what is short is moved more often."""
        return max(1, min(8, 192 * MIB // self.kv_bytes))

    def places(self, block_count: int, seed: int) -> list[int]:
        """Blocks of a pool of `block_count` per layer."""
        count = self.kv_bytes // LAYER_COUNT // self.block_bytes
        if self.is_contiguous:
            return list(range(count))
        return np.random.default_rng(seed).permutation(block_count)[:count].tolist()


def measure(options: Options, report: Report) -> None:
    """All transports, the cases of one size of block after the other."""
    configure_logs("kv_transfer", "benchmark", level="warning")
    sizes = options.choose(SIZES, (MIB, MAIN_BYTES))
    cases = [TransferCase(size, MAIN_BLOCK_BYTES, is_contiguous) for is_contiguous in (False, True) for size in sizes]
    cases += [TransferCase(MAIN_BYTES, block_bytes, False) for block_bytes in options.choose((4 * KIB, 64 * KIB), ())]
    report.workload = {
        "layers": LAYER_COUNT,
        "cases": [f"{case.size}, {case.shape}" for case in cases],
        "repeats": REPEATS,
        "rounds of a repeat": {case.size: case.rounds() for case in cases},
    }
    missing = {}
    if importlib.util.find_spec("nixl_cu13") is None:
        missing["nixl"] = "nixl-cu13 is not installed"
    if shutil.which("openssl") is None:
        missing["tls"] = "there is no openssl command to make certificates with"
    for transport, reason in missing.items():
        report.note(f"{transport} was not measured: {reason}")
    transports = [name for name in BARE_KINDS if name not in missing]
    for block_bytes in dict.fromkeys(case.block_bytes for case in cases):
        ours = [case for case in cases if case.block_bytes == block_bytes]
        pool = _filled_pool(block_bytes, max(case.kv_bytes for case in ours))
        for transport in transports:
            with receiving_process(transport, BARE_KINDS[transport], pool) as receiving:
                copies = LocalCopies(pool) if transport == "shm" else None
                # Ciphers make a gibibyte take as long as all the others together.
                for case in ours if transport != "tls" else [case for case in ours if case.kv_bytes < GIB]:
                    _measure_case(report, case, transport, pool.block_count, receiving, copies)
    report.note(
        f"the two processes share {os.cpu_count()} cores with whatever else runs; a digest has no core of its own"
    )


def _measure_case(
    report: Report,
    case: TransferCase,
    transport: str,
    block_count: int,
    receiving: ReceivingProcess,
    copies: LocalCopies | None,
) -> None:
    source, target = case.places(block_count, 1), case.places(block_count, 2)
    references = ["grpc" if kind == "grpc" else "bare" for kind in BARE_KINDS[transport]]
    if copies is not None:
        references += [MEMCPY] if case.is_contiguous else [GATHER_SCATTER, EACH]
    names = ("kv", _PLAIN, *references)
    elapsed_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    rounds = case.rounds()
    for number in range(-1, REPEATS * rounds):  # the first one warms up
        for name in names if number % 2 else reversed(names):
            began_cpu_s, began_s = receiving.cpu_s(), time.perf_counter()
            if name in ("kv", _PLAIN):
                began_s = receiving.push(source, target, "xxh3" if name == "kv" else "none")
            elif name in ("bare", "grpc"):
                began_s = receiving.bare_copy("grpc" if name == "grpc" else BARE_KINDS[transport][0], source, target)
            else:
                assert copies is not None
                copies.copy(name, source, target)
            seconds = time.perf_counter() - began_s
            if number >= 0:
                elapsed_s[name].append(seconds)
                cpu_s[name].append(receiving.cpu_s() - began_cpu_s)
    labels = {"transport": transport, "bytes": case.size, "blocks": case.shape}
    gib = case.kv_bytes / GIB
    for name in names:
        report.row(name, [gib / seconds for seconds in _medians(elapsed_s[name], rounds)], "GiB/s", **labels)
        cpu_s_per_gib = [seconds / gib for seconds in _medians(cpu_s[name], rounds)]
        report.row(f"{name}: cpu of both", cpu_s_per_gib, "s/GiB", **labels)
    for name, other in [*((name, other) for name in ("kv", _PLAIN) for other in references), ("kv", _PLAIN)]:
        # Neighbours in time are compared, then the median is taken: the machine's load changes between rounds.
        ratios = [theirs / ours for theirs, ours in zip(elapsed_s[other], elapsed_s[name], strict=True)]
        text = f"{name} / {other}"
        report.row(text, _medians(ratios, rounds), "ratio", **labels)
        if case.is_main:
            where = f"{transport}, {case.size}, {case.shape}"
            target_ratio = None if transport == "tls" else _TARGETS.get(other)
            report.ratio(f"{text}: {where}", statistics.median(ratios), target_ratio)


def _medians(values: Sequence[float], rounds: int) -> list[float]:
    """One for each repeat."""
    return [statistics.median(values[start : start + rounds]) for start in range(0, len(values), rounds)]


def _filled_pool(block_bytes: int, kv_bytes: int) -> KvPool:
    layout = KvLayout("benchmark", LAYER_COUNT, 16, kv_head_count=4, head_dim=HEAD_DIMS[block_bytes], dtype="float32")
    assert layout.block_bytes == block_bytes
    pool = KvPool(layout, kv_bytes // LAYER_COUNT // block_bytes * (1 if kv_bytes == GIB else 2))
    pool.memory[:] = np.random.default_rng(0).integers(0, 256, pool.memory.shape[1:], np.uint8)
    return pool


if __name__ == "__main__":
    run("kv.transfer", measure, description=__doc__)
