"""Replicator over an engine that does nothing: copies of requests that end during a move."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import ClusterView, DrainWay, InstanceLoad, InstanceRecord, InstanceStatus, Role
from kaveri.engine.contract import EngineKey, EngineRequest, LetGo, ReplicaEnded
from kaveri.lives.copy_owner import Alone, Copied, Holder, Leaving, Moving
from kaveri.lives.decoding import Ended, Landed, Outcome, Running
from kaveri.policy.balance import Moves
from kaveri.policy.growth import BatchMember
from kaveri.policy.replication import CopyRules
from services.decode import replicator as decode_replicator
from services.decode.replica_metrics import ReplicaMetrics
from services.decode.replicator import Replicator, _Owned
from services.decode.requests import AnswerLog, DecodeRequest

KEY = EngineKey("r", 1)
HOLDER = Holder("d1", 1, "127.0.0.1:1", 3)


class EmptyInstance:
    def __init__(self) -> None:
        self.owners = SimpleNamespace(feeds=SimpleNamespace(has=lambda router_id: True))
        self.moved: list[DecodeRequest] = []

    def landed(self) -> tuple[()]:
        return ()

    def move(self, request: DecodeRequest, replica: object) -> None:
        self.moved.append(request)


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instance = EmptyInstance()
        self.closed: list[Holder] = []
        store = SimpleNamespace(view=lambda: ClusterView({}))
        engine: Any = SimpleNamespace(info=SimpleNamespace(layout=SimpleNamespace(block_tokens=4)))
        registry = ReplicaMetrics(CollectorRegistry())
        self.replicator = Replicator(
            engine,
            self.instance,  # type: ignore[arg-type]
            store,  # type: ignore[arg-type]
            InstanceRecord("d0", 1, Role.ENGINE, "127.0.0.1:0", "m"),
            CopyRules(),
            random.Random(1),
            registry,
        )

        async def close(request: DecodeRequest, holder: Holder) -> None:
            self.closed.append(holder)

        monkeypatch.setattr(self.replicator, "_close", close)
        engine_request = EngineRequest(KEY, (1, 2, 3), 0, ResolvedParams(max_tokens=20, seed=0))
        ownership = Ownership(Term(0, 1), "router-0", bytes(16))
        self.request = DecodeRequest(
            "r", engine_request, ownership, 0.0, 60.0, BatchMember(3, 20), Landed(0.0), AnswerLog(1, 1)
        )
        self.replicator._owned[KEY] = _Owned(self.request, Moving(HOLDER, 0, 0), ownership)

    async def look(self) -> None:
        async with self.replicator._tasks:
            self.replicator._look()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.parametrize(("outcome", "closes"), [(Outcome.ABORTED, True), (Outcome.FAILED, False)])
async def test_the_copy_of_a_request_that_fails_while_it_is_let_go_is_left_to_its_router(
    bench: Bench, outcome: Outcome, closes: bool
) -> None:
    bench.request.state = Ended(outcome)
    await asyncio.wait_for(bench.look(), 5)
    assert bench.closed == ([HOLDER] if closes else [])


async def test_the_copy_of_a_request_that_was_aborted_before_its_holder_had_all_is_closed(bench: Bench) -> None:
    bench.request.state = Ended(Outcome.ABORTED)
    bench.replicator.handle([LetGo(KEY, 3)])
    await asyncio.wait_for(bench.look(), 5)
    assert bench.closed == [HOLDER]
    assert not bench.instance.moved


@pytest.mark.parametrize("holds_blocks", [True, False])
async def test_a_preempted_request_is_not_let_go_before_it_draws_again(bench: Bench, holds_blocks: bool) -> None:
    bench.request.state = Running(0.0, 0.0, 2, holds_blocks=holds_blocks)
    bench.replicator.drain(DrainWay.MIGRATE)
    assert bench.replicator._moves(bench.request) is holds_blocks


@pytest.mark.parametrize("life", [HOLDER.incarnation, HOLDER.incarnation + 1])
async def test_a_request_is_let_go_only_to_the_life_of_its_holder_that_has_the_copy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, life: int
) -> None:
    record = InstanceRecord(HOLDER.instance_id, life, Role.ENGINE, HOLDER.address, "m")
    view = ClusterView({HOLDER.instance_id: InstanceStatus(record, InstanceLoad())})
    monkeypatch.setattr(bench.replicator._store, "view", lambda: view)
    monkeypatch.setattr(bench.replicator, "_needed_blocks", lambda request: 1)
    monkeypatch.setattr(bench.replicator, "_has_room", lambda instance, request: True)
    monkeypatch.setattr(bench.replicator._engine, "release", lambda key, timeout_s: None, raising=False)
    bench.request.state = Running(0.0, 0.0, 2)
    owned = bench.replicator._owned[KEY]
    owned.copy = Copied(HOLDER, 0, 3)
    bench.replicator.drain(DrainWay.MIGRATE)
    bench.replicator._move_some()
    assert isinstance(owned.copy, Moving) is (life == HOLDER.incarnation)


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_request_leaves_for_its_planned_instance_only_with_a_copy_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Else the holder of its copy drops that first, as the engine copies to one at a time."""
    target = InstanceRecord("d1" if is_there else "d2", HOLDER.incarnation, Role.ENGINE, "127.0.0.1:2", "m")
    monkeypatch.setattr(decode_replicator, "plan_moves", lambda *_: Moves(target, (KEY,)))
    record = InstanceRecord(HOLDER.instance_id, HOLDER.incarnation, Role.ENGINE, HOLDER.address, "m")
    view = ClusterView({HOLDER.instance_id: InstanceStatus(record, InstanceLoad())})
    monkeypatch.setattr(bench.replicator._store, "view", lambda: view)
    monkeypatch.setattr(bench.replicator, "_needed_blocks", lambda request: 1)
    monkeypatch.setattr(bench.replicator, "_has_room", lambda instance, request: True)
    monkeypatch.setattr(bench.replicator._engine, "release", lambda key, timeout_s: None, raising=False)
    monkeypatch.setattr(bench.instance, "landed", lambda: (bench.request,))
    bench.request.state = Running(0.0, 0.0, 2)
    owned = bench.replicator._owned[KEY]
    owned.copy = Copied(HOLDER, 0, 3)
    bench.replicator._plan = Moves(target, (KEY,))
    bench.replicator._move_some()
    assert isinstance(owned.copy, Moving) is is_there
    await asyncio.wait_for(bench.look(), 5)
    assert type(owned.copy) is (Moving if is_there else Leaving)
    assert bench.closed == ([] if is_there else [HOLDER])
    bench.replicator.handle([ReplicaEnded(KEY, "the holder has dropped it")])
    assert isinstance(owned.copy, Alone)
    # Its holder did nothing wrong, and is asked again.
    assert bool(bench.replicator._resting_until_s) is is_there
