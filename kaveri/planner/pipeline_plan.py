"""DéjàVu's planner: one pipeline, several, or one for each phase. Pure.

(arXiv 2403.01876, section 4.2.1 and appendix B.) Every scheme is tried with every microbatch size, and the one with the
highest rate of requests is taken. The paper compares makespans of one trace; the makespan of few requests is mostly
that of filling and draining the pipelines. Here requests never run out. Equation 1 is section 4.2.1's; 2 to 7 are
appendix D's. Letters are the paper's:

    D  machines     L  layers           Y  seconds of a prompt in a stage of a pipeline of D machines
    N  new tokens   m  cost of streaming the prompt's KV, at least 1        t  seconds of a token in such a stage
    M  bytes of GPU memory of a machine   W  bytes of a layer's weights   C, K  of a layer's KV of prompt, of tokens
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kaveri.errors import ConfigError
from kaveri.latency.model import LatencyModel
from kaveri.planner.catalog import Hardware, ModelShape
from kaveri.planner.parallelism import USABLE_SHARE
from kaveri.planner.pipeline_rate import Period, apart_period, shared_period
from kaveri.workload.requests import RequestLengths

MICROBATCH_SIZES = (2, 4, 8, 16, 32)
"""Requests per microbatch, as in tables 2 to 5."""
PRECISION = 0.01
"""Relative half-width of the 95 % interval at which simulations end."""
_FEWEST_MICROBATCHES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineQuestion:
    """Input of a pipeline plan, which maximizes requests per second on given machines under full load."""

    model: ModelShape
    hardware: Hardware
    latency: LatencyModel
    """Latency of one machine that holds the whole model; a stage takes its share."""
    gpus_per_machine: int
    machines: int
    requests: Sequence[RequestLengths]
    """Request lengths; microbatches are sampled from them with replacement."""
    alike: bool = False
    """True if all requests of a microbatch have answers of equal length, as in the paper's experiments."""
    streaming: float = 1.05
    """m: factor on prompt time for streaming KV from the prompt to the token pipeline."""
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES
    most_requests: int = 1 << 16
    """Limit on the requests of one simulation, which ends earlier once its interval is narrow."""

    def __post_init__(self) -> None:
        for flag, value in (("--machines", self.machines), ("--gpus-per-machine", self.gpus_per_machine)):
            if value < 1:
                raise ConfigError(flag, f"is {value}; it must be at least 1")
        if self.most_requests < 1:
            raise ConfigError("--requests", f"is {self.most_requests}; it must be at least 1")
        if not self.requests:
            raise ConfigError("--trace", "has no requests")
        if not 1 <= self.streaming < math.inf:
            raise ConfigError("--streaming", f"is {self.streaming:g}; it must be a number of at least 1")
        if any(size < 1 for size in self.microbatch_sizes) or not self.microbatch_sizes:
            raise ConfigError("--microbatch", f"is {list(self.microbatch_sizes)}; sizes must be at least 1")

    @property
    def machine_bytes(self) -> float:
        """GPU memory of one machine for weights and KV."""
        return self.gpus_per_machine * self.hardware.memory_bytes * USABLE_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A division of the machines into pipelines, with its simulated rate. `name` is the paper's."""

    name: str
    pipelines: int
    """Number of equal pipelines that share the requests: d in Baseline-DP."""
    depth: int
    """Stages of one pipeline; of the token pipeline if prompts have their own."""
    prompt_depth: int
    """Stages of the prompt pipeline; 0 if one pipeline computes prompts and tokens."""
    microbatch: int
    request_s: float = math.nan
    """Seconds per request under full load."""
    low_s: float = math.nan
    high_s: float = math.nan
    """Upper end of the 95 % interval of `request_s`."""
    request_count: int = 0
    """Number of simulated requests, including warm-up and drain."""

    @property
    def is_precise(self) -> bool:
        """True if the 95 % interval of request_s is at most PRECISION wide to either side, relative to it."""
        return self.high_s - self.low_s <= 2 * PRECISION * self.request_s

    @property
    def requests_per_s(self) -> float:
        return 1 / self.request_s

    @property
    def machine_hours(self) -> float:
        """Machine hours per 1,000 requests."""
        return self.machines * self.request_s * 1000 / 3600

    @property
    def machines(self) -> int:
        return self.pipelines * self.depth + self.prompt_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The fastest variant of each scheme, and the results of the paper's equations."""

    question: PipelineQuestion
    schemes: tuple[Scheme, ...]
    """Baseline, Baseline-DP, DéjàVu; those that fit into memory."""
    microbatch: int
    """Microbatch size of the equations: the fastest scheme's."""
    prompt_machines: float
    """Machines for prompts by equation 7."""
    least_prompt_depth: int
    """Fewest machines that hold the prompt pipeline (equation 2)."""
    least_token_depth: int
    """Fewest machines that hold the token pipeline (equation 3)."""
    apart_pays: bool | None
    """True if separate pipelines are faster (equation 5). None: m is out of its range."""

    @property
    def best(self) -> Scheme:
        """Scheme with the highest rate; of equals, the simplest."""
        return min(self.schemes, key=lambda scheme: scheme.request_s)

    @property
    def is_certain(self) -> bool:
        """True if the best scheme's 95 % interval does not overlap any other's."""
        best = self.best
        return all(best.high_s < other.low_s for other in self.schemes if other is not best)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A scheme to simulate."""

    scheme: Scheme
    """The scheme, without simulation results."""
    period: Callable[[Sequence[int]], Period]
    """Computes seconds per microbatch of one pipeline from the answer tokens of its microbatches."""

    def simulated(self, question: PipelineQuestion, count: int) -> Scheme:
        """Simulate `count` microbatches per pipeline."""
        microbatch = self.scheme.microbatch
        found = self.period(_drawn_tokens(question, microbatch, count))
        requests = microbatch * self.scheme.pipelines
        return replace(
            self.scheme,
            request_s=found.mean_s / requests,
            low_s=found.low_s / requests,
            high_s=found.high_s / requests,
            request_count=microbatch * count,
        )


def plan_pipelines(question: PipelineQuestion) -> PipelinePlan:
    """Find the fastest division of machines into pipelines. Raises ConfigError if the model fits into none."""
    candidates = (
        _baselines(question, "Baseline", [1]),
        _baselines(
            question, "Baseline-DP", [ways for ways in range(2, question.machines + 1) if question.machines % ways == 0]
        ),
        _apart(question),
    )
    schemes = tuple(_fastest(question, each) for each in candidates if each)
    if not schemes:
        memory_gb = question.machines * question.machine_bytes / 1e9
        reason = f"is {question.machines}, with {memory_gb:.4g} GB in all; {question.model.name} and its KV do not fit"
        raise ConfigError("--machines", reason)
    size = min(schemes, key=lambda scheme: scheme.request_s).microbatch
    prompt_s, token_s = (seconds / question.machines for seconds in pass_s(question, size))
    new_tokens = sum(one.output_tokens for one in question.requests) / len(question.requests)
    layer = _layer_bytes(question, size)
    holds = question.streaming < streaming_bound(question.machines)
    return PipelinePlan(
        question=question,
        schemes=schemes,
        microbatch=size,
        prompt_machines=prompt_machines(question.machines, prompt_s, token_s, new_tokens, question.streaming),
        least_prompt_depth=least_prompt_depth(question.model.layers, layer[0], layer[2], question.machine_bytes),
        least_token_depth=least_token_depth(question.model.layers, *layer, question.machine_bytes),
        apart_pays=apart_pays(question.machines, prompt_s, token_s, question.streaming) if holds else None,
    )


def pass_s(question: PipelineQuestion, microbatch: int) -> tuple[float, float]:
    """Return a microbatch's seconds through all layers: with prompts of mean length, and with one token each."""
    requests = question.requests
    prompt = round(sum(one.prompt_tokens for one in requests) / len(requests))
    answer = sum(one.output_tokens for one in requests) / len(requests)
    fit = question.latency.decode_fit(microbatch)
    context = microbatch * (prompt + answer / 2)
    prompt_s = question.latency.step_s([(0, prompt)] * microbatch)
    return prompt_s, fit.step_s + context * fit.context_token_s + microbatch * fit.request_s


