"""An owner dies, hangs or is cut off, or a holder: answers go on from copies, and no prompt is computed again."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from kaveri.domain.replica import Resumption
from kaveri.domain.view import DrainWay
from kaveri.errors import NoCapacity
from kaveri.policy.replication import ReplicationMode
from kaveri.text.tokenizer import ModelTokenizer
from services.decode.instance import DecodeInstance
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.schedule import ScheduleResult, run_schedule

BLOCK_TOKENS = 16
_WHOLE = "log info replica_held request_id=moved"
"""The owner has found a holder: some blocks later the copy is whole but for the last ones."""


def replicated(faults: Sequence[Fault], decodes: int = 2, **settings: object) -> Plan:
    """A long answer of a long prompt, at one of so many decode instances, which replicate in pairs or in a ring."""
    fields: dict[str, object] = {
        "max_model_len": 320,
        "replication": ReplicationMode.RING,
        "replica_min_tokens": 32,
        "divergent": True,
    }
    requests = [request("before", max_tokens=2), request("moved", 0.5, prompt_tokens=100, max_tokens=120)]
    instances = cluster(prefills=1, decodes=decodes, step_s=0.02)
    return story(instances, requests, faults, **fields | settings)


def run(plan: Plan, tokenizer: ModelTokenizer) -> ScheduleResult:
    result = run_schedule(plan, tokenizer, lines=True)
    assert result.violations == []
    assert result.counts["phase:rest"] == 1
    return result


def prompts_of(result: ScheduleResult, request_id: str = "moved") -> int:
    """How often a prefill instance was asked for the request."""
    called = [line for line in result.lines if "start      /kaveri.v1.PrefillService/Submit " in line]
    return sum(f'request_id: "{request_id}"' in line for line in called)


def resumed(result: ScheduleResult) -> list[tuple[int, int]]:
    """Tokens held and computed again, of each resume."""
    found = (re.search(r"request_resumed .*held_tokens=(\d+) recomputed_tokens=(\d+)", line) for line in result.lines)
    return [(int(match[1]), int(match[2])) for match in found if match]


def owner_of(tokenizer: ModelTokenizer, **settings: object) -> tuple[str, str]:
    """Who owns the request, and who holds its copy, in a plan without faults."""
    result = run(replicated([], **settings), tokenizer)  # type: ignore[arg-type]
    line = next(line for line in result.lines if _WHOLE in f"log {line.partition('log ')[2].strip()}")
    owner = re.search(r"owner_id=(\S+)", line)
    assert owner is not None
    holder = line.split()[1].partition("/")[0].partition("#")[0]
    return owner[1], holder


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": FaultKind.KILL},
        {"kind": FaultKind.RESTART, "lasts_s": 0.3},
        {"kind": FaultKind.ENGINE, "lasts_s": 0.3},
        {"kind": FaultKind.FREEZE, "lasts_s": 5.0},
        {"kind": FaultKind.ISOLATE, "lasts_s": 5.0},
        {"kind": FaultKind.CUT, "other": "router-0", "lasts_s": 5.0},
    ],
    ids=lambda fault: str(fault["kind"]),
)
def test_an_answer_goes_on_at_the_holder_and_its_prompt_is_computed_once(
    tokenizer: ModelTokenizer, fault: dict[str, object]
) -> None:
    owner, _ = owner_of(tokenizer)
    result = run(replicated([Fault(at_s=1.0, after=_WHOLE, target=owner, **fault)]), tokenizer)  # type: ignore[arg-type]
    ((held, recomputed),) = resumed(result)
    assert recomputed <= 2 * BLOCK_TOKENS, (held, recomputed)
    assert prompts_of(result) == 1


@pytest.mark.parametrize("kind", [None, FaultKind.KILL, FaultKind.FREEZE])
def test_an_answer_whose_owner_is_lost_between_its_last_token_and_the_router_ends_from_the_copy(
    tokenizer: ModelTokenizer, kind: FaultKind | None
) -> None:
    """The copy went with the answer, and the router placed the request again: the prompt was computed twice."""
    owner, _ = owner_of(tokenizer)
    # The last tokens of the answer never come.
    faults = [Fault(kind=FaultKind.CUT_ONE_WAY, after=_WHOLE, at_s=2.2, target=owner, other="router-0", lasts_s=5.0)]
    ended = "log info request_ended request_id=moved attempt=1 session=0 outcome=finished"
    if kind is not None:
        faults.append(Fault(kind=kind, after=ended, at_s=0.05, target=owner, lasts_s=4.0))
    result = run(replicated(faults), tokenizer)
    ends = [
        float(line.split()[0]) for line in result.lines if "outcome=finished" in line and "request_id=moved" in line
    ]
    lost = next(float(line.split()[0]) for line in result.lines if "stream_broken" in line)
    assert ends[0] < lost, "the answer was not complete at its owner"
    ((held, recomputed),) = resumed(result)
    assert recomputed <= 2 * BLOCK_TOKENS, (held, recomputed)
    assert prompts_of(result) == 1


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.FREEZE, FaultKind.DRAIN, FaultKind.RESET])
def test_no_request_waits_for_a_lost_holder_and_it_is_replaced(tokenizer: ModelTokenizer, kind: FaultKind) -> None:
    settings = {"decodes": 3}
    owner, holder = owner_of(tokenizer, **settings)
    lost = Fault(kind=kind, after=_WHOLE, at_s=0.5, target=holder, other=owner if kind is FaultKind.RESET else "")
    result = run(replicated([lost], **settings), tokenizer)  # type: ignore[arg-type]
    assert prompts_of(result) == 1
    assert not resumed(result)
    # A frozen holder keeps the copy; a reset may hit another connection.
    if kind in (FaultKind.KILL, FaultKind.DRAIN):
        held = [line for line in result.lines if "log        info replica_held request_id=moved" in line]
        assert len(held) == 2, "no other one was found"


def test_a_request_that_its_holder_has_no_room_for_is_computed_again(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = owner_of(tokenizer, decodes=3)

    async def is_full(self: DecodeInstance, resumption: Resumption, held_tokens: int) -> Any:
        raise NoCapacity("decode", 0.1, "the pool is full")

    monkeypatch.setattr(DecodeInstance, "reserve_resumed", is_full)
    result = run(replicated([Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=1.0, target=owner)], decodes=3), tokenizer)
    assert not resumed(result)
    assert prompts_of(result) == 2


def test_when_owner_and_holder_die_the_prompt_is_computed_again(tokenizer: ModelTokenizer) -> None:
    owner, holder = owner_of(tokenizer, decodes=3)
    faults = [Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=1.0, target=name) for name in (owner, holder)]
    result = run(replicated(faults, decodes=3), tokenizer)
    assert prompts_of(result) == 2
    assert not resumed(result)


def test_a_resumed_answer_has_a_copy_again_and_survives_another_death(tokenizer: ModelTokenizer) -> None:
    owner, holder = owner_of(tokenizer, decodes=3)
    faults = [
        Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=0.5, target=owner),
        Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=1.3, target=holder),
    ]
    result = run(replicated(faults, decodes=3), tokenizer)
    assert len(resumed(result)) == 2
    assert prompts_of(result) == 1


def test_an_owner_that_wakes_draws_no_more_and_leaves_nothing(tokenizer: ModelTokenizer) -> None:
    owner, _ = owner_of(tokenizer, decodes=3)
    frozen = Fault(kind=FaultKind.FREEZE, after=_WHOLE, at_s=0.5, target=owner, lasts_s=1.2)
    result = run(replicated([frozen], decodes=3), tokenizer)
    assert len(resumed(result)) == 1
    assert prompts_of(result) == 1


def test_answers_of_owner_and_router_that_die_together_go_on(tokenizer: ModelTokenizer) -> None:
    owner, _ = owner_of(tokenizer)
    faults = [
        Fault(kind=FaultKind.RESTART, after=_WHOLE, at_s=1.0, target=name, lasts_s=0.5) for name in (owner, "router-0")
    ]
    plan = replicated(faults)
    result = run(plan, tokenizer)
    assert prompts_of(result) >= 1


@pytest.mark.parametrize(("seed", "owner"), [(0, "decode-1"), (3, "decode-0")])
@pytest.mark.parametrize("least_tokens", [88, 104])
def test_a_copy_that_is_refused_to_a_former_owner_takes_nothing_from_the_present_one(
    tokenizer: ModelTokenizer, seed: int, owner: str, least_tokens: int
) -> None:
    """The router lost the owner and began the request at the holder, then died. The client re-attached to the owner.
    Only now the holder answered what it was asked for the first session: the owner ended the request without a word."""
    other = "decode-1" if owner == "decode-0" else "decode-0"
    second_place = {"after": "start /kaveri.v1.DecodeService/Reserve", "after_count": 2}
    faults = [
        Fault(kind=FaultKind.SLOW, at_s=0.0, target=owner, other=other, amount=0.4, lasts_s=4.0),
        Fault(kind=FaultKind.CUT, at_s=0.3, target="router-0", other=owner, lasts_s=5.0),
        Fault(kind=FaultKind.KILL, at_s=0.001, target="router-0", **second_place),  # type: ignore[arg-type]
    ]
    requests = [
        request("moved", prompt_tokens=60, max_tokens=200),
        request("after", 5.0, max_tokens=2, router="router-1"),
    ]
    settings: dict[str, object] = {"replication": ReplicationMode.SPREAD, "replica_min_tokens": least_tokens}
    plan = story(cluster(routers=2, decodes=2, step_s=0.02), requests, faults, seed, max_model_len=320, **settings)
    result = run(plan, tokenizer)
    assert any("replica_refused request_id=moved" in line for line in result.lines)
    assert result.counts["outcome:length"] == 2 + 4


@pytest.mark.parametrize("later_s", [0.02, 0.05])
def test_a_client_finds_its_request_where_it_was_resumed_before_anyone_could_say_so(
    tokenizer: ModelTokenizer, later_s: float
) -> None:
    """Owner and router died, the router after it had resumed the request. Prefill still kept that it was at the dead
    owner, and was asked before the instance where it went on: the prompt was computed again."""
    faults = [
        Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=1.0, target="decode-0"),
        Fault(kind=FaultKind.KILL, after="start /kaveri.v1.DecodeService/Resume", at_s=later_s, target="router-0"),
    ]
    requests = [
        request("moved", prompt_tokens=100, max_tokens=200),
        request("after", 5.0, max_tokens=2, router="router-1"),
    ]
    settings: dict[str, object] = {"replication": ReplicationMode.SPREAD, "replica_min_tokens": 32}
    plan = story(cluster(routers=2, decodes=3, step_s=0.02), requests, faults, 0, max_model_len=320, **settings)
    result = run(plan, tokenizer)
    assert prompts_of(result) == 1
    assert sum(recomputed for _, recomputed in resumed(result)) <= 2 * BLOCK_TOKENS


_PAIRS: dict[str, Any] = {
    "replication": ReplicationMode.PAIR,
    "replica_place": "pool",
    "prefills_hold_copies": True,
}
"""The prompt's KV stays where it was computed, and the instance that decodes extends it there."""
_KEPT = "log info kv_kept request_id=moved"


