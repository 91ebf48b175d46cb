"""What a slow link adds to a request: DéjàVu's table 6 (arXiv 2403.01876, appendix H.4), on the real stack.

The paper simulates BLOOM-176B: 3.1 s for a microbatch's prompts, 10.7 GB of KV, links of 100 down to 1 Gbps; the extra
time is max(0, transfer - prompt). Here router, prefill and decode are real processes that push over emulated links;
prefill takes the paper's prompt time and a token counts for the paper's KV, both at a tenth (SCALE), so their ratios
are the paper's. The prompt goes out layer by layer and chunk by chunk while it is computed (timed engine: compute off
the CPU).

    extra = (second token - first token) with the link - the same without a link

Modelled: the prompt's time and the link's time. Real: everything else, from the push of a layer to the second token at
the caller.
"""

import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.single_requests import ask
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

SCALE = 0.1
PAPER_PROMPT_S = 3.1
PAPER_EXTRA_S = {100: 0.0, 80: 0.0, 60: 0.0, 40: 0.0, 20: 1.18, 10: 5.46, 1: 82.5}
"""By bandwidth in Gbps."""
PROMPT_TOKENS = 1024
CHUNK_TOKENS = 64
TOKEN = "1020KiB"
"""KV that a token counts for on the link: 1.07 GB a prompt."""
LAYERS = FakeModel().layer_count
PIECES = PROMPT_TOKENS // CHUNK_TOKENS * LAYERS
DECODE_STEP_S = 0.02
ANSWER_TOKENS = 4
WARM_UP_TOKENS = 64


def measure(options: Options, report: Report) -> None:
    """One request at a time."""
    asyncio.run(_measure(options, report))


async def _measure(options: Options, report: Report) -> None:
    repeats = options.choose(3, 2)
    bandwidths = options.choose(tuple(PAPER_EXTRA_S), (100, 20, 10))
    prompt_s = SCALE * PAPER_PROMPT_S
    report.workload = {
        "scale": SCALE,
        "prompt_s": prompt_s,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "layers": LAYERS,
        "token_on_the_link": TOKEN,
        "decode_step_s": DECODE_STEP_S,
        "repeats": repeats,
        "warm_up": f"one prompt of {WARM_UP_TOKENS} tokens per bandwidth",
    }
    with tempfile.TemporaryDirectory() as folder:
        latency_model = Path(folder) / "latency.json"
        latency_model.write_text(json.dumps(_latency_model(prompt_s)))
        gaps_s = await _gaps(latency_model, (None, *bandwidths), repeats)
    without_s = statistics.median(gaps_s.pop(None))
    report.row("first to second token", [1e3 * without_s], "ms", link="none")
    measured, modelled = [], []
    for gbps, values in gaps_s.items():
        assert gbps is not None
        transfer_s = parse_link_speed(_link(gbps)).transfer_s(PROMPT_TOKENS, 1)
        extra_s = statistics.median(values) - without_s
        paper_model_s = max(0.0, transfer_s - prompt_s)
        labels = {"link_gbps": gbps, "transfer_ms": round(1e3 * transfer_s, 1)}
        report.row("extra time", [1e3 * (value - without_s) for value in values], "ms", **labels)
        report.row("max(0, transfer - prompt)", [1e3 * paper_model_s], "ms", **labels)
        measured.append(extra_s)
        modelled.append(paper_model_s)
        report.compare(
            f"table 6, {gbps} Gbps: extra time in prompt times",
            f"{PAPER_EXTRA_S[gbps] / PAPER_PROMPT_S:.3f}",
            f"{extra_s / prompt_s:.3f}",
            f"simulated there; here the last of {PIECES} pieces ({transfer_s / PIECES / prompt_s:.3f}) has nothing to "
            "hide behind",
        )
    pairs = list(zip(measured, modelled, strict=True))
    slope = sum(ours * model for ours, model in pairs) / sum(model * model for _, model in pairs)
    mean_s = statistics.mean(measured)
    unexplained = sum((ours - model) ** 2 for ours, model in pairs) / sum((ours - mean_s) ** 2 for ours in measured)
    furthest_s = max(abs(ours - model) for ours, model in pairs)
    report.ratio("R2 of max(0, transfer - prompt)", 1 - unexplained)
    report.ratio("slope of extra time over max(0, transfer - prompt)", slope)
    report.ratio("furthest from max(0, transfer - prompt), in prompt times", furthest_s / prompt_s)
    for gbps, extra_s in zip(gaps_s, measured, strict=True):
        report.ratio(f"extra time in prompt times, {gbps} Gbps", extra_s / prompt_s)
    report.note(
        f"a push of {PIECES} pieces leaves at least transfer / {PIECES} exposed: max(transfer / n, transfer - prompt "
        "* (1 - 1 / n)) with n pieces is what this pipeline can reach at best"
    )


def _link(gbps: float | None) -> str:
    return "" if gbps is None else f"{gbps}Gbps,{TOKEN}/token"


async def _gaps(
    latency_model: Path, bandwidths: Sequence[float | None], repeats: int
) -> dict[float | None, list[float]]:
    """Seconds between the first and the second token, of each repeat, by bandwidth in Gbps.

    Bandwidths take turns, so that what is compared ran within the same minutes. All stacks run side by side; those that
    serve no request are idle.
    """
    gaps_s: dict[float | None, list[float]] = {gbps: [] for gbps in bandwidths}
    async with contextlib.AsyncExitStack() as running:
        clients = {
            gbps: await running.enter_async_context(_linked_client(latency_model, _link(gbps))) for gbps in bandwidths
        }
        (info,) = await clients[bandwidths[0]].list_models()
        for client in clients.values():
            await ask(client, WARM_UP_TOKENS, ANSWER_TOKENS, info.vocab_size, seed=0)
        for repeat in range(repeats):
            for gbps, client in clients.items():
                answer = await ask(client, PROMPT_TOKENS, ANSWER_TOKENS, info.vocab_size, seed=1 + repeat)
                gaps_s[gbps].append(answer.second_s - answer.first_s)
    return gaps_s


@contextlib.asynccontextmanager
async def _linked_client(latency_model: Path, link: str) -> AsyncIterator[AsyncClient]:
    """A client of a stack that pushes over an emulated link; empty: over an unlimited one."""
    link_flags = ("--kv-link", link) if link else ()
    config = StackConfig.of(
        engine="timed",
        latency_model=str(latency_model),
        prefill_count=1,
        decode_count=1,
        max_model_len=2 * PROMPT_TOKENS,
        prefill_flags=("--chunk-tokens", str(CHUNK_TOKENS), "--kv-transports", "tcp", *link_flags),
        decode_flags=("--kv-transports", "tcp"),
        log_level="error",
    )
    async with LocalStack(config) as stack, AsyncClient(stack.target) as client:
        yield client


def _latency_model(prompt_s: float) -> dict[str, object]:
    return {
        "name": "table-6",
        "source": "DéjàVu, table 6: a prompt time, spread evenly over its tokens",
        "prefill": {"step_s": 0.0, "token_s": prompt_s / PROMPT_TOKENS, "token_squared_s": 0.0},
        "decode": [{"min_batch": 1, "step_s": DECODE_STEP_S, "context_token_s": 0.0, "request_s": 0.0}],
    }


if __name__ == "__main__":
    run("papers.link_bandwidth", measure, description=__doc__)
