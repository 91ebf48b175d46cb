"""Shared by the scheduling benchmarks: a stack of real services on the timed engine, and bursts of requests to it.

The timed engine takes the time of OPT-13B on two A100 (DistServe's fit), the model and the tensor parallelism of
TetriInfer's own measurements (arXiv 2401.11181, section 5.2; there on V100).
"""

import contextlib
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.support.harness import Report
from kaveri import AsyncClient
from kaveri.loadgen.driver import LoadRun, RequestSettings, run_open
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.workload.requests import PlannedRequest

LATENCY_MODEL = "opt-13b-a100-tp2"
PAPER = "TetriInfer (arXiv 2401.11181)"
SHAREGPT_PROMPT_TOKENS = (14, 26, 45, 79, 134, 226, 351, 472, 589, 702, 822, 935, 1062, 1209, 1378, 1626)
"""Prompt tokens of ShareGPT at the middle of each sixteenth: requests of at most 2048 tokens in all, from the lengths
published with sarathi-serve (sharegpt_8k_filtered_stats_llama2_tokenizer.csv, Apache-2.0)."""
_TIMEOUT_S = 300.0
_MAX_IN_FLIGHT = 4096
_TOO_SLOW = "latency_model_missed"
_LATE_S = 0.1


@contextlib.asynccontextmanager
async def timed_stack(report: Report, name: str = "", **settings: Any) -> AsyncIterator[LocalStack]:
    """A stack on the timed engine while the context lasts. settings: StackConfig's.

    name: what is measured on it, for a note when an instance could not keep the latency model's time.
    """
    defaults: dict[str, Any] = {"engine": "timed", "latency_model": LATENCY_MODEL, "restart": False}
    config = StackConfig.of(**defaults | {"drain_timeout_s": 2.0} | settings)
    async with LocalStack(config) as stack:
        yield stack
        logs = {name: stack.process(name).log_path.read_text(errors="replace") for name in stack.instance_ids}
    slow = [instance_id for instance_id, log in logs.items() if _TOO_SLOW in log]
    if slow:
        where = f"{name}: " if name else ""
        report.note(f"{where}this machine was too slow for the latency model at {', '.join(slow)}")


async def send(
    client: AsyncClient, requests: Sequence[PlannedRequest], seed: int, report: Report, natural_length: bool = False
) -> LoadRun:
    """Sends requests at their times and returns when all are answered. RuntimeError when one is not.

    seed: of made-up prompts.
    """
    (info,) = await client.list_models()
    settings = RequestSettings(
        model=None, vocab_size=info.vocab_size, seed=seed, timeout_s=_TIMEOUT_S, natural_length=natural_length
    )
    run = await run_open(client, requests, settings, _MAX_IN_FLIGHT, lambda _: None)
    failed = [record for record in run.records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(run.records)} requests failed, the first: {failed[0].reason}")
    late_s = max(record.sent_s - record.due_s for record in run.records)
    if late_s > _LATE_S:
        report.note(f"the client sent a request {late_s:.2f} s late")
    return run


def read_metric(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's samples, those with `labels`, at a service's metrics port. Blocks for a moment.

    0 when the metric is there and no sample has the labels yet.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    samples = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    if not samples:
        raise RuntimeError(f"no metric {name} at port {port}")
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(text in line for text in wanted))
