"""Copies of KV in simulated clusters: who goes on where an instance has died, and with what."""

import random
from dataclasses import replace
from typing import Any

import pytest

from kaveri.domain.view import ViewedInstance
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.replication import ReplicationMode, choose_holder, drop_first, is_worth_a_resume
from kaveri.simulator import copies, held_copies, router
from kaveri.simulator.failures import Death
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, CopySpec, Overheads
from kaveri.workload.requests import PlannedRequest, RequestLengths
from kaveri.workload.run_columns import RunColumns
from kaveri.workload.summary import Slo, summarize
from services.decode import holder, replicator
from services.router.recovery import holders
from tests.library.simulator.test_failures import dying
from tests.library.simulator.test_simulate import LATENCY, colocated_of, decoder_of, poisson, run_whole, spec_of
from tests.support.conservation import check_conservation

LONE = [PlannedRequest(0, 0.0, RequestLengths(400, 100))]
PREFILL_S = LATENCY.step_s([(0, 400)])
STEPS_S = [LATENCY.step_s([(400 + drawn, 1)]) for drawn in range(99)]
DIES_S = PREFILL_S + sum(STEPS_S[:41]) + STEPS_S[41] / 2
"""Middle of the 42nd decode step, with 42 sampled tokens: 441 of 442 have KV."""


def copied(spec: ClusterSpec, mode: ReplicationMode = ReplicationMode.RING, **changes: Any) -> ClusterSpec:
    return replace(spec, decode=replace(spec.decode, copies=CopySpec(replication=mode, **changes)))


def with_deaths(spec: ClusterSpec, *names: str, at_s: float = DIES_S, repair_s: float | None = 2.0) -> ClusterSpec:
    deaths = (Death(instance_id=name, at_s=at_s) for name in names)
    return replace(spec, failures=dying(*deaths, repair_s=repair_s))


def owner_of_lone(spec: ClusterSpec) -> str:
    return decoder_of(run_whole(spec, LONE).table.columns())


def losses(run: RunColumns, number: int = 0) -> tuple[int, int, int]:
    resumes, held, recomputed = (
        int(run.server[name][number]) for name in ("resumes", "held_tokens", "recomputed_tokens")
    )
    return resumes, held, recomputed


KINDS = pytest.mark.parametrize("kind", [spec_of, colocated_of])


@KINDS
@pytest.mark.parametrize("mode", [ReplicationMode.PAIR, ReplicationMode.RING, ReplicationMode.SPREAD])
def test_a_request_goes_on_at_its_holder_and_only_the_block_under_way_is_computed_again(
    kind: Any, mode: ReplicationMode
) -> None:
    spec = copied(kind(), mode)
    owner = owner_of_lone(spec)
    run = run_whole(with_deaths(spec, owner), LONE).table.columns()
    assert decoder_of(run) != owner
    assert losses(run) == (1, 432, 10), "27 of 28 blocks are whole"
    chunk_s = LATENCY.step_s([(432, 10)])
    rest_s = sum(LATENCY.step_s([(442 + drawn, 1)]) for drawn in range(57))
    assert run.jct_s()[0] == pytest.approx(DIES_S + chunk_s + rest_s)
    assert run.server["stall_s"][0] == pytest.approx(STEPS_S[41] / 2 + chunk_s)
    (prefill_s,) = run.server["prefill_s"]
    assert prefill_s == pytest.approx(PREFILL_S), "that of the prompt, which is not computed again"


@pytest.mark.parametrize("spec", [spec_of(), colocated_of(), copied(spec_of(), replica_min_tokens=500)])
def test_without_copies_or_with_a_short_context_the_same_request_is_computed_again(spec: ClusterSpec) -> None:
    run = run_whole(with_deaths(spec, owner_of_lone(spec)), LONE).table.columns()
    assert losses(run) == (0, 0, 442)
    assert run.server["stall_s"][0] > LATENCY.step_s([(0, 442)])


