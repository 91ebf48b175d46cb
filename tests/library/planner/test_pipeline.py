"""`kaveri plan pipeline`: DéjàVu's equations (arXiv 2403.01876, appendix D), and the schedules they describe."""

import dataclasses
import random

import pytest

from kaveri.errors import ConfigError
from kaveri.latency.model import load_latency_model
from kaveri.planner.catalog import read_hardware, read_model_shape
from kaveri.planner.pipeline_plan import (
    PipelineQuestion,
    apart_pays,
    least_prompt_depth,
    least_token_depth,
    plan_pipelines,
    prompt_machines,
    streaming_bound,
)
from kaveri.planner.pipeline_rate import apart_period, shared_ends, shared_period
from kaveri.workload.requests import RequestLengths
from tests.library.planner.paper_equations import (
    apart_inverse_throughput_s,
    colocated_inverse_throughput_s,
    token_machines,
)


@pytest.mark.parametrize("seed", range(20))
def test_two_pipelines_are_in_step_when_machines_are_shared_by_the_equations(seed: int) -> None:
    rng = random.Random(seed)
    machines = rng.randrange(2, 17)
    prompt_s, token_s, tokens, streaming = rng.uniform(0.1, 5), rng.uniform(0.01, 0.1), rng.randrange(1, 900), 1.2
    prompts = prompt_machines(machines, prompt_s, token_s, tokens, streaming)
    assert prompts + token_machines(machines, prompt_s, token_s, tokens, streaming) == pytest.approx(machines)
    ours = apart_inverse_throughput_s(machines, prompts, prompt_s, token_s, tokens, streaming)
    assert ours == pytest.approx(streaming * prompt_s + tokens * token_s)
    for other in (prompts * 0.9, prompts + (machines - prompts) * 0.1):
        assert apart_inverse_throughput_s(machines, other, prompt_s, token_s, tokens, streaming) > ours


@pytest.mark.parametrize("seed", range(40))
def test_equation_5_is_the_comparison_it_was_derived_from(seed: int) -> None:
    rng = random.Random(seed)
    machines = rng.randrange(2, 17)
    streaming = rng.uniform(1, streaming_bound(machines) - 1e-6)
    token_s, tokens = rng.uniform(0.01, 0.1), rng.randrange(1, 900)
    prompt_s = token_s * rng.uniform(0.2, 40)
    apart_s = streaming * prompt_s + tokens * token_s
    together_s = colocated_inverse_throughput_s(machines, prompt_s, token_s, tokens)
    assert apart_pays(machines, prompt_s, token_s, streaming) == (apart_s < together_s)


def test_equation_5_does_not_hold_up_to_two_as_the_paper_says() -> None:
    machines = 4
    assert streaming_bound(machines) == 1.75
    with pytest.raises(ConfigError, match=r"--streaming: is 1\.8; .*below 2 - 1/D = 1\.75"):
        apart_pays(machines, 100.0, 1.0, 1.8)
    # What it was derived from: two pipelines are slower there, however long prompts take.
    apart_s = 1.8 * 1e9 + 10 * 1.0
    assert apart_s > colocated_inverse_throughput_s(machines, 1e9, 1.0, 10)


def test_memory_bounds_the_depths() -> None:
    assert least_prompt_depth(64, 0.25e9, 2e9, 80e9) == 2
    assert least_token_depth(64, 0.25e9, 0.25e9, 2e9, 80e9) == 3
    with pytest.raises(ConfigError, match=r"no depth helps"):
        least_token_depth(64, 1e9, 1e9, 2e9, 80e9)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_full_pipeline_is_as_fast_as_equation_4_says(depth: int) -> None:
    prompt_s, token_s, tokens = 1.0, 0.1, 30
    ends = shared_ends([tokens] * depth, depth, prompt_s, token_s)
    # The last stages of the last pass; the prompt draws the first token.
    whole_s = colocated_inverse_throughput_s(depth, prompt_s, token_s, tokens) * depth
    assert max(ends) == pytest.approx(whole_s, abs=token_s * depth)


def test_apart_the_slower_pipeline_sets_the_pace() -> None:
    tokens = [11, 31] * 200
    assert apart_period(tokens, 1.0, 0.01).mean_s == pytest.approx(1.0)
    assert apart_period(tokens, 0.1, 0.05).mean_s == pytest.approx(20 * 0.05)


