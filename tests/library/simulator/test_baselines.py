"""Other systems' schedulers: what a step takes, what is conserved, what is refused."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kaveri.errors import ConfigError
from kaveri.latency.model import load_latency_model
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.baselines import BaselineSpec, simulate_baseline
from kaveri.workload.requests import (
    PlannedRequest,
    RequestLengths,
    WorkloadClass,
    draw_lengths,
    gamma_arrivals,
    plan_requests,
)

LATENCY = load_latency_model("opt-13b-a100-tp2")


def spec_of(rule: BaselineRule, total_blocks: int = 9000, step_tokens: int = 2048) -> BaselineSpec:
    return BaselineSpec(rule=rule, latency=LATENCY, total_blocks=total_blocks, step_tokens=step_tokens)


def asked(*requests: tuple[float, int, int]) -> list[PlannedRequest]:
    return [
        PlannedRequest(number, arrival_s, RequestLengths(prompt, answer))
        for number, (arrival_s, prompt, answer) in enumerate(requests)
    ]


@pytest.mark.parametrize("swap_token_s", [None, 1e-5])
@pytest.mark.parametrize("total_blocks", [400, 9000])
@pytest.mark.parametrize("rule", BaselineRule)
def test_every_request_draws_its_tokens_and_all_blocks_come_free(
    rule: BaselineRule, total_blocks: int, swap_token_s: float | None
) -> None:
    rng = random.Random(5)
    lengths = draw_lengths(WorkloadClass.MIXED, 200, rng, 1024, 512)
    requests = plan_requests(lengths, gamma_arrivals(200, 6.0, 1.0, rng))
    spec = replace(spec_of(rule, total_blocks), swap_token_s=swap_token_s)
    # Blocks are checked by the instance at its end.
    done = simulate_baseline(spec, requests, 2)
    run = done.columns()
    assert (run.first_s >= run.due_s).all()
    assert (run.last_s >= run.first_s).all()
    assert run.gaps.counts.sum() == (run.tokens.planned - 1).sum()
    # The gaps of an answer follow one another without a hole: all of them together are all the answers' times.
    together_s = (run.last_s - run.first_s).sum()
    assert np.dot(run.gaps.seconds, run.gaps.counts) == pytest.approx(together_s, rel=1e-9)
    assert (sum(done.preemptions) > 0) == (total_blocks == 400 and rule is not BaselineRule.WHOLE_BATCH)


def test_prefill_first_stops_answers_for_a_prompt() -> None:
    run = simulate_baseline(spec_of(BaselineRule.PREFILL_FIRST), asked((0.0, 16, 100), (0.5, 2000, 2))).columns()
    prompt_s = LATENCY.step_s([(0, 2000)])
    assert run.gaps.seconds.max() > prompt_s
    beside = simulate_baseline(spec_of(BaselineRule.BESIDE, step_tokens=256), asked((0.0, 16, 100), (0.5, 2000, 2)))
    assert beside.columns().gaps.seconds.max() < prompt_s / 2
    assert beside.columns().ttft_s()[1] > run.ttft_s()[1]


def test_a_token_budget_counts_the_tokens_of_answers_too() -> None:
    requests = asked(*((0.0, 16, 400) for _ in range(64)), (3.0, 640, 2))
    budget = simulate_baseline(spec_of(BaselineRule.TOKEN_BUDGET, step_tokens=128), requests).columns()
    beside = simulate_baseline(spec_of(BaselineRule.BESIDE, step_tokens=128), requests).columns()
    # 64 of 128 are left for the prompt: ten steps instead of five.
    assert 1.5 < budget.ttft_s()[-1] / beside.ttft_s()[-1] < 2.5


def test_a_whole_batch_lets_no_request_join() -> None:
    requests = asked((0.0, 100, 200), (0.01, 100, 2), (0.01, 400, 2))
    run = simulate_baseline(spec_of(BaselineRule.WHOLE_BATCH), requests).columns()
    assert run.first_s[1] > run.last_s[0]
    assert run.first_s[1] - run.last_s[0] == pytest.approx(LATENCY.step_s([(0, 400), (0, 400)]))


def test_steps_that_are_taken_together_last_as_long_as_one_by_one() -> None:
    lengths = [(0.0, 100 + 50 * number, 40) for number in range(8)]
    together = simulate_baseline(spec_of(BaselineRule.PREFILL_FIRST), asked(*lengths)).columns()
    # A request that comes in each step ends each run after one step; it does not fit into the batch.
    step_s = (together.last_s[0] - together.first_s[0]) / 39
    times = [together.first_s[0] + step_s * (0.25 + 0.5 * number) for number in range(60)]
    assert all(former < later for former, later in pairwise(times))
    alone = replace(spec_of(BaselineRule.PREFILL_FIRST), max_batch=8)
    stepped = simulate_baseline(alone, asked(*lengths, *((time_s, 16, 2) for time_s in times))).columns()
    assert stepped.last_s[:8] == pytest.approx(together.last_s)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"total_blocks": 0}, "total_blocks: is 0; it must be at least 1"),
        ({"max_batch": 0}, "max_batch: is 0; it must be at least 1"),
        ({"step_tokens": -1}, "step_tokens: is -1; it must be at least 1"),
        ({"swap_token_s": -0.5}, "swap_token_s: is -0.5; it must be a number of at least 0"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(spec_of(BaselineRule.BESIDE), **change)  # type: ignore[arg-type]


def test_requests_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"requests: one has 200 \+ 200 tokens; the pool has 20 blocks"):
        simulate_baseline(spec_of(BaselineRule.BESIDE, 20), asked((0.0, 200, 200)))
    with pytest.raises(ConfigError, match="requests: are none"):
        simulate_baseline(spec_of(BaselineRule.BESIDE), [])
    with pytest.raises(ConfigError, match="count: is 0"):
        simulate_baseline(spec_of(BaselineRule.BESIDE), asked((0.0, 1, 1)), 0)
