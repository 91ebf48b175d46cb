"""Open transfers between engines of unlike rank counts: sent in parts, marked as far as the slowest part."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kaveri.errors import InvalidArgument, LayoutMismatch
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.gathering import Gathering
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushExtended, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, pushed_tickets, taken_tickets, ticket_parts
from kaveri.kv.transports import make_transports

WHOLE = KvLayout("model", 2, block_tokens=4, kv_head_count=4, head_dim=8, dtype="float32", order="2HND")
RANKED = replace(WHOLE, tensor_ranks=2)
SOON_S = 60.0
SOURCE = [3, 0, 2, 5]


class PartSenders:
    """The two ranks of a sender, and one receiving rank that holds all heads."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        transports = make_transports(("unix",))
        self.landed: queue.Queue[Any] = queue.Queue()
        self.pushed: queue.Queue[Any] = queue.Queue()
        self.target = KvPool(WHOLE, 8)
        self.sources = [KvPool(RANKED.rank(rank), 8) for rank in range(2)]
        chance = np.random.default_rng(1)
        for pool in self.sources:
            pool.memory[:] = chance.integers(0, 256, pool.memory.shape, dtype=np.uint8)
        listen = [KvEndpoint("unix", str(directory / "kv.sock"))]
        self.receiver = KvReceiver(self.target, self.landed.put, listen=listen, epoch=1, transports=transports)
        stack.callback(self.receiver.close)
        self.senders = [KvSender(pool, self.pushed.put, transports=transports) for pool in self.sources]
        for sender in self.senders:
            stack.callback(sender.close)

    def grant(self, block_ids: list[int]) -> Ticket:
        parts = ticket_parts(RANKED, WHOLE, [self.receiver.endpoints])
        name, secret = b"n" * 16, b"s" * 16
        ticket = Ticket(name, secret, 1, (), tuple(block_ids), 16, 30.0, WHOLE, parts=parts, is_open=True)
        self.receiver.lease(ticket, taken_tickets(0, ticket))
        return ticket

    def open(self, ticket: Ticket) -> None:
        for rank, sender in enumerate(self.senders):
            sender.open(ticket, pushed_tickets(RANKED, rank, ticket))

    def write(self, rank: int, ticket: Ticket, start: int, end: int) -> None:
        self.senders[rank].write_layers(ticket.transfer_id, range(WHOLE.layer_count), start, SOURCE[start:end])

    def held(self, block: int) -> np.ndarray:
        """Return the two parts of a block, side by side: [layer, part, byte]."""
        return self.target.memory[:, block].reshape(WHOLE.layer_count, 2, -1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[PartSenders]:
    with ExitStack() as stack:
        yield PartSenders(tmp_path, stack)


def test_a_transfer_in_parts_is_marked_as_far_as_the_slower_part(pair: PartSenders) -> None:
    ticket = pair.grant([6, 1])
    name = ticket.transfer_id
    pair.open(ticket)
    pair.receiver.extend(name, [4, 7])
    extended = [pair.pushed.get(timeout=SOON_S) for _ in pair.senders]
    assert extended == [PushExtended(name, 4)] * 2
    pair.write(0, ticket, 0, 3)
    for count in (1, 3):
        pair.senders[0].mark(name, count, b"%d" % count)
    assert [pair.pushed.get(timeout=SOON_S) for _ in range(2)] == [PushMarked(name, 1), PushMarked(name, 3)]
    assert pair.landed.empty()
    pair.write(1, ticket, 0, 2)
    pair.senders[1].mark(name, 1, b"1")
    assert pair.landed.get(timeout=SOON_S) == TransferMarked(name, 1, b"1")
    pair.write(1, ticket, 2, 3)
    pair.senders[1].mark(name, 3, b"3")
    assert pair.landed.get(timeout=SOON_S) == TransferMarked(name, 3, b"3")
    for rank, pool in enumerate(pair.sources):
        for block, source in zip((6, 1, 4), SOURCE, strict=False):
            np.testing.assert_array_equal(pair.held(block)[:, rank], pool.memory[:, source])
    for sender in pair.senders:
        sender.finish(name, b"end")
    landed = pair.landed.get(timeout=SOON_S)
    assert landed == TransferLanded(name, 3 * WHOLE.layer_count * WHOLE.block_bytes, b"end")
    ends = [event for event in (pair.pushed.get(timeout=SOON_S) for _ in range(4)) if isinstance(event, PushAccepted)]
    assert len(ends) == 2


def test_a_part_that_is_given_up_gives_the_whole_up(pair: PartSenders) -> None:
    ticket = pair.grant([6, 1])
    pair.open(ticket)
    pair.write(0, ticket, 0, 1)
    pair.senders[0].abort(ticket.transfer_id)
    released = pair.landed.get(timeout=SOON_S)
    assert isinstance(released, TransferReleased)
    assert released.given_up


def test_unlike_notes_of_one_mark_are_no_mark_of_the_whole() -> None:
    gathering = Gathering(b"w", {0, 1})
    assert gathering.step(TransferMarked(b"a", 1, b"x")) is None
    assert gathering.step(TransferMarked(b"b", 1, b"y")) is None
    assert gathering.step(TransferMarked(b"a", 2, b"z")) is None
    assert gathering.step(TransferMarked(b"b", 2, b"z")) == TransferMarked(b"w", 2, b"z")


@pytest.mark.parametrize("is_given_up", [True, False])
@pytest.mark.parametrize("order", ["2NHD", "2HND", "H-engine-7"])
def test_a_sender_of_all_heads_marks_the_parts_of_two_ranks(tmp_path: Path, order: str, is_given_up: bool) -> None:
    source_layout = replace(WHOLE, order=order)
    target_layout = replace(RANKED, order=order)
    transports = make_transports(("unix",))
    pushed: queue.Queue[Any] = queue.Queue()
    landed: queue.Queue[Any] = queue.Queue()
    source = KvPool(source_layout, 8)
    source.memory[:] = np.random.default_rng(2).integers(0, 256, source.memory.shape, dtype=np.uint8)
    name = b"n" * 16
    with ExitStack() as stack:
        targets = [KvPool(target_layout.rank(rank), 8) for rank in range(2)]
        receivers = []
        for rank, pool in enumerate(targets):
            listen = [KvEndpoint("unix", str(tmp_path / f"{rank}.sock"))]
            receivers.append(KvReceiver(pool, landed.put, listen=listen, epoch=1, transports=transports))
            stack.callback(receivers[-1].close)
        parts = ticket_parts(source_layout, target_layout, [receiver.endpoints for receiver in receivers])
        ticket = Ticket(name, b"s" * 16, 1, (), (6, 1), 8, 30.0, target_layout, parts=parts, is_open=True)
        for rank, receiver in enumerate(receivers):
            receiver.lease(ticket, taken_tickets(rank, ticket))
        sender = KvSender(source, pushed.put, transports=transports)
        stack.callback(sender.close)
        own_parts = pushed_tickets(source_layout, 0, ticket)
        with pytest.raises(LayoutMismatch, match="kv_head_count"):
            sender.open(own_parts[0])
        sender.open(ticket, own_parts)

        def write(start: int, end: int) -> None:
            sender.write_layers(name, range(WHOLE.layer_count), start, SOURCE[start:end])

        write(0, 2)
        with pytest.raises(InvalidArgument, match="in 2"):
            sender.write_layers(name, range(1), 2, SOURCE[2:3])
        with pytest.raises(InvalidArgument, match="block_count"):
            sender.mark(name, 3, b"")
        sender.mark(name, 1, b"one")
        sender.mark(name, 2, b"two")
        assert [pushed.get(timeout=SOON_S) for _ in range(2)] == [PushMarked(name, 1), PushMarked(name, 2)]
        for receiver in receivers:
            receiver.extend(name, [4, 0])
        assert pushed.get(timeout=SOON_S) == PushExtended(name, 4)
        write(2, 3)
        sender.mark(name, 3, b"three")
        assert pushed.get(timeout=SOON_S) == PushMarked(name, 3)
        marks = [landed.get(timeout=SOON_S) for _ in range(6)]
        assert sorted(mark.block_count for mark in marks) == [1, 1, 2, 2, 3, 3]
        block_map = [
            heads_of(targets[rank].memory[:, block], targets[rank].layout) for rank in range(2) for block in (6, 1, 4)
        ]
        whole = [heads_of(source.memory[:, block], source_layout) for block in SOURCE[:3]]
        for index in range(3):
            np.testing.assert_array_equal(
                np.concatenate([block_map[index], block_map[3 + index]], axis=1), whole[index]
            )
        if is_given_up:
            sender.abort(name)
        else:
            receivers[0].revoke(name)
        released = [landed.get(timeout=SOON_S) for _ in range(2)]
        assert all(isinstance(event, TransferReleased) for event in released)
        assert [event.given_up for event in released] == [is_given_up] * 2


def heads_of(block: np.ndarray, layout: KvLayout) -> np.ndarray:
    """Return a block as [layer, head, bytes of the head in any fixed order]."""
    heads = layout.kv_head_count
    if layout.order == "2NHD":
        shaped = block.reshape(layout.layer_count, 2 * layout.block_tokens, heads, -1)
        return shaped.swapaxes(1, 2).reshape(layout.layer_count, heads, -1)
    if layout.order == "2HND":
        shaped = block.reshape(layout.layer_count, 2, heads, -1)
        return shaped.swapaxes(1, 2).reshape(layout.layer_count, heads, -1)
    return block.reshape(layout.layer_count, heads, -1)
