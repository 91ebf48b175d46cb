import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kaveri.domain.view import ClusterView, Phase
from kaveri.policy.admission import DecodeBatch, admitted_count, kept_blocks
from kaveri.policy.demand import Demand
from kaveri.policy.growth import BatchGrowth, BatchMember
from kaveri.policy.ordering import order_prompts
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy, choose_decode, choose_prefill
from kaveri.policy.plugins import (
    BatchAdmission,
    DecodePlacement,
    Guarded,
    HolderPlacement,
    Option,
    PrefillPlacement,
    PromptOrder,
    RunningBatch,
)
from kaveri.policy.replication import ReplicationMode, choose_holder
from kaveri.policy.unconfirmed import UnconfirmedWork
from tests.library.policy.views import LAYOUT, MODEL, instance, view_of


class _Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


def _raise(*_: Any) -> Any:
    raise RuntimeError("out of ideas")


def _raise_unprintable(*_: Any) -> Any:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for this")

    raise UnspeakableError


BAD_PLACEMENTS: list[Callable[..., Any]] = [
    _raise,
    _raise_unprintable,
    lambda *_: None,
    lambda *_: "i99",
    lambda *_: 1,
    lambda *_: ["i1"],
    lambda *_: _Unspeakable(),
    lambda options, *_: options[0],
]


def _plugin(kind: type[Any], decide: Callable[..., Any]) -> Any:
    """Return a plug-in of the given kind whose one method is `decide`."""
    (method,) = kind.__abstractmethods__
    return type("_Plugin", (kind,), {method: lambda self, *arguments: decide(*arguments)})()


class _Prompt:
    def __init__(self, token_count: int) -> None:
        self.token_count = token_count


def _view(phase: Phase, *loads: dict[str, int]) -> ClusterView:
    return view_of(*(instance(f"i{number}", (phase,), layout=LAYOUT, **load) for number, load in enumerate(loads)))


def _id(chosen: Any) -> str | None:
    return None if chosen is None else chosen.record.instance_id


def _chosen_prefill(view: ClusterView, policy: Any, **given: Any) -> str | None:
    unconfirmed: UnconfirmedWork[str] = given.pop("unconfirmed", UnconfirmedWork())
    return _id(choose_prefill(view, MODEL, unconfirmed, policy, random.Random(7), **given))


PREFILLS = _view(Phase.PREFILL, {}, {"queued_prefill_tokens": 90}, {"queue_room": 0})
DECODES = _view(Phase.DECODE, *({"free_blocks": blocks, "total_blocks": 9} for blocks in (9, 9, 2)))
HOLDERS = _view(Phase.DECODE, *({"replica_free_bytes": size, "replica_total_bytes": 99} for size in (99, 99, 99, 1)))


def test_a_plug_in_chooses_among_the_prefill_instances_that_take_the_request() -> None:
    seen: list[Sequence[Option]] = []
    unconfirmed: UnconfirmedWork[str] = UnconfirmedWork()
    unconfirmed.add("a", PREFILLS.ready(Phase.PREFILL, MODEL)[0], 40)
    faults: list[str] = []
    policy = Guarded(_plugin(PrefillPlacement, lambda options, _: (seen.append(options), "i1")[1]), faults.append)
    assert _chosen_prefill(PREFILLS, policy, unconfirmed=unconfirmed) == "i1"
    assert [(option.instance_id, option.sent_count, option.sent_amount) for option in seen[0]] == [
        ("i0", 1, 40),
        ("i1", 0, 0),
    ]
    assert faults == []


def test_a_plug_in_is_not_shown_what_is_avoided_or_full() -> None:
    seen: list[list[str]] = []

    def decide(options: Sequence[Option], *_: Any) -> str:
        seen.append([option.instance_id for option in options])
        return options[-1].instance_id

    policy = Guarded(_plugin(PrefillPlacement, decide), _raise)
    assert _chosen_prefill(PREFILLS, policy, avoid={"i1"}) == "i0"
    assert _chosen_prefill(PREFILLS, policy, avoid={"i0", "i1"}) == "i1"
    assert _chosen_prefill(PREFILLS, policy, exclude={"i0", "i1"}) is None
    demand = Demand(tokens=4 * LAYOUT.block_tokens, layout=LAYOUT)
    decode = Guarded(_plugin(DecodePlacement, decide), _raise)
    assert _id(choose_decode(DECODES, MODEL, demand, UnconfirmedWork[str](), decode, random.Random(0))) == "i1"
    assert seen == [["i0"], ["i0", "i1"], ["i0", "i1"]]