def _layer_bytes(question: PipelineQuestion, microbatch: int) -> tuple[float, float, float]:
    """Return C, K and W of one layer in bytes: KV of a microbatch's longest prompts and answers, weights."""
    model = question.model
    kv_bytes = model.kv_token_bytes / model.layers * microbatch
    prompt = max(one.prompt_tokens for one in question.requests)
    answer = max(one.output_tokens for one in question.requests)
    return prompt * kv_bytes, answer * kv_bytes, model.weight_bytes / model.layers


def _fits(question: PipelineQuestion, depth: int, microbatch: int, prompts_only: bool) -> bool:
    prompt_kv, token_kv, weights = _layer_bytes(question, microbatch)
    layers, memory = question.model.layers, question.machine_bytes
    if prompts_only:
        return depth >= least_prompt_depth(layers, prompt_kv, weights, memory)
    left = memory - layers * (prompt_kv + token_kv)
    return left > 0 and depth >= layers * weights / left


def _drawn_tokens(question: PipelineQuestion, size: int, count: int) -> list[int]:
    """Sample the longest answers, in tokens, of `count` microbatches: the same for all schemes of one size."""
    rng = random.Random(size)
    answers = [one.output_tokens for one in question.requests]
    return [max(rng.choices(answers, k=1 if question.alike else size)) for _ in range(count)]