@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.02, 0.1, 0.7])
def test_no_prompt_is_computed_again_whenever_the_instance_that_decodes_it_dies(
    tokenizer: ModelTokenizer, delay_s: float
) -> None:
    owner, holder = owner_of(tokenizer, **_PAIRS)
    assert holder == "prefill-0"
    result = run(replicated([Fault(kind=FaultKind.KILL, after=_KEPT, at_s=delay_s, target=owner)], **_PAIRS), tokenizer)
    assert prompts_of(result) == 1
    # It goes on where the prompt was computed, which hands it to an instance that decodes.
    (held, recomputed), *moves = resumed(result)
    assert held >= 100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert recomputed <= 2 * BLOCK_TOKENS
    assert all(again == 1 for _, again in moves), moves


def test_an_answer_whose_prompt_was_kept_outlives_the_holder_and_has_a_copy_elsewhere(
    tokenizer: ModelTokenizer,
) -> None:
    owner, holder = owner_of(tokenizer, **_PAIRS)
    result = run(replicated([Fault(kind=FaultKind.KILL, after=_WHOLE, at_s=0.3, target=holder)], **_PAIRS), tokenizer)
    assert prompts_of(result) == 1
    assert not resumed(result)
    held = [line for line in result.lines if "log        info replica_held request_id=moved" in line]
    assert [line.split()[1].partition("#")[0] for line in held] == ["prefill-0", f"decode-{1 - int(owner[-1])}"]


