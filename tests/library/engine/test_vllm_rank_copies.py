"""Copies of KV to replicas from the pools of several ranks, in this process and without vLLM."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kaveri.engine.vllm import data_plane
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.rank import RankCall, RankSetup
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.errors import EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import token_note
from kaveri.kv.replicas.store import ReplicaDropped, ReplicaGrew, ReplicaKey, ReplicaOrphaned
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.push import PushFailed, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_recorder import EventLog

_LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=4, head_dim=8, dtype="float32", order="H-e", tensor_ranks=2)
_BLOCKS = 6
_KEY = ReplicaKey("r", 0, 1)


class _RankCopiesBench:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.pools = [KvPool(_LAYOUT.rank(rank), _BLOCKS) for rank in range(2)]
        for rank, pool in enumerate(self.pools):
            pool.memory[:] = np.random.default_rng(rank).integers(0, 256, pool.memory.shape, np.uint8)
        self.ranks = [RankPlane(_LAYOUT, pool) for pool in self.pools]
        self.plane = DataPlane(self.ranks, RankSetup((), None, 1, copy_slots=4), _unexpected, _unexpected)
        stack.callback(self.plane.close)
        self.pushed = EventLog()
        self.sender = self.plane.start(self.pushed, lambda *_: True)
        listen = [KvEndpoint("unix", str(folder / "replicas.sock"))]
        self.store = HostReplicas(_LAYOUT, 2**20, listen=listen, transports=make_transports(), epoch=1)
        stack.callback(self.store.close)
        self.held = EventLog()
        self.store.start(self.held)

    def open(self) -> Ticket:
        ticket = self.store.open(_KEY, _LAYOUT, 8, 60.0)
        self.sender.open(ticket)
        return ticket


def _unexpected(what: object) -> None:
    raise AssertionError(f"{what}, which is of no copy")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_RankCopiesBench]:
    with ExitStack() as stack:
        yield _RankCopiesBench(tmp_path, stack)


def test_every_rank_copies_its_heads_and_the_mark_counts_when_all_have_made_it(bench: _RankCopiesBench) -> None:
    ticket = bench.open()
    for index, (block_id, slot) in enumerate(((5, 3), (2, 0))):
        bench.plane.stage(block_id, slot)
        bench.sender.write_layers(ticket.transfer_id, range(_LAYOUT.layer_count), index, (slot,))
    bench.sender.mark(ticket.transfer_id, 2, token_note(range(8)))
    grew = bench.held.wait_for(ReplicaGrew)
    assert (grew.token_count, bench.store.token_ids(_KEY)) == (8, tuple(range(8)))
    assert bench.pushed.wait_for(PushMarked) == PushMarked(ticket.transfer_id, 2)
    assert len(bench.pushed.of(PushMarked)) == 1
    bench.sender.abort(ticket.transfer_id)
    bench.held.wait_for(ReplicaDropped)
    bench.pushed.wait_for(PushFailed)


def test_copy_that_one_rank_gives_up_ends_in_all(bench: _RankCopiesBench) -> None:
    ticket = bench.open()
    bench.ranks[1].do(RankCall("abort", (ticket.transfer_id,)))
    failed = bench.pushed.wait_for(PushFailed)
    assert failed.transfer_id == ticket.transfer_id
    bench.held.wait_for(ReplicaDropped)
    assert len(bench.pushed.of(PushFailed)) == 1


def test_copy_that_fails_in_one_rank_is_kept_by_its_holder_as_far_as_it_was_marked(
    bench: _RankCopiesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's connection closes, and the other rank's push is then aborted."""
    calls: list[RankCall] = []
    do = bench.ranks[0].do
    monkeypatch.setattr(bench.ranks[0], "do", lambda call: (calls.append(call), do(call)))
    ticket = bench.open()
    bench.plane.stage(5, 3)
    bench.sender.write_layers(ticket.transfer_id, range(_LAYOUT.layer_count), 0, (3,))
    bench.sender.mark(ticket.transfer_id, 1, token_note(range(4)))
    bench.held.wait_for(ReplicaGrew)
    bench.ranks[1].detach()
    bench.held.wait_for(ReplicaOrphaned)
    bench.pushed.wait_for(PushFailed)
    assert RankCall("abort", (ticket.transfer_id,), {"keep_marked": True}) in calls
    assert bench.store.token_ids(_KEY) == tuple(range(4))


def test_rank_that_copies_nothing_is_not_waited_for_without_end(
    bench: _RankCopiesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "_STAGED_TIMEOUT_S", 0.05)
    do = bench.ranks[1].do

    def lose(call: RankCall) -> None:
        if call.method != "stage":
            do(call)

    monkeypatch.setattr(bench.ranks[1], "do", lose)
    with pytest.raises(EngineError, match="a rank has not copied a block"):
        bench.plane.stage(0, 0)