def _fastest(question: PipelineQuestion, candidates: Sequence[_Candidate]) -> Scheme:
    """Return the fastest candidate, doubling the simulations of contenders until their intervals are narrow."""
    for doublings in itertools.count():
        # Far more than there are stages to fill.
        count = max(_FEWEST_MICROBATCHES, 32 * question.machines) << doublings
        found = [one.simulated(question, count) for one in candidates]
        best = min(found, key=lambda scheme: scheme.request_s)
        near = [(one, scheme) for one, scheme in zip(candidates, found, strict=True) if scheme.low_s <= best.high_s]
        if all(scheme.is_precise or scheme.request_count >= question.most_requests for _, scheme in near):
            return best
        candidates = [one for one, _ in near]
    raise AssertionError("unreachable")


def _baselines(question: PipelineQuestion, name: str, ways: Sequence[int]) -> list[_Candidate]:
    """Return candidates with equal pipelines for both phases, for each number of pipelines in `ways`."""
    found = []
    for pipelines, size in itertools.product(ways, question.microbatch_sizes):
        depth = question.machines // pipelines
        if _fits(question, depth, size, prompts_only=False):
            prompt_s, token_s = (seconds / depth for seconds in pass_s(question, size))
            period = functools.partial(shared_period, depth=depth, prompt_s=prompt_s, token_s=token_s)
            scheme = Scheme(name=name, pipelines=pipelines, depth=depth, prompt_depth=0, microbatch=size)
            found.append(_Candidate(scheme, period))
    return found


def _apart(question: PipelineQuestion) -> list[_Candidate]:
    """Return candidates with a prompt pipeline and a token pipeline, for all divisions of the machines."""
    found = []
    for size, prompt_depth in itertools.product(question.microbatch_sizes, range(1, question.machines)):
        depth = question.machines - prompt_depth
        if _fits(question, prompt_depth, size, prompts_only=True) and _fits(question, depth, size, prompts_only=False):
            prompt_s, token_s = pass_s(question, size)
            streamed_s = question.streaming * prompt_s / prompt_depth
            period = functools.partial(apart_period, prompt_s=streamed_s, token_s=token_s / depth)
            scheme = Scheme(name="DéjàVu", pipelines=1, depth=depth, prompt_depth=prompt_depth, microbatch=size)
            found.append(_Candidate(scheme, period))
    return found


# The paper's equations.


def least_prompt_depth(layers: int, prompt_kv_bytes: float, weight_bytes: float, memory_bytes: float) -> int:
    """Return the fewest machines whose memory holds the prompt pipeline (equation 2). Sizes are per layer."""
    return math.ceil(layers * (prompt_kv_bytes + weight_bytes) / memory_bytes)


def least_token_depth(
    layers: int, prompt_kv_bytes: float, token_kv_bytes: float, weight_bytes: float, memory_bytes: float
) -> int:
    """Return the fewest machines that hold the token pipeline with a microbatch per stage (equation 3).

    Raises ConfigError when one microbatch's KV in all layers leaves no room for weights: then no depth suffices.
    """
    left_bytes = memory_bytes - layers * (prompt_kv_bytes + token_kv_bytes)
    if left_bytes <= 0:
        kv_gb = layers * (prompt_kv_bytes + token_kv_bytes) / 1e9
        reason = f"has {kv_gb:.4g} GB of KV; a machine has {memory_bytes / 1e9:.4g} GB, and no depth helps"
        raise ConfigError("--microbatch", reason)
    return math.ceil(layers * weight_bytes / left_bytes)


def prompt_machines(machines: int, prompt_s: float, token_s: float, new_tokens: float, streaming: float) -> float:
    """Return the unrounded number of machines for prompts, D_p = D m Y / (m Y + N t) (equations 1 and 7), with D, Y, t,
    N and m in order of the parameters."""
    return machines * streaming * prompt_s / (streaming * prompt_s + new_tokens * token_s)


def streaming_bound(machines: int) -> float:
    """Return 2 - 1/D (D: machines), below which the streaming factor m must be for DéjàVu's equation 5. The paper says
    2; but from this bound on, its denominator is not positive and two pipelines are always slower than one."""
    return 2 - 1 / machines


def apart_pays(machines: int, prompt_s: float, token_s: float, streaming: float) -> bool:
    """Return True if two pipelines beat one by equation 5, Y / t > (D - 1) / (D (2 - m) - 1), with unrounded D, Y, t
    and m in order of the parameters. Raises ConfigError for an m outside [1, streaming_bound())."""
    if not 1 <= streaming < streaming_bound(machines):
        limit = f"at least 1 and below 2 - 1/D = {streaming_bound(machines):.4g}, where equation 5 holds"
        raise ConfigError("--streaming", f"is {streaming:g}; it must be {limit}")
    return prompt_s / token_s > (machines - 1) / (machines * (2 - streaming) - 1)