@pytest.mark.parametrize("decide", BAD_PLACEMENTS)
def test_what_a_placement_raises_or_answers_wrongly_is_reported_and_the_default_decides(
    decide: Callable[..., Any],
) -> None:
    faults: list[str] = []
    policy = Guarded(_plugin(PrefillPlacement, decide), faults.append)
    assert _chosen_prefill(PREFILLS, policy) == _chosen_prefill(PREFILLS, PlacementPolicy.POWER_OF_TWO)
    demand, power_of_two = Demand(tokens=1, layout=LAYOUT), DecodePlacementPolicy.POWER_OF_TWO
    chosen = [
        _id(choose_decode(DECODES, MODEL, demand, UnconfirmedWork[str](), decides, random.Random(3)))
        for decides in (Guarded(_plugin(DecodePlacement, decide), faults.append), power_of_two)
    ]
    assert chosen[0] == chosen[1] is not None
    owner = HOLDERS.instances["i0"].record
    holders = [
        _id(choose_holder(decides, HOLDERS, owner, 50, UnconfirmedWork[str](), random.Random(3)))
        for decides in (Guarded(_plugin(HolderPlacement, decide), faults.append), ReplicationMode.SPREAD)
    ]
    assert holders[0] == holders[1] is not None
    assert len(faults) == 3
    assert all(fault.startswith(("raised ", "answered ")) for fault in faults)


def test_a_plug_in_chooses_the_holder_of_a_copy_and_never_the_owner() -> None:
    owner, seen = HOLDERS.instances["i0"].record, []

    def decide(options: Sequence[Option], *_: Any) -> str:
        seen.extend(option.instance_id for option in options)
        return "i2"

    policy = Guarded(_plugin(HolderPlacement, decide), _raise)
    assert _id(choose_holder(policy, HOLDERS, owner, 50, UnconfirmedWork[str](), random.Random(0))) == "i2"
    assert seen == ["i1", "i2"]
    assert choose_holder(policy, HOLDERS, owner, 100, UnconfirmedWork[str](), random.Random(0)) is None


def test_a_plug_in_orders_prompts() -> None:
    prompts = [_Prompt(5), _Prompt(3), _Prompt(9)]
    order = Guarded(_plugin(PromptOrder, lambda counts: sorted(range(len(counts)), key=counts.__getitem__)), _raise)
    assert [prompt.token_count for prompt in order_prompts(order, prompts)] == [3, 5, 9]


@pytest.mark.parametrize(
    "decide", [_raise, lambda _: [0, 1], lambda _: [0, 1, 1], lambda _: [0, 1, 3], lambda _: None, lambda _: "012"]
)
def test_an_order_that_loses_or_repeats_a_prompt_is_first_come_first_served(decide: Callable[..., Any]) -> None:
    prompts, faults = [_Prompt(5), _Prompt(3), _Prompt(9)], list[str]()
    assert order_prompts(Guarded(_plugin(PromptOrder, decide), faults.append), prompts) == prompts
    assert len(faults) == 1


def test_a_plug_in_admits_some_of_the_landed_requests_and_keeps_no_blocks() -> None:
    asked: list[RunningBatch] = []
    batch, landed = BatchGrowth(16), [BatchMember(10)] * 5
    batch.add(1, BatchMember(16, 20))
    policy = Guarded(
        _plugin(BatchAdmission, lambda running, members: (asked.append(running), len(members) - 1)[1]), _raise
    )
    assert admitted_count(policy, batch, iter(landed), 4, 30) == 3
    assert asked == [RunningBatch(1, 4, 30, batch.until_first_ends(), batch.until_all_end())]
    assert admitted_count(policy, batch, iter(landed), 0, 30) == 0
    assert kept_blocks(policy, batch) == 0
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [-1, 6, True, 2.0, None, "1"])
def test_a_number_that_cannot_be_admitted_is_reported_and_all_that_fit_are(answer: object) -> None:
    faults: list[str] = []
    policy = Guarded(_plugin(BatchAdmission, lambda *_: answer), faults.append)
    running = BatchGrowth(16)
    running.add(1, BatchMember(16))
    assert admitted_count(policy, running, [BatchMember(10)] * 5, 3, 30) == 3
    assert len(faults) == 1


def test_a_plug_in_that_admits_none_cannot_keep_an_idle_instance_idle() -> None:
    faults: list[str] = []
    batch = DecodeBatch(Guarded(_plugin(BatchAdmission, lambda *_: 0), faults.append), 16, 8)
    batch.expect(1, BatchMember(10), 0.0)
    batch.land(1)
    assert batch.admissible(30) == (1,)
    assert faults == ["answered 0, which is no number of requests from 1 to 1"]