@pytest.mark.parametrize("seed", range(6))
def test_every_microbatch_ends_after_all_its_passes(seed: int) -> None:
    rng = random.Random(seed)
    depth, prompt_s, token_s = rng.randrange(1, 6), rng.uniform(0.1, 1), rng.uniform(0.01, 0.1)
    tokens = [rng.randrange(1, 40) for _ in range(20)]
    ends = shared_ends(tokens, depth, prompt_s, token_s)
    assert ends == sorted(ends)
    least_s = sorted(depth * (prompt_s + (count - 1) * token_s) for count in tokens)
    assert all(end_s >= least - 1e-9 for end_s, least in zip(ends, least_s, strict=True))
    busy_s = sum(prompt_s + (count - 1) * token_s for count in tokens)
    assert busy_s <= ends[-1] <= depth * busy_s + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_steady_rate_is_that_of_a_run_so_long_that_its_ends_do_not_count(seed: int) -> None:
    rng = random.Random(seed)
    depth, prompt_s, token_s = 4, 0.5, 0.01
    tokens = [min(600, round(rng.lognormvariate(4.5, 1))) + 1 for _ in range(20_000)]
    found = shared_period(tokens[:5000], depth, prompt_s, token_s)
    whole_s = shared_ends(tokens, depth, prompt_s, token_s)[-1] / len(tokens)
    assert found.low_s < found.mean_s < found.high_s
    assert found.low_s * 0.98 < whole_s < found.high_s * 1.02


def question_of(machines: int, streaming: float = 1.05) -> PipelineQuestion:
    rng = random.Random(1)
    return PipelineQuestion(
        model=read_model_shape("opt-66b"),
        hardware=read_hardware("a100-80g"),
        latency=load_latency_model("opt-66b-a100-tp2"),
        gpus_per_machine=2,
        machines=machines,
        requests=[RequestLengths(1000, rng.randint(2, 300)) for _ in range(32)],
        streaming=streaming,
        microbatch_sizes=(4, 8),
    )


def test_schemes_use_the_machines_and_fit() -> None:
    found = plan_pipelines(question_of(4))
    assert {scheme.name for scheme in found.schemes} == {"Baseline", "Baseline-DP", "DéjàVu"}
    assert all(scheme.machines == 4 for scheme in found.schemes)
    assert found.best.requests_per_s == max(scheme.requests_per_s for scheme in found.schemes)
    assert found.apart_pays is True
    assert plan_pipelines(question_of(4, streaming=1.9)).apart_pays is None


def long_tailed(count: int) -> list[RequestLengths]:
    """Lengths as in the Azure conversation trace: most answers are short, so microbatches differ in length."""
    rng = random.Random(3)
    answers = [min(1000, round(rng.lognormvariate(4.9, 0.8)) + 1) for _ in range(count)]
    return [RequestLengths(1000, answer) for answer in answers]


def test_a_short_trace_plans_as_a_long_one() -> None:
    """By makespan, two pipelines were 1.15 times as fast as one with 256 requests, and 1.5 times with 4,096."""
    gains, rankings = [], []
    for count in (256, 4096):
        question = dataclasses.replace(question_of(8), requests=long_tailed(count), microbatch_sizes=(16,))
        found = plan_pipelines(question)
        rates = {scheme.name: scheme.requests_per_s for scheme in found.schemes}
        gains.append(rates["Baseline-DP"] / rates["Baseline"])
        rankings.append(sorted(rates, key=rates.__getitem__))
        assert found.is_certain
        for scheme in found.schemes:
            assert scheme.is_precise or scheme.request_count >= question.most_requests
            assert scheme.low_s <= scheme.request_s <= scheme.high_s
    assert gains[0] == pytest.approx(gains[1], rel=0.03)
    assert rankings[0] == rankings[1]


def test_a_simulation_ends_at_its_bound() -> None:
    noisy = [RequestLengths(800, 2), RequestLengths(800, 1000)] * 8
    few, many = (
        plan_pipelines(
            dataclasses.replace(question_of(4), requests=noisy, most_requests=count, microbatch_sizes=(1,))
        ).best
        for count in (1, 1 << 12)
    )
    # Fewer than 512 are never simulated.
    assert (few.request_count, many.request_count) == (512, 1 << 12)
    assert not few.is_precise
    assert not many.is_precise
    assert many.high_s - many.low_s < few.high_s - few.low_s


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--machines: is 1, with .* GB in all; opt-66b and its KV do not fit"):
        plan_pipelines(dataclasses.replace(question_of(1), gpus_per_machine=1))