def test_an_instance_that_drains_moves_an_answer_whose_copy_is_where_prompts_are_computed(
    tokenizer: ModelTokenizer,
) -> None:
    owner, _ = owner_of(tokenizer, **_PAIRS)
    drain = Fault(kind=FaultKind.DRAIN, after=_WHOLE, at_s=0.3, target=owner)
    result = run(replicated([drain], **_PAIRS), tokenizer)
    assert prompts_of(result) == 1
    assert resumed(result)[0][1] == 1, "it was cut off, not moved"
    (line,) = (line for line in result.lines if "request_resumed" in line)
    assert line.split()[1].startswith(f"decode-{1 - int(owner[-1])}#")


def test_an_instance_that_an_answer_has_left_keeps_its_kv_and_holds_the_next_copy(tokenizer: ModelTokenizer) -> None:
    owner, _ = owner_of(tokenizer, **_PAIRS)
    other = f"decode-{1 - int(owner[-1])}"
    flip = Fault(
        kind=FaultKind.FLIP, after=_WHOLE, at_s=0.3, target=owner, other="prefill", drain=DrainWay.MIGRATE, lasts_s=9.0
    )
    result = run(replicated([flip], **_PAIRS), tokenizer)
    assert prompts_of(result) == 1
    assert [again for _, again in resumed(result)] == [1]
    kept = [line for line in result.lines if "kv_kept request_id=moved" in line and f" {owner}#" in line]
    assert len(kept) == 1
    granted = [line for line in result.lines if f"{other}#1" in line and "DecodeService/OpenReplica" in line]
    (ticket,) = (line for line in granted if "first_block" in line)
    (first_block,) = map(int, re.findall(r"first_block: (\d+)", ticket))
    assert first_block * BLOCK_TOKENS > 100, "only what was drawn behind the prompt is new"


