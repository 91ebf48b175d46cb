"""Open transfers between engines of unlike ranks: part by part, marked as far as the part that is marked least."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kaveri.engine.parts import PartReceiver, PartSender
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.gathering import Gathering
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushExtended, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, ticket_parts
from kaveri.kv.transports import make_transports

WHOLE = KvLayout("model", 2, block_tokens=4, kv_head_count=4, head_dim=8, dtype="float32", order="2HND")
RANKED = replace(WHOLE, tensor_ranks=2)
SOON_S = 20.0
SOURCE = [3, 0, 2, 5]


class Pair:
    """The two ranks of a sender, and one rank that holds all heads."""

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
        self.receiver = PartReceiver(
            0,
            self.landed.put,
            lambda listener: KvReceiver(self.target, listener, listen=listen, epoch=1, transports=transports),
        )
        stack.callback(self.receiver.close)
        self.senders = [
            PartSender(
                RANKED, rank, self.pushed.put, lambda heard, pool=pool: KvSender(pool, heard, transports=transports)
            )
            for rank, pool in enumerate(self.sources)
        ]
        for sender in self.senders:
            stack.callback(sender.close)

    def grant(self, block_ids: list[int]) -> Ticket:
        parts = ticket_parts(RANKED, WHOLE, [self.receiver.endpoints])
        name, secret = b"n" * 16, b"s" * 16
        ticket = Ticket(name, secret, 1, (), tuple(block_ids), 16, 30.0, WHOLE, parts=parts, is_open=True)
        self.receiver.grant(ticket)
        return ticket

    def write(self, rank: int, ticket: Ticket, start: int, end: int) -> None:
        for layer in range(WHOLE.layer_count):
            self.senders[rank].write(ticket.transfer_id, layer, start, SOURCE[start:end])

    def held(self, block: int) -> np.ndarray:
        """The two parts of a block, [layer, part, byte], as they lie side by side."""
        return self.target.memory[:, block].reshape(WHOLE.layer_count, 2, -1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def test_a_transfer_in_parts_is_marked_as_far_as_the_slower_part(pair: Pair) -> None:
    ticket = pair.grant([6, 1])
    name = ticket.transfer_id
    for sender in pair.senders:
        sender.open(ticket)
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


def test_a_part_that_is_given_up_gives_the_whole_up(pair: Pair) -> None:
    ticket = pair.grant([6, 1])
    for sender in pair.senders:
        sender.open(ticket)
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
