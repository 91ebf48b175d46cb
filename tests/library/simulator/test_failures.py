"""Simulated instances die and come back: nothing is lost, and what was placed there is placed again."""

import random
from collections import Counter
from typing import Any

import pytest

from kaveri.errors import ConfigError
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.simulator.colocated import SimulatedColocated
from kaveri.simulator.failures import Death, FailureSpec, parse_death
from kaveri.simulator.instance import SimulatedAttempt
from kaveri.simulator.simulate import simulate
from kaveri.simulator.spec import Overheads
from kaveri.workload.requests import PlannedRequest, RequestLengths
from tests.library.simulator.test_simulate import LATENCY, colocated_of, decoder_of, poisson, run_whole, spec_of


def dying(*deaths: Death, repair_s: float | None = 2.0, mtbf_s: float | None = None) -> FailureSpec:
    return FailureSpec(deaths=deaths, repair_s=repair_s, mtbf_s=mtbf_s)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(spec_of, ("prefill-0", "prefill-1", "decode-0", "decode-1")), (colocated_of, ("colocated-0", "colocated-1"))],
)
@pytest.mark.parametrize("seed", range(10))
def test_every_request_is_answered_whatever_dies(kind: Any, names: tuple[str, ...], seed: int) -> None:
    rng = random.Random(seed)
    spec = kind(
        rng.choice((300, 9000)),
        failures=dying(*(Death(instance_id=rng.choice(names), at_s=rng.uniform(0.0, 8.0)) for _ in range(3))),
        overheads=Overheads(hop_s=rng.choice((0.0, 0.003))),
        link=rng.choice((None, parse_link_speed("20Gbps,50us,800KiB/token"))),
        seed=seed,
    )
    table = run_whole(spec, poisson(60, 10.0, seed)).table
    assert max(table.attempts) > 1, "no death took anything with it"


ONE = [PlannedRequest(0, 0.0, RequestLengths(400, 100))]
DRAWN_S = LATENCY.step_s([(0, 400)]) + sum(LATENCY.step_s([(400 + drawn, 1)]) for drawn in range(30))
DIES_S = DRAWN_S + LATENCY.step_s([(430, 1)]) / 2
"""Middle of the 31st decode step, with 31 sampled tokens."""
AGAIN_S = LATENCY.step_s([(0, 431)])
REST_S = sum(LATENCY.step_s([(431 + drawn, 1)]) for drawn in range(68))


def test_what_decoded_on_an_instance_of_both_phases_goes_on_elsewhere_with_the_tokens_that_it_has() -> None:
    alone = run_whole(colocated_of(), ONE).table.columns()
    used = decoder_of(alone)
    run = run_whole(colocated_of(failures=dying(Death(instance_id=used, at_s=DIES_S))), ONE).table.columns()
    assert decoder_of(run) != used
    assert run.ttft_s()[0] == alone.ttft_s()[0], "the first token was there already"
    assert DIES_S + AGAIN_S + REST_S <= run.jct_s()[0] < DIES_S + AGAIN_S + REST_S + 0.5


@pytest.mark.parametrize("seed", range(8))
def test_no_request_goes_back_to_the_instance_of_both_phases_that_has_died(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_to_dead = Counter[int]()
    accept = SimulatedColocated.accept

    def count(self: SimulatedColocated, attempt: SimulatedAttempt) -> None:
        sent_to_dead[attempt.request.number] += self.is_dead
        accept(self, attempt)

    monkeypatch.setattr(SimulatedColocated, "accept", count)
    requests = [PlannedRequest(number, 0.0, RequestLengths(400, 100)) for number in range(12)]
    death = Death(instance_id="colocated-0", at_s=1.5)
    table = run_whole(colocated_of(failures=dying(death), seed=seed), requests).table
    assert sorted(set(table.attempts)) == [1, 2]
    assert max(sent_to_dead.values()) <= 1, "prompts are levelled by the load that it had"


def test_deaths_that_are_drawn_end_with_the_last_request() -> None:
    spec = spec_of(failures=dying(mtbf_s=10.0, repair_s=1.0))
    first, again = (simulate(spec, poisson(100, 5.0)).columns() for _ in range(2))
    assert first.answered.all()
    assert (first.last_s == again.last_s).all()


def test_a_request_goes_on_elsewhere_with_the_tokens_that_it_has() -> None:
    spec = spec_of(failures=dying(*(Death(instance_id=f"decode-{number}", at_s=DIES_S) for number in range(2))))
    run = run_whole(spec, ONE).table.columns()
    alone = run_whole(spec_of(), ONE).table.columns()
    assert run.ttft_s()[0] == alone.ttft_s()[0], "the first token was there already"
    back_s = DIES_S + 2.0
    assert back_s + REST_S < run.jct_s()[0] < back_s + 1.0 + AGAIN_S + REST_S


def test_a_push_to_an_instance_that_dies_goes_to_another_and_the_prompt_is_not_computed_again() -> None:
    link = parse_link_speed("1Gbps,1ms,1MiB/token")
    request = [PlannedRequest(0, 0.0, RequestLengths(500, 5))]
    whole = run_whole(spec_of(link=link), request).table.columns()
    used = decoder_of(whole)
    at_s = float(whole.ttft_s()[0]) + 0.2
    run = run_whole(spec_of(link=link, failures=dying(Death(instance_id=used, at_s=at_s))), request).table
    columns = run.columns()
    assert decoder_of(columns) != used
    assert run.attempts[0] == 1
    assert columns.ttft_s()[0] == whole.ttft_s()[0]


def test_requests_wait_by_themselves_for_an_instance_and_not_one_after_the_other() -> None:
    deaths = [Death(instance_id=f"decode-{number}", at_s=0.0) for number in range(2)]
    requests = [PlannedRequest(n, at_s, RequestLengths(10, 5)) for n, at_s in enumerate((0.0, 1.0, 2.0, 123.0, 124.0))]
    run = simulate(spec_of(failures=dying(*deaths, repair_s=130.0)), requests).columns()
    # Each may wait for two minutes; by then the instances are back for the last two only.
    assert run.answered.tolist() == [False, False, False, True, True]
    assert set(run.errors[:3]) == {"Unavailable"}


@pytest.mark.parametrize(
    ("text", "named"), [("decode-1", "'decode-1'"), ("decode-1@soon", "decode-1@30s"), ("@3s", "'@3s'")]
)
def test_a_death_that_cannot_be_read_is_refused(text: str, named: str) -> None:
    assert parse_death("decode-1@30.5s") == Death(instance_id="decode-1", at_s=30.5)
    with pytest.raises(ConfigError, match=named):
        parse_death(text)