@KINDS
@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_every_request_ends_once_and_all_memory_comes_free(kind: Any, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice((2, 3, 4))
    is_both = kind is colocated_of
    names = [f"{'colocated' if is_both else 'decode'}-{number}" for number in range(count)]
    deaths = [Death(instance_id=rng.choice(names), at_s=rng.uniform(0, 8)) for _ in range(4)]
    deaths.append(Death(instance_id=rng.choice(names), at_s=deaths[0].at_s))
    spec = kind(
        rng.choice((110, 300, 9000)),
        failures=dying(*deaths),
        overheads=Overheads(hop_s=rng.choice((0.0, 0.003)), push_tail_s=rng.choice((0.0, 0.02))),
        link=rng.choice((None, parse_link_speed("20Gbps,50us,800KiB/token"))),
        seed=seed,
        **{"colocated_count" if is_both else "decode_count": count},
    )
    spec = copied(
        replace(spec, decode=replace(spec.decode, decode_policy=rng.choice(list(AdmissionPolicy)))),
        rng.choice([mode for mode in ReplicationMode if mode is not ReplicationMode.OFF]),
        replica_blocks=rng.choice((60, 300, 9000)),
        replica_min_tokens=rng.choice((1, 256)),
        blocks_per_s=rng.choice((0.0, 5.0, 1000.0)),
    )
    run = run_whole(spec, poisson(60, 10.0, seed)).table.columns()
    assert run.server["recomputed_tokens"].sum() > 0
    assert (run.server["stall_s"] >= 0).all()


def test_most_of_a_killed_instance_goes_on_from_copies_and_lacks_at_most_two_blocks_each() -> None:
    requests = [PlannedRequest(number, 0.0, RequestLengths(400, 300)) for number in range(24)]
    spec = copied(spec_of(decode_count=3), ReplicationMode.SPREAD)
    run = run_whole(with_deaths(spec, "decode-1", at_s=2.5, repair_s=None), requests).table.columns()
    resumed = run.server["resumes"] > 0
    assert resumed.sum() >= 4
    assert (run.server["recomputed_tokens"][resumed] <= 32).all()
    assert not run.server["recomputed_tokens"][~resumed].any(), "nothing was computed from the start"
    assert {decoder_of(run, number) for number in resumed.nonzero()[0]} == {"decode-0", "decode-2"}


def test_where_owner_and_holder_both_die_the_request_is_computed_again() -> None:
    spec = copied(spec_of(decode_count=3))
    owner = owner_of_lone(spec)
    other = f"decode-{(int(owner[-1]) + 1) % 3}"
    run = run_whole(with_deaths(spec, owner, other, repair_s=None), LONE).table.columns()
    assert decoder_of(run) not in (owner, other)
    assert losses(run) == (0, 0, 442)


def test_a_holder_that_dies_is_replaced_and_the_next_one_resumes() -> None:
    spec = copied(spec_of(decode_count=3))
    owner = owner_of_lone(spec)
    other = f"decode-{(int(owner[-1]) + 1) % 3}"
    deaths = (Death(instance_id=other, at_s=0.2), Death(instance_id=owner, at_s=DIES_S))
    run = run_whole(replace(spec, failures=dying(*deaths, repair_s=None)), LONE).table.columns()
    assert decoder_of(run) not in (owner, other)
    assert losses(run) == (1, 432, 10)


def test_a_copy_that_is_on_its_way_over_a_slow_link_has_only_what_was_sent() -> None:
    link = parse_link_speed("4Gbps,1MiB/token")
    spec = copied(spec_of(link=link))
    whole = run_whole(spec, LONE).table.columns()
    landed_s = float(whole.first_s[0] + whole.server["kv_tail_s"][0])
    blocks_per_s = 4e9 / 8 / (16 * 2**20)
    at_s = landed_s + 0.8
    run = run_whole(with_deaths(spec, decoder_of(whole), at_s=at_s), LONE).table.columns()
    resumes, held, recomputed = losses(run)
    assert (resumes, held) == (1, int(0.8 * blocks_per_s) * 16)
    drawn = held + recomputed - 400
    assert 1 < drawn < 100


def test_the_rate_of_copies_is_that_of_the_setting() -> None:
    spec = copied(spec_of(), blocks_per_s=40.0)
    run = run_whole(with_deaths(spec, owner_of_lone(spec)), LONE).table.columns()
    resumes, held, _ = losses(run)
    copied_s = DIES_S - PREFILL_S
    assert (resumes, held) == (1, int(40 * copied_s) * 16)


def test_a_full_holder_drops_short_copies_for_a_long_one_as_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int | None]] = []

    def drops(found: Any, token_count: int, free_bytes: int, needed_bytes: int) -> Any:
        dropped = drop_first(found, token_count, free_bytes, needed_bytes)
        asked.append((token_count, None if dropped is None else len(dropped)))
        return dropped

    monkeypatch.setattr(held_copies, "drop_first", drops)
    short, long = RequestLengths(300, 200), RequestLengths(1200, 200)
    requests = [PlannedRequest(number, 0.0, short) for number in range(12)]
    requests.append(PlannedRequest(12, 1.0, long))
    # The holder shows what is free with its heartbeats, so it is asked for what has just been taken.
    monkeypatch.setattr(copies, "choose_holder", lambda *args, **kw: next(iter(others(*args))))
    run_whole(copied(spec_of(), replica_blocks=90), requests)
    assert any(tokens > 1000 and dropped for tokens, dropped in asked)
    assert any(dropped is None for _, dropped in asked), "a short one has no room behind others as short"


