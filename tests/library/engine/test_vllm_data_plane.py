"""KV transfers of an engine with several ranks, over real pools, senders and receivers, in one process or several."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kaveri.engine.kv_plane import Granted
from kaveri.engine.vllm import remote_rank
from kaveri.engine.vllm.rank import RankCall
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.engine.vllm.rank_server import serve_rank
from kaveri.engine.vllm.remote_rank import RankMeeting
from kaveri.errors import ConfigError, InvalidArgument, LayoutMismatch
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, require_pushable
from tests.library.engine.plane_instance import BLOCKS, SOON_S, PlaneInstance, compute_prompt

RANKS = 2
LAYOUT = KvLayout("model", 2, block_tokens=4, kv_head_count=4, head_dim=8, dtype="float32", tensor_ranks=RANKS)


class RankMemory:
    def __init__(self, rank: int, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        self.pool = KvPool(layout.rank(rank), BLOCKS)
        self.plane = RankPlane(layout, self.pool)
        self.pool.memory[:] = 0

    def fill(self, seed: int) -> None:
        self.pool.memory[:] = np.random.default_rng(seed).integers(0, 256, self.pool.memory.shape, np.uint8)

    def compute(self, number: str, block_ids: Sequence[int]) -> None:
        compute_prompt(self.plane, self.layout, number, block_ids)


class DataPlanePair:
    def __init__(self, folder: Path, transport: str) -> None:
        address = "127.0.0.1:0" if transport == "tcp" else str(folder / "kv.sock")
        self.sources = [RankMemory(rank) for rank in range(RANKS)]
        self.targets = [RankMemory(rank) for rank in range(RANKS)]
        self.sending = PlaneInstance([memory.plane for memory in self.sources])
        self.receiving = PlaneInstance([memory.plane for memory in self.targets], [KvEndpoint(transport, address)])


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DataPlanePair]:
    made = DataPlanePair(tmp_path, request.param)
    yield made
    made.sending.plane.close()
    made.receiving.plane.close()


def test_a_push_that_is_aborted_ends_in_every_rank(pair: DataPlanePair) -> None:
    ticket = pair.receiving.grant(LAYOUT, [5, 1, 6])
    pair.sending.plane.open_push("r", ticket)
    pair.sending.plane.abort_push(ticket.transfer_id)
    assert isinstance(pair.sending.next(), PushFailed)
    pair.receiving.plane.revoke(ticket.transfer_id)
    assert isinstance(pair.receiving.next(), TransferReleased)
    assert pair.receiving.leased_blocks() == 0


def test_a_ticket_that_runs_out_is_told_of_once(pair: DataPlanePair) -> None:
    ticket = pair.receiving.ticket(LAYOUT, [5, 1, 6], expires_in_s=0.01)
    pair.receiving.plane.grant(ticket)
    told = [pair.receiving.next()]
    if isinstance(told[0], Granted):
        # It may have expired in the one rank before it was granted in the other.
        told = [pair.receiving.next()]
    assert (type(told[0]), told[0].transfer_id) == (TransferReleased, ticket.transfer_id)
    assert "expired" in told[0].reason
    pair.receiving.plane.close()
    assert pair.receiving.events.empty()


@pytest.mark.parametrize(
    ("change", "raised", "named"),
    [
        (lambda ticket: replace(ticket, parts=ticket.parts[:1]), InvalidArgument, "ticket.parts"),
        (lambda ticket: replace(ticket, parts=()), InvalidArgument, "ticket.parts"),
        (lambda ticket: replace(ticket, parts=ticket.parts[::-1]), InvalidArgument, "ticket.parts"),
        (lambda ticket: replace(ticket, layout=replace(LAYOUT, tensor_ranks=1)), InvalidArgument, "ticket.parts"),
        (lambda ticket: replace(ticket, layout=replace(LAYOUT, tensor_ranks=4)), InvalidArgument, "ticket.parts"),
        (lambda ticket: replace(ticket, layout=replace(LAYOUT, tensor_ranks=3)), LayoutMismatch, "tensor_ranks"),
        (lambda ticket: replace(ticket, layout=replace(LAYOUT, kv_head_count=8)), LayoutMismatch, "kv_head_count"),
    ],
)
def test_a_ticket_of_other_ranks_is_refused_before_a_byte_moves(
    pair: DataPlanePair, change: Callable[[Ticket], Ticket], raised: type[Exception], named: str
) -> None:
    ticket = change(pair.receiving.grant(LAYOUT, [5, 1, 6]))
    with pytest.raises(raised, match=named):
        require_pushable(LAYOUT, ticket)
    assert pair.sending.plane.flow().sending.peers == ()


def test_a_closed_rank_grants_nothing_and_nobody_keeps_waiting(pair: DataPlanePair) -> None:
    pair.targets[1].plane.detach()
    pair.receiving.plane.grant(pair.receiving.ticket(LAYOUT, [0, 1, 2]))
    released = pair.receiving.next()
    assert isinstance(released, TransferReleased)
    assert released.reason.startswith("rank 1")
    assert pair.receiving.leased_blocks() == 0


def test_ranks_that_cannot_all_listen_leave_none_listening(tmp_path: Path) -> None:
    taken = KvEndpoint("shm", str(tmp_path / "kv.sock"))
    second = KvEndpoint("shm", str(tmp_path / "kv-1.sock"))
    memories = [RankMemory(rank) for rank in range(RANKS)]
    holder = PlaneInstance([RankMemory(0, replace(LAYOUT, tensor_ranks=1)).plane], [second])
    with ExitStack() as stack:
        stack.callback(holder.plane.close)
        with pytest.raises(ConfigError):
            PlaneInstance([memory.plane for memory in memories], [taken])
        next_holder = PlaneInstance([RankMemory(0, replace(LAYOUT, tensor_ranks=1)).plane], [taken])
        next_holder.plane.close()


def _serve(path: str, rank: int, seed: int, block_ids: Sequence[int], compute: Any, done: Any) -> None:
    """Process of a rank: computes one prompt on command, and answers with the contents of its blocks."""
    memory = RankMemory(rank)
    if seed:
        memory.fill(seed + rank)
    serve_rank(memory.plane, rank, path)
    while True:
        what = compute.get()
        if what == "compute":
            memory.compute("r", block_ids)
        done.put(memory.pool.memory[:, list(block_ids)].tobytes())


class RemoteInstance:
    def __init__(self, seed: int, block_ids: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._queues = [(context.Queue(), context.Queue()) for _ in range(RANKS)]
        with RankMeeting(RANKS) as meeting:
            self.processes = [
                context.Process(target=_serve, args=(meeting.path, rank, seed, block_ids, *queues), daemon=True)
                for rank, queues in enumerate(self._queues)
            ]
            for process in self.processes:
                process.start()
            self.ranks = meeting.ranks()

    def ask(self, what: str) -> list[bytes]:
        """Send a command to every rank; return the contents of their blocks."""
        for asked, _ in self._queues:
            asked.put(what)
        return [told.get(timeout=SOON_S) for _, told in self._queues]

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def remote_pair(tmp_path: Path) -> Iterator[SimpleNamespace]:
    with ExitStack() as stack:
        source, target = RemoteInstance(1, [0, 3, 2]), RemoteInstance(0, [5, 1, 6])
        stack.callback(source.close)
        stack.callback(target.close)
        yield SimpleNamespace(source=source, target=target, listen=[KvEndpoint("shm", str(tmp_path / "kv.sock"))])


@pytest.mark.timeout(180)
def test_a_rank_that_never_returns_from_its_step_ends_when_its_engine_is_gone(remote_pair: Any) -> None:
    for rank in remote_pair.source.ranks:
        rank.shutdown()
    for process in remote_pair.source.processes:
        process.join(SOON_S)
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.timeout(180)
def test_ranks_in_processes_of_their_own_do_the_same_for_one_engine_after_another(remote_pair: Any) -> None:
    source, target = remote_pair.source, remote_pair.target
    for epoch in (1, 2):
        sending, receiving = PlaneInstance(source.ranks), PlaneInstance(target.ranks, remote_pair.listen, epoch)
        ticket = receiving.grant(LAYOUT, [5, 1, 6])
        assert ticket.epoch == epoch
        sending.plane.open_push("r", ticket)
        ours = source.ask("compute")
        sending.plane.do(RankCall("hand_over", ("r", 7)))
        assert isinstance(receiving.next(), TransferLanded)
        assert isinstance(sending.next(), PushAccepted)
        assert target.ask("tell") == ours
        sending.plane.close()
        receiving.plane.close()
    assert sending.lost.empty()
    assert receiving.lost.empty()


@pytest.mark.timeout(180)
def test_a_rank_that_dies_is_told_of_and_its_peers_transfers_end(remote_pair: Any) -> None:
    source, target = remote_pair.source, remote_pair.target
    sending, receiving = PlaneInstance(source.ranks), PlaneInstance(target.ranks, remote_pair.listen)
    ticket = receiving.grant(LAYOUT, [5, 1, 6])
    sending.plane.open_push("r", ticket)
    target.processes[1].kill()
    assert receiving.lost.get(timeout=SOON_S) == "tensor-parallel rank 1 has ended"
    source.ask("compute")
    sending.plane.do(RankCall("hand_over", ("r", 7)))
    failed = sending.next()
    assert (type(failed), failed.transfer_id) == (PushFailed, ticket.transfer_id)
    assert sending.lost.empty()
    receiving.plane.close()
    sending.plane.close()


@pytest.mark.timeout(180)
def test_a_rank_that_stands_still_is_lost_and_nobody_waits_for_it(
    remote_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_rank, "_QUIET_S", 2.0)
    target = remote_pair.target
    # The readers still wait with the old timeout, until the next message.
    receiving = PlaneInstance(target.ranks, remote_pair.listen)
    assert receiving.lost.empty()
    os.kill(target.processes[0].pid, signal.SIGSTOP)
    # More than its connection takes; none of them queue at the other rank.
    for number in range(10_000):
        target.ranks[0].do(RankCall("forget", (f"r{number}",)))
    assert receiving.lost.get(timeout=SOON_S) == "tensor-parallel rank 0 does not answer"
    receiving.plane.close()


def test_where_ranks_cannot_be_met_is_said_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    with pytest.raises(ConfigError, match="TMPDIR"):
        RankMeeting(RANKS)
    assert list(far.iterdir()) == []


def test_a_transfer_that_the_ranks_were_handed_over_to_differently_ends_the_engine(pair: DataPlanePair) -> None:
    pair.sending.plane.open_push("r", pair.receiving.grant(LAYOUT, [5, 1, 6]))
    for rank, memory in enumerate(pair.sources):
        memory.compute("r", [0, 3, 2])
        memory.plane.do(RankCall("hand_over", ("r", rank)))
    assert "differently" in pair.receiving.lost.get(timeout=SOON_S)
    assert pair.receiving.events.empty()
