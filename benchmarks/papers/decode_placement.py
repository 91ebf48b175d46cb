"""Decode placement: heavy-light against random and against the worst case.

TetriInfer's section 5.2.3 and figure 19, on real services with the timed engine: 2, 4 and 8 decode instances, and for
each of them 32 requests in one burst, half of them heavy in decode (more than 128 tokens). Lengths are forced, so the
prefill instances know them, as with a perfect predictor. The slowest instance is the one whose last token comes last.
"""

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks.support.bursts import LATENCY_MODEL, PAPER, send, timed_stack
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.domain.view import Phase
from kaveri.loadgen.driver import LoadRun
from kaveri.loadgen.report import columns_of
from kaveri.policy.placement import DecodePlacementPolicy
from kaveri.workload.requests import HEAVY_OUTPUT_TOKENS, PlannedRequest, WorkloadClass, draw_lengths
from kaveri.workload.resource_time import busy_spans, covered_s

POLICIES = (DecodePlacementPolicy.HEAVY_LIGHT, DecodePlacementPolicy.RANDOM, DecodePlacementPolicy.IMBALANCE)
REQUESTS_PER_INSTANCE = 32
MAX_BATCH = 256
"""vLLM's default, which the paper's engine is."""
KV_CACHE_MEMORY = 9000 * 8192
"""144 000 tokens, in the timed engine's own small blocks: what two A100 of 80 GB hold beside OPT-13B's weights."""
GAP_S = 0.001


@dataclass(frozen=True)
class PlacedRequest:
    """The results of one burst."""

    total_s: float
    """From the first request's landing on a decode instance to the last token of all."""
    slowest_busy_s: float
    """How long the slowest instance decoded."""
    slowest_heavy: int
    """Heavy requests there."""
    slowest_light: int
    most_heavy: int
    """Heavy requests on the instance that got the most of them."""


def plan(instances: int, most_output_tokens: int, seed: int) -> list[PlannedRequest]:
    """The burst: light prompts, half of the answers heavy, in random order."""
    rng = random.Random(seed)
    half = instances * REQUESTS_PER_INSTANCE // 2
    lengths = [
        entry
        for workload in (WorkloadClass.LPHD, WorkloadClass.LPLD)
        for entry in draw_lengths(workload, half, rng, 512, most_output_tokens)
    ]
    rng.shuffle(lengths)
    return [PlannedRequest(number, number * GAP_S, entry) for number, entry in enumerate(lengths)]


def summed_up(run: LoadRun) -> PlacedRequest:
    heavy: dict[str, int] = {}
    light: dict[str, int] = {}
    for record in run.records:
        assert record.server is not None
        counts = heavy if record.received_tokens > HEAVY_OUTPUT_TOKENS else light
        counts[record.server.decode_instance_id] = counts.get(record.server.decode_instance_id, 0) + 1
    spans = {
        instance_id: phases[Phase.DECODE]
        for instance_id, phases in busy_spans(columns_of(run)).items()
        if Phase.DECODE in phases
    }
    ends_s = {instance_id: float(of_one[:, 1].max()) for instance_id, of_one in spans.items()}
    slowest = max(ends_s, key=ends_s.__getitem__)
    return PlacedRequest(
        total_s=ends_s[slowest] - min(float(of_one[:, 0].min()) for of_one in spans.values()),
        slowest_busy_s=covered_s(spans[slowest]),
        slowest_heavy=heavy.get(slowest, 0),
        slowest_light=light.get(slowest, 0),
        most_heavy=max(heavy.values()),
    )


@contextlib.asynccontextmanager
async def policy_client(policy: DecodePlacementPolicy, instances: int, report: Report) -> AsyncIterator[AsyncClient]:
    """A client of a stack with one policy. The stack has served a short burst, which is not counted."""
    async with (
        timed_stack(
            report,
            f"{policy} on {instances}",
            prefill_count=instances // 2,
            decode_count=instances,
            prefill_flags=("--decode-placement", policy),
            decode_flags=("--max-batch", str(MAX_BATCH), "--kv-cache-memory", str(KV_CACHE_MEMORY)),
        ) as stack,
        AsyncClient(stack.target) as client,
    ):
        await send(client, plan(2, 129, 0)[::8], 0, report)
        yield client


async def placed(
    instances: int, most_output_tokens: int, repeats: int, report: Report
) -> dict[DecodePlacementPolicy, list[PlacedRequest]]:
    """Every burst under every policy in turn, so that what is compared ran within the same minutes.

    All stacks run side by side; those that serve no burst are idle.
    """
    taken: dict[DecodePlacementPolicy, list[PlacedRequest]] = {policy: [] for policy in POLICIES}
    async with contextlib.AsyncExitStack() as running:
        clients = {
            policy: await running.enter_async_context(policy_client(policy, instances, report)) for policy in POLICIES
        }
        for repeat in range(1, repeats + 1):
            requests = plan(instances, most_output_tokens, 100 * instances + repeat)
            for policy, client in clients.items():
                taken[policy].append(summed_up(await send(client, requests, repeat, report)))
    return taken


async def measure_async(options: Options, report: Report) -> None:
    repeats, most_output_tokens = options.choose(2, 1), options.choose(384, 160)
    report.workload = {
        "engine": f"timed, {LATENCY_MODEL}",
        "requests_per_decode_instance": REQUESTS_PER_INSTANCE,
        "prompt_tokens": [16, 512],
        "heavy_output_tokens": [129, most_output_tokens],
        "light_output_tokens": [8, 128],
        "prefill_instances": "half the number of decode instances",
    }
    for instances in options.choose((2, 4, 8), (4,)):
        found = await placed(instances, most_output_tokens, repeats, report)
        for policy in POLICIES:
            labels = {"policy": policy.value, "instances": instances}
            report.row("total decode time", [each.total_s for each in found[policy]], "s", **labels)
            report.row("slowest: decode time", [each.slowest_busy_s for each in found[policy]], "s", **labels)
            report.row("slowest: heavy", [each.slowest_heavy for each in found[policy]], "requests", **labels)
            report.row("slowest: light", [each.slowest_light for each in found[policy]], "requests", **labels)
            report.row("most heavy of an instance", [each.most_heavy for each in found[policy]], "requests", **labels)
        ours = found[DecodePlacementPolicy.HEAVY_LIGHT]
        for other in POLICIES[1:]:
            pairs = zip(found[other], ours, strict=True)
            value = statistics.median(theirs.total_s / our.total_s for theirs, our in pairs)
            report.ratio(f"total decode time, {other} / heavy-light, {instances} instances", value)
    report.note(
        f"{PAPER}, figure 19: heavy-light takes the least total decode time, imbalance the most, and the slowest "
        "instance has the fewest heavy requests under heavy-light. The figure gives no numbers"
    )
    report.note(
        "in this latency model of two A100 a step of 32 requests takes 19 ms and one of 64 24 ms, so that the total is "
        "first of all the longest answer's, wherever it is; the paper's V100 pay more for a larger batch and longer "
        "contexts, and so more for imbalance"
    )
    report.note(
        "a prefill instance knows heavy and light counts from heartbeats and its own placements of the last ones; in a "
        "burst the placements of the other prefill instances reach it late"
    )


def measure(options: Options, report: Report) -> None:
    """Each policy on a stack of its own, with the same bursts, which take turns."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("papers.decode_placement", measure, description=__doc__)