@pytest.mark.parametrize("seed", [4, 23, 27])
def test_a_copy_that_was_dropped_takes_no_block_before_its_owner_hears_of_it(seed: int) -> None:
    spec = spec_of(300, decode_count=4, overheads=Overheads(hop_s=0.05), seed=seed)
    spec = copied(spec, ReplicationMode.SPREAD, replica_blocks=60, replica_min_tokens=1)
    run_whole(with_deaths(spec, "decode-0", at_s=3.0), poisson(40, 20.0, seed))


def others(_: object, view: Any, owner: Any, *__: object) -> list[ViewedInstance]:
    return [one for name, one in sorted(view.instances.items()) if name != owner.instance_id]


def test_a_request_that_its_holder_has_no_room_for_is_computed_again() -> None:
    spec = copied(spec_of(110, decode_count=3))
    owner = owner_of_lone(spec)
    holder_id = f"decode-{(int(owner[-1]) + 1) % 3}"
    simulation = Simulation(with_deaths(spec, owner, repair_s=None), LONE)
    pool = simulation.decodes[holder_id].engine.blocks

    def fill(free_blocks: int) -> None:
        pool.free_count = free_blocks

    simulation.timeline.at(0.05, fill, 3)
    simulation.timeline.at(DIES_S + 0.5, fill, pool.free_count)
    run = simulation.run().columns()
    check_conservation(simulation)
    assert losses(run) == (0, 0, 442)


def test_services_and_simulator_ask_the_same_functions_about_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies.choose_holder is replicator.choose_holder is choose_holder  # type: ignore[attr-defined]
    assert copies.CopyRules is replicator.CopyRules  # type: ignore[attr-defined]
    assert held_copies.drop_first is holder.drop_first  # type: ignore[attr-defined]
    assert router.is_worth_a_resume is holders.is_worth_a_resume  # type: ignore[attr-defined]
    spec = copied(spec_of())
    dies = with_deaths(spec, owner_of_lone(spec))
    assert losses(run_whole(dies, LONE).table.columns())[0] == 1
    with monkeypatch.context() as patched:
        patched.setattr(router, "is_worth_a_resume", lambda *_: False)
        assert losses(run_whole(dies, LONE).table.columns()) == (0, 0, 442)
    assert is_worth_a_resume is router.is_worth_a_resume
    monkeypatch.setattr(copies, "choose_holder", lambda *_, **__: None)
    assert losses(run_whole(dies, LONE).table.columns()) == (0, 0, 442)


def test_the_summary_of_a_run_counts_what_losses_have_cost() -> None:
    spec = copied(spec_of())
    run = run_whole(with_deaths(spec, owner_of_lone(spec)), LONE).table.columns()
    found = summarize(run, Slo())["losses"]
    assert {name: found[name] for name in found if name != "stall_s"} == {
        "requests": 1,
        "resumes": 1,
        "held_tokens": 432,
        "recomputed_tokens": 10,
    }
    assert found["stall_s"]["max"] == pytest.approx(float(run.server["stall_s"][0]))
