"""DéjàVu's planner: one pipeline, several, or one for each phase. Pure.

(arXiv 2403.01876, section 4.2.1 and appendix B.) Every scheme is tried with every microbatch size, and the shortest
makespan is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.latency.model import LatencyModel
from kaveri.planner.hardware import Hardware
from kaveri.planner.model_shape import ModelShape
from kaveri.planner.parallelism import USABLE_SHARE
from kaveri.planner.pipeline_equations import (
    apart_pays,
    least_prompt_depth,
    least_token_depth,
    prompt_machines,
    streaming_bound,
)
from kaveri.planner.pipeline_schedule import Microbatch, prompt_ends, shared_ends, token_ends
from kaveri.workload.requests import RequestLengths

MICROBATCH_SIZES = (2, 4, 8, 16, 32)
"""Those of tables 2 to 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineQuestion:
    """What is asked for: all requests are there at once, and the last one shall end soon."""

    model: ModelShape
    hardware: Hardware
    latency: LatencyModel
    """Of one machine that holds the whole model; a stage takes its share."""
    gpus_per_machine: int
    machines: int
    requests: Sequence[RequestLengths]
    streaming: float = 1.05
    """m: how much longer prompts take because their KV is streamed out. Only two pipelines pay it."""
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the flag, its value and the limit."""
        for flag, value in (("--machines", self.machines), ("--gpus-per-machine", self.gpus_per_machine)):
            if value < 1:
                raise ConfigError(flag, f"is {value}; it must be at least 1")
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
    """One way to use the machines. `name` is the paper's."""

    name: str
    pipelines: int
    """That share the requests: Baseline-DP's d."""
    depth: int
    """Stages of one pipeline; of the token pipeline where the phases are apart."""
    prompt_depth: int
    """Stages of the prompt pipeline; 0: one pipeline for both phases."""
    microbatch: int
    makespan_s: float
    machine_hours: float

    @property
    def machines(self) -> int:
        """That it uses."""
        return self.pipelines * self.depth + self.prompt_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The best of each scheme, and what the equations say."""

    question: PipelineQuestion
    schemes: tuple[Scheme, ...]
    """Baseline, Baseline-DP, DéjàVu; without those that do not fit."""
    microbatch: int
    """Of which the equations speak: the best scheme's."""
    prompt_machines: float
    """Equation 7."""
    least_prompt_depth: int
    """Equation 2."""
    least_token_depth: int
    """Equation 3."""
    apart_pays: bool | None
    """Equation 5. None: m is outside the range in which it holds."""

    @property
    def best(self) -> Scheme:
        """The shortest makespan; of equal ones the simplest."""
        return min(self.schemes, key=lambda scheme: scheme.makespan_s)


def plan_pipelines(question: PipelineQuestion) -> PipelinePlan:
    """Raises ConfigError when the model fits into no pipeline of these machines."""
    found = [*_baselines(question, 1), *_data_parallel(question), *_apart(question)]
    if not found:
        memory_gb = question.machines * question.machine_bytes / 1e9
        reason = f"is {question.machines}, with {memory_gb:.4g} GB in all; {question.model.name} and its KV do not fit"
        raise ConfigError("--machines", reason)
    names = dict.fromkeys(scheme.name for scheme in found)
    schemes = tuple(min((one for one in found if one.name == name), key=lambda one: one.makespan_s) for name in names)
    size = min(schemes, key=lambda scheme: scheme.makespan_s).microbatch
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
    """Seconds of a pass of a microbatch through all layers: of prompts of mean length, and of one token each."""
    requests = question.requests
    prompt = round(sum(one.prompt_tokens for one in requests) / len(requests))
    answer = sum(one.output_tokens for one in requests) / len(requests)
    fit = question.latency.decode_fit(microbatch)
    context = microbatch * (prompt + answer / 2)
    prompt_s = question.latency.step_s([(0, prompt)] * microbatch)
    return prompt_s, fit.step_s + context * fit.context_token_s + microbatch * fit.request_s


def _layer_bytes(question: PipelineQuestion, microbatch: int) -> tuple[float, float, float]:
    """C, K and W of one layer: KV of a microbatch's longest prompts and answers, and weights."""
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


def _batches(requests: Sequence[RequestLengths], size: int) -> list[Microbatch]:
    return [
        Microbatch(0.0, max(one.output_tokens for one in requests[first : first + size]))
        for first in range(0, len(requests), size)
    ]


def _scheme(question: PipelineQuestion, name: str, makespan_s: float, size: int, **shape: int) -> Scheme:
    used = shape["pipelines"] * shape["depth"] + shape["prompt_depth"]
    hours = used * makespan_s / 3600
    return Scheme(name=name, makespan_s=makespan_s, machine_hours=hours, microbatch=size, **shape)


def _baselines(question: PipelineQuestion, pipelines: int) -> list[Scheme]:
    """`pipelines` equal pipelines of both phases, requests dealt out in turn."""
    depth = question.machines // pipelines
    found = []
    for size in question.microbatch_sizes:
        if not _fits(question, depth, size, prompts_only=False):
            continue
        prompt_s, token_s = (seconds / depth for seconds in pass_s(question, size))
        shares = (question.requests[first::pipelines] for first in range(pipelines))
        makespan_s = max(max(shared_ends(_batches(share, size), depth, prompt_s, token_s)) for share in shares if share)
        name = "Baseline" if pipelines == 1 else "Baseline-DP"
        found.append(_scheme(question, name, makespan_s, size, pipelines=pipelines, depth=depth, prompt_depth=0))
    return found


def _data_parallel(question: PipelineQuestion) -> list[Scheme]:
    ways = [count for count in range(2, question.machines + 1) if question.machines % count == 0]
    return [scheme for count in ways for scheme in _baselines(question, count)]


def _apart(question: PipelineQuestion) -> list[Scheme]:
    """A prompt pipeline and a token pipeline with one size of microbatches, in all divisions of the machines."""
    found = []
    for size in question.microbatch_sizes:
        batches = _batches(question.requests, size)
        whole_prompt_s, whole_token_s = pass_s(question, size)
        for prompt_depth in range(1, question.machines):
            depth = question.machines - prompt_depth
            if not (
                _fits(question, prompt_depth, size, prompts_only=True)
                and _fits(question, depth, size, prompts_only=False)
            ):
                continue
            computed = prompt_ends(batches, prompt_depth, question.streaming * whole_prompt_s / prompt_depth)
            ready = [Microbatch(end_s, one.tokens) for end_s, one in zip(computed, batches, strict=True)]
            makespan_s = max(token_ends(ready, depth, whole_token_s / depth))
            shape = {"pipelines": 1, "depth": depth, "prompt_depth": prompt_depth}
            found.append(_scheme(question, "DéjàVu", makespan_s, size, **shape))
    return found
