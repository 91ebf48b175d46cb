"""How fast KV crosses between a GPU and the pool in host memory, and what that costs a prefill step.

Down: blocks that were computed, before they are pushed. Up: blocks that have landed. Both of scattered blocks, all
layers of a model of the shape of Llama 3.2 1B, beside one copy of as many bytes between the device and pinned memory.
Then chunks of one prompt on the runner, with the copies that a prefill instance makes and without. Needs a GPU.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.support.harness import Options, Report, run
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.attention import PagedMemory
from kaveri.engine.transformers.loading import load_runner
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool

BLOCK_TOKENS = 16
LAYOUT = KvLayout("mirror", layer_count=16, block_tokens=BLOCK_TOKENS, kv_head_count=8, head_dim=64, dtype="bfloat16")
POOL_BLOCKS = 4096
TOKENS = (16, 512, 8192)
CHUNKS = (128, 512, 2048)
REPEATS = 20


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    if not torch.cuda.is_available():
        report.skip("there is no GPU")
        return
    torch.set_num_threads(1)
    repeats = options.choose(REPEATS, 5)
    report.workload = {
        "model": Path(options.model).name,
        "layers": LAYOUT.layer_count,
        "block_bytes": LAYOUT.block_bytes,
        "tokens": list(TOKENS),
        "chunks": list(CHUNKS),
        "threads": 1,
    }
    _copies(report, repeats)
    _chunks(report, options.model, repeats)


def _copies(report: Report, repeats: int) -> None:
    memory = PagedMemory(KvPool(LAYOUT, POOL_BLOCKS), torch.device("cuda"))
    for tokens in TOKENS:
        block_ids = random.Random(tokens).sample(range(POOL_BLOCKS), tokens // BLOCK_TOKENS)
        copied_bytes = len(block_ids) * LAYOUT.layer_count * LAYOUT.block_bytes
        there = torch.empty(copied_bytes, dtype=torch.uint8, device="cuda")
        here = torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=True)
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "down": (lambda ids=block_ids: memory.mirror_all(ids), lambda h=here, t=there: h.copy_(t)),  # type: ignore[misc]
            "up": (lambda ids=block_ids: memory.landed(ids), lambda h=here, t=there: t.copy_(h)),  # type: ignore[misc]
        }
        for way, (ours, plain) in ways.items():
            taken = {"blocks": _seconds(ours, repeats), "one pinned copy": _seconds(plain, repeats)}
            for name, seconds in taken.items():
                report.row(f"{way}, {name}", [copied_bytes / each / 1e9 for each in seconds], "GB/s", tokens=tokens)
            ratio = statistics.median(taken["one pinned copy"]) / statistics.median(taken["blocks"])
            report.ratio(f"{way}, blocks / one pinned copy, {tokens} tokens", ratio)


def _chunks(report: Report, model: str, repeats: int) -> None:
    runner = load_runner(model, "bfloat16", "cuda", None, BLOCK_TOKENS)
    runner.attach(KvPool(runner.layout, 2 * max(CHUNKS) // BLOCK_TOKENS))
    for tokens in CHUNKS:
        piece = SequenceSlice(
            token_ids=[1 + 7 * index % 1000 for index in range(tokens)],
            start=0,
            block_ids=range(runner.layout.block_count(tokens)),
            draw=True,
            draw_index=0,
            params=ResolvedParams(temperature=0.0),
        )
        bare = _seconds(lambda piece=piece: runner.run([piece], None), repeats)  # type: ignore[misc]
        pushed = _seconds(lambda piece=piece: runner.run([piece], _ignore), repeats)  # type: ignore[misc]
        report.row("chunk, nothing copied", [1e3 * each for each in bare], "ms", tokens=tokens)
        report.row("chunk, copied layer by layer", [1e3 * each for each in pushed], "ms", tokens=tokens)
        ratio = statistics.median(pushed) / statistics.median(bare)
        report.ratio(f"chunk, copied / not, {tokens} tokens", ratio)


def _seconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Of each call, after three that are not counted; the device is waited for."""
    taken_s = []
    for number in range(repeats + 3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        action()
        torch.cuda.synchronize()
        if number >= 3:
            taken_s.append(time.perf_counter() - began_s)
    return taken_s


def _ignore(layer: int) -> None:
    """A listener that does nothing."""


if __name__ == "__main__":
    run("engine.mirror", measure, description=__doc__)
