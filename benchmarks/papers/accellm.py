"""AcceLLM's comparison (arXiv 2411.05555, section 5) in simulations: 4 instances of Llama-2 70B on four H100 each.

--data FOLDER, which holds perf_model.csv (Splitwise's simulator) anywhere below it: measured seconds of Llama-2 70B on
H100 with TP 4, fitted by lines over prompt tokens and over the batch. What a token of context adds is its KV over the
memory's bandwidth (327,680 bytes, 4 x 3.35 TB/s). Lengths are table 2's, uniform; arrivals are Poisson.

    AcceLLM    two pairs. Each request's KV is at both instances of a pair. While prompts wait one of the two computes
               them and the other decodes all; else each decodes half. An instance never does both in one step. A
               request goes to the pair that holds the fewest tokens. Simulated here: services do not balance by copies
    Splitwise  1 prefill and 3 decode instances, the least loaded of each: kaveri.simulator
    vLLM       4 instances that compute prompts beside their batch, requests dealt out in turn: the baseline `beside`

Links take no time but the pushes of Splitwise.
"""

import csv
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.papers.distserve import find_file
from benchmarks.support.harness import Options, Report, run
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import BaselineSpec, simulate_baseline
from kaveri.simulator.simulate import simulate
from kaveri.simulator.spec import ClusterSpec, DecodeSpec, PoolSpec, PrefillSpec, RouterSpec
from kaveri.simulator.timeline import Timeline
from kaveri.workload.requests import PlannedRequest, RequestLengths, gamma_arrivals, plan_requests
from kaveri.workload.run_columns import RunColumns

INSTANCES = 4
KV_TOKEN_BYTES = 2 * 2 * 80 * 8 * 128
MEMORY_BYTES_PER_S = 4 * 3.35e12
LINK_BYTES_PER_S = 900e9
POOL_BLOCKS = int((4 * 80 * 2**30 * 0.9 - 140e9) / KV_TOKEN_BYTES / 16)
STEP_TOKENS = 2048
"""Most prompt tokens of a step, in all systems."""
LENGTHS = {"light": (20, 500), "mixed": (20, 1000), "heavy": (500, 1000)}
RATES = (4.0, 6.0, 8.0, 10.0)
OVERLOAD_PER_S = 30.0
"""More than any of the systems answers."""
PAPER_EXTRA_GB = {4.0: 1.0, 8.0: 3.5, 12.0: 5.0}