def _partners_ordered(lines: Sequence[str]) -> list[tuple[str, str]]:
    """(process, partner) of each order of a partner that an instance has logged, sorted."""
    found = [re.search(r" (\S+) +log +info partner_ordered .*partner_id=(\S*)", line) for line in lines]
    return sorted((one[1], one[2]) for one in found if one is not None)


def paired(faults: Sequence[Fault], decodes: int = 3) -> Plan:
    requests = [request("early", 1.0, prompt_tokens=100, max_tokens=40), request("late", 12.0, max_tokens=4)]
    instances = cluster(routers=2, decodes=decodes, step_s=0.02)
    return story(instances, requests, faults, max_model_len=320, replication=ReplicationMode.PAIR)


def test_the_partner_of_a_dead_instance_is_paired_with_the_one_left_over(tokenizer: ModelTokenizer) -> None:
    result = run(paired([Fault(kind=FaultKind.KILL, at_s=2.0, target="decode-0")]), tokenizer)
    assert _partners_ordered(result.lines) == [
        ("decode-0#1", "decode-1"),
        ("decode-1#1", "decode-0"),
        ("decode-1#1", "decode-2"),
        ("decode-2#1", "decode-1"),
    ]


def test_an_instance_that_is_back_as_a_new_life_gets_its_partner_back(tokenizer: ModelTokenizer) -> None:
    restart = Fault(kind=FaultKind.RESTART, at_s=2.0, target="decode-0", lasts_s=0.2)
    result = run(paired([restart], decodes=2), tokenizer)
    assert _partners_ordered(result.lines) == [
        ("decode-0#1", "decode-1"),
        ("decode-0#2", "decode-1"),
        ("decode-1#1", "decode-0"),
    ]


@pytest.mark.parametrize("kind", [FaultKind.STORE_AWAY, FaultKind.STORE_EMPTIED])
def test_pairs_outlast_the_store(tokenizer: ModelTokenizer, kind: FaultKind) -> None:
    result = run(paired([Fault(kind=kind, at_s=2.0, lasts_s=4.0)]), tokenizer)
    assert _partners_ordered(result.lines) == [("decode-0#1", "decode-1"), ("decode-1#1", "decode-0")]


def test_a_new_leader_gives_no_order_of_a_partner_again(tokenizer: ModelTokenizer) -> None:
    leader = r"(router-\d)#1 +log +info monitor_lead_taken"
    (former,) = {one[1] for line in run(paired([]), tokenizer).lines if (one := re.search(leader, line)) is not None}
    result = run(paired([Fault(kind=FaultKind.KILL, at_s=2.0, target=former)]), tokenizer)
    assert len([line for line in result.lines if re.search(leader, line)]) == 2
    assert _partners_ordered(result.lines) == [("decode-0#1", "decode-1"), ("decode-1#1", "decode-0")]


def test_an_instance_that_begins_to_decode_takes_its_share_of_its_partners_requests(tokenizer: ModelTokenizer) -> None:
    requests = [request(f"r{number}", 1.0, prompt_tokens=40, max_tokens=250) for number in range(8)]
    plan = story(
        # So many blocks that instances level nothing but within pairs.
        cluster(routers=1, prefills=2, decodes=1, step_s=0.03, block_count=2000),
        requests,
        [Fault(kind=FaultKind.FLIP, at_s=2.0, target="prefill-0", other="decode", lasts_s=20.0)],
        max_model_len=320,
        **_PAIRS | {"replica_min_tokens": 16},
    )
    result = run(plan, tokenizer)
    assert ("decode-0#1", "prefill-0") in _partners_ordered(result.lines)
    moved = [line for line in result.lines if "request_resumed" in line]
    assert {line.split()[1] for line in moved} == {"prefill-0#1"}
    # Those whose prompts it has computed, of which it has kept the KV.
    assert 2 <= len(moved) <= 4
    assert sum(prompts_of(result, one.request_id) for one in requests) == len(requests)
    assert {again for _, again in resumed(result)} == {1}