def fitted(data: Path) -> LatencyModel:
    """Llama-2 70B on H100, TP 4."""
    prompts: dict[int, list[float]] = {}
    tokens: dict[int, list[float]] = {}
    with find_file(data, "perf_model.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) != ("llama2-70b", "h100-80gb", "4"):
                continue
            if int(row["batch_size"]) == 1:
                prompts.setdefault(int(row["prompt_size"]), []).append(float(row["prompt_time"]) / 1000)
            tokens.setdefault(int(row["batch_size"]), []).append(float(row["token_time"]) / 1000)
    token_s, prompt_step_s = np.polyfit(list(prompts), [statistics.fmean(some) for some in prompts.values()], 1)
    context_token_s = KV_TOKEN_BYTES / MEMORY_BYTES_PER_S
    # Measured with 512 tokens of prompt and 128 of answer.
    steps = [statistics.fmean(some) - batch * 576 * context_token_s for batch, some in tokens.items()]
    request_s, step_s = np.polyfit(list(tokens), steps, 1)
    decode = DecodeLatency(
        min_batch=1, step_s=float(step_s), context_token_s=context_token_s, request_s=max(0.0, float(request_s))
    )
    prefill = PrefillLatency(step_s=max(0.0, float(prompt_step_s)), token_s=float(token_s), token_squared_s=0.0)
    return LatencyModel(name="llama2-70b-h100-tp4", source="Splitwise", prefill=prefill, decode=(decode,))


class PairedRequest:
    """A request whose KV is at both instances of a pair."""

    __slots__ = ("drawn", "first_s", "last_s", "number", "output", "prompt")

    def __init__(self, number: int, lengths: RequestLengths) -> None:
        self.number = number
        self.prompt = lengths.prompt_tokens
        self.output = lengths.output_tokens
        self.drawn = 0
        self.first_s = self.last_s = float("nan")


class InstancePair:
    """Two instances that hold the same KV."""

    def __init__(self, timeline: Timeline, latency: LatencyModel, gaps_s: list[float]) -> None:
        self._timeline = timeline
        self._latency = latency
        self._gaps_s = gaps_s
        self._waiting: deque[PairedRequest] = deque()
        self._running: list[PairedRequest] = []
        self._prompts: list[list[PairedRequest]] = [[], []]
        """Of the steps under way, by instance."""
        self._stepping: list[list[PairedRequest]] = [[], []]

    @property
    def held_tokens(self) -> int:
        """Of prompts and answers here."""
        here = (*self._waiting, *self._running, *self._prompts[0], *self._prompts[1])
        return sum(one.prompt + one.drawn for one in here)

    def take(self, request: PairedRequest) -> None:
        """A request has come."""
        self._waiting.append(request)
        self._begin_idle()

    def _begin_idle(self) -> None:
        for number in (0, 1):
            if not (self._prompts[number] or self._stepping[number]):
                self._begin(number)

    def _begin(self, number: int) -> None:
        partner = 1 - number
        if self._waiting and not self._prompts[partner]:
            taken, tokens = [self._waiting.popleft()], 0
            tokens = taken[0].prompt
            while self._waiting and tokens + self._waiting[0].prompt <= STEP_TOKENS:
                tokens += self._waiting[0].prompt
                taken.append(self._waiting.popleft())
            self._prompts[number] = taken
            step_s = self._latency.step_s([(0, one.prompt) for one in taken])
        else:
            other = self._stepping[partner]
            free = [one for one in self._running if one not in other]
            if not self._prompts[partner]:
                # Both decode: each its half, those first that have waited longest.
                free.sort(key=lambda one: one.last_s)
                free = free[: -(-len(self._running) // 2)]
            if not free:
                return
            self._stepping[number] = free
            step_s = self._latency.mixed_step_s([], len(free), sum(one.prompt + one.drawn for one in free))
        self._timeline.after(step_s, self._over, number)

    def _over(self, number: int) -> None:
        now_s = self._timeline.now_s
        for one in self._prompts[number]:
            one.first_s = now_s
            self._draw(one, now_s)
            if one.drawn < one.output:
                self._running.append(one)
        for one in self._stepping[number]:
            self._gaps_s.append(now_s - one.last_s)
            self._draw(one, now_s)
        if any(one.drawn == one.output for one in self._stepping[number]):
            self._running = [one for one in self._running if one.drawn < one.output]
        self._prompts[number], self._stepping[number] = [], []
        self._begin_idle()

    def _draw(self, one: PairedRequest, now_s: float) -> None:
        one.drawn += 1
        one.last_s = now_s


class SystemRun:
    """What a run has brought."""

    def __init__(
        self, ttft_s: Sequence[float], jct_s: Sequence[float], gaps: tuple[float, float], last_s: float
    ) -> None:
        """gaps: the 99th percentile, and the longest."""
        self.ttft_s = statistics.fmean(ttft_s)
        self.jct_s = statistics.fmean(jct_s)
        self.gap_p99_s, self.gap_most_s = gaps
        self.last_s = last_s
        self.jcts_s = jct_s


def pairs(latency: LatencyModel) -> Callable[[Sequence[PlannedRequest]], SystemRun]:
    def serve(requests: Sequence[PlannedRequest]) -> SystemRun:
        timeline, gaps_s = Timeline(), list[float]()
        both = [InstancePair(timeline, latency, gaps_s) for _ in range(INSTANCES // 2)]
        held = [PairedRequest(one.number, one.lengths) for one in requests]

        def send(number: int) -> None:
            min(both, key=lambda pair: pair.held_tokens).take(held[number])

        for number, one in enumerate(requests):
            timeline.at(one.arrival_s, send, number)
        timeline.run_until(float("inf"))
        assert all(one.drawn == one.output for one in held)
        ttft_s = [one.first_s - due.arrival_s for one, due in zip(held, requests, strict=True)]
        jct_s = [one.last_s - due.arrival_s for one, due in zip(held, requests, strict=True)]
        gaps = (float(np.quantile(gaps_s, 0.99)), max(gaps_s))
        return SystemRun(ttft_s, jct_s, gaps, max(one.last_s for one in held))

    return serve


def splitwise(latency: LatencyModel) -> Callable[[Sequence[PlannedRequest]], SystemRun]:
    pool = PoolSpec(
        latency=latency, total_blocks=POOL_BLOCKS, chunk_tokens=STEP_TOKENS, max_batch=256, max_model_len=4096
    )
    spec = ClusterSpec(
        prefill_count=1,
        decode_count=INSTANCES - 1,
        prefill=PrefillSpec(
            engine=pool, max_queue=100_000, decode_placement=DecodePlacementPolicy.LEAST_LOADED, layer_count=80
        ),
        decode=DecodeSpec(engine=pool),
        router=RouterSpec(placement_policy=PlacementPolicy.LEAST_LOADED, lengths_known=False),
        link=LinkSpeed(LINK_BYTES_PER_S, token_bytes=KV_TOKEN_BYTES),
    )
    return lambda requests: _summed_up(simulate(spec, requests).columns())


def vllm(latency: LatencyModel) -> Callable[[Sequence[PlannedRequest]], SystemRun]:
    spec = BaselineSpec(
        rule=BaselineRule.BESIDE, latency=latency, total_blocks=POOL_BLOCKS, max_batch=256, step_tokens=STEP_TOKENS
    )
    return lambda requests: _summed_up(simulate_baseline(spec, requests, INSTANCES).columns())


def _summed_up(done: RunColumns) -> SystemRun:
    order = np.argsort(done.gaps.seconds)
    reached = np.cumsum(done.gaps.counts[order])
    p99 = done.gaps.seconds[order][np.searchsorted(reached, 0.99 * reached[-1])]
    gaps = (float(p99), float(done.gaps.seconds.max()))
    return SystemRun(list(done.ttft_s()), list(done.jct_s()), gaps, float(done.last_s.max()))


def plan(workload: str, count: int, rate: float, seed: int) -> list[PlannedRequest]:
    rng = random.Random(seed)
    low, high = LENGTHS[workload]
    lengths = [RequestLengths(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]
    return plan_requests(lengths, gamma_arrivals(count, rate, 1.0, rng))


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    if options.data is None:
        report.skip("needs --data FOLDER")
        return
    latency = fitted(options.data)
    systems = {"AcceLLM": pairs(latency), "Splitwise": splitwise(latency), "vLLM": vllm(latency)}
    count, seeds = options.choose(500, 200), range(1, options.choose(3, 1) + 1)
    report.workload = {"requests": count, "seeds": len(seeds), "prefill_token_s": latency.prefill.token_s}
    report.workload |= {"decode_step_s": latency.decode[0].step_s, "decode_request_s": latency.decode[0].request_s}
    for workload in LENGTHS:
        for rate in RATES:
            _compare(workload, rate, systems, count, seeds, report)
        _overload(workload, systems, count, seeds, report)
    _memory(systems["AcceLLM"], count, seeds, report)


def _compare(
    workload: str,
    rate: float,
    systems: dict[str, Callable[[Sequence[PlannedRequest]], SystemRun]],
    count: int,
    seeds: Sequence[int],
    report: Report,
) -> None:
    planned = [plan(workload, count, rate, seed) for seed in seeds]
    found = {name: [serve(requests) for requests in planned] for name, serve in systems.items()}
    for name, runs in found.items():
        labels = {"workload": workload, "rate": rate, "system": name}
        report.row("mean TTFT", [one.ttft_s for one in runs], "s", **labels)
        report.row("mean JCT", [one.jct_s for one in runs], "s", **labels)
        report.row("gap between tokens, p99", [one.gap_p99_s for one in runs], "s", **labels)
        report.row("longest gap between tokens", [one.gap_most_s for one in runs], "s", **labels)
    ours = found["AcceLLM"]
    for other in ("Splitwise", "vLLM"):
        for figure, name in (
            ("ttft_s", "TTFT"), ("jct_s", "JCT"), ("gap_p99_s", "gap p99"), ("gap_most_s", "longest gap"),
        ):  # fmt: skip
            both = zip(ours, found[other], strict=True)
            value = statistics.median(getattr(mine, figure) / getattr(their, figure) for mine, their in both)
            report.ratio(f"{name}, AcceLLM / {other}, {workload}, {rate:g} requests/s", value)


def _overload(
    workload: str,
    systems: dict[str, Callable[[Sequence[PlannedRequest]], SystemRun]],
    count: int,
    seeds: Sequence[int],
    report: Report,
) -> None:
    planned = [plan(workload, count, OVERLOAD_PER_S, seed) for seed in seeds]
    rates: dict[str, list[float]] = {}
    for name, serve in systems.items():
        tokens = [sum(one.lengths.output_tokens for one in requests) for requests in planned]
        ends = [serve(requests).last_s for requests in planned]
        rates[name] = [count / end_s / INSTANCES for count, end_s in zip(tokens, ends, strict=True)]
        report.row("tokens/s of an instance, overload", rates[name], "tokens/s", workload=workload, system=name)
    for other in ("Splitwise", "vLLM"):
        both = zip(rates["AcceLLM"], rates[other], strict=True)
        value = statistics.median(mine / their for mine, their in both)
        report.ratio(f"tokens/s of an instance, AcceLLM / {other}, {workload}", value)


def _memory(
    serve: Callable[[Sequence[PlannedRequest]], SystemRun], count: int, seeds: Sequence[int], report: Report
) -> None:
    """Figure 9: the second copy of all KV, as its mean over the time of the run."""
    for rate, paper_gb in PAPER_EXTRA_GB.items():
        extra_gb, written = [], []
        for seed in seeds:
            requests = plan("mixed", count, rate, seed)
            done = serve(requests)
            token_s = sum(
                jct_s * (one.lengths.prompt_tokens + one.lengths.output_tokens / 2)
                for jct_s, one in zip(done.jcts_s, requests, strict=True)
            )
            extra_gb.append(token_s * KV_TOKEN_BYTES / done.last_s / INSTANCES / 1e9)
            answers = sum(one.lengths.output_tokens for one in requests)
            written.append(answers * KV_TOKEN_BYTES / done.last_s / INSTANCES / LINK_BYTES_PER_S)
        gb = report.row("memory of copies, an instance", extra_gb, "GB", rate=rate)
        report.ratio(f"memory of copies, GB an instance, {rate:g} requests/s", gb)
        share = report.row("share of the link that lines written back take", written, "share", rate=rate)
        report.ratio(f"lines written back, percent of the link, {rate:g} requests/s", share * 100)
        report.compare(f"memory of copies, {rate:g} requests/s", f"{paper_gb:g} GB", f"{gb:.1f} GB")


if __name__ == "__main__":
    run("papers.accellm", measure, description=__doc__)
