"""Open pushes of the simulated KV wire: they are marked, extended and kept as those of KvSender and KvReceiver."""

import asyncio
from collections.abc import Callable

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.errors import InvalidArgument
from kaveri.kv.transfer.receiver import TransferEvent, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushEvent, PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.ticket import Ticket
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.kv_sender import SimulatedSender
from tests.simulation.cluster.kv_wire import LoopWire

_MODEL = FakeModel(layer_count=1, block_tokens=4, max_model_len=64)
_SOURCE = [7, 3, 5, 1]
"""Blocks of the request at its owner: three and a half."""
_NAME = b"n" * 16


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class _MarkedPair:
    def __init__(self) -> None:
        wire = LoopWire()
        self.owned, self.held = KvMemory(_MODEL, 8), KvMemory(_MODEL, 8)
        params = ResolvedParams(max_tokens=20, temperature=0.0, seed=1)
        self.owned.write(SequenceSlice(list(range(1, 15)), 0, _SOURCE, True, 0, params))
        self.pushed: list[PushEvent] = []
        self.landed: list[TransferEvent] = []
        self.sender = SimulatedSender(self.owned, _MODEL.layout, wire, self.pushed.append)
        self.receiver = SimulatedReceiver(self.held, _MODEL.layout, wire, 1, self.landed.append)

    def grant(self, block_ids: list[int], expires_in_s: float = 30.0) -> Ticket:
        ticket = Ticket(
            transfer_id=_NAME,
            secret=b"s" * 16,
            epoch=1,
            endpoints=self.receiver.endpoints,
            block_ids=tuple(block_ids),
            token_count=8,
            expires_in_s=expires_in_s,
            layout=_MODEL.layout,
            is_open=True,
        )
        self.receiver.lease(ticket)
        self.sender.open(ticket)
        return ticket


async def test_an_open_push_is_marked_extended_and_ended_with_a_part_full_block() -> None:
    pair = _MarkedPair()
    pair.grant([6])
    pair.receiver.extend(_NAME, [2, 4, 0, 5])
    await _until(lambda: pair.pushed == [PushExtended(_NAME, 5)])
    pair.sender.write(_NAME, 0, 0, _SOURCE[:3])
    with pytest.raises(InvalidArgument, match="block_count"):
        pair.sender.mark(_NAME, 4, b"")
    pair.sender.mark(_NAME, 2, b"two")
    with pytest.raises(InvalidArgument, match="block_count"):
        pair.sender.mark(_NAME, 2, b"")
    pair.sender.mark(_NAME, 3, b"three")
    pair.sender.write(_NAME, 0, 3, _SOURCE[3:])
    with pytest.raises(InvalidArgument, match="in 5"):
        pair.sender.write(_NAME, 0, 4, [1, 1])
    pair.sender.finish(_NAME, b"note")
    await _until(lambda: len(pair.pushed) == 4)
    kv_bytes = 4 * _MODEL.layout.block_bytes
    assert pair.pushed[1:] == [PushMarked(_NAME, 2), PushMarked(_NAME, 3), PushAccepted(_NAME, kv_bytes, "simulated")]
    assert pair.landed == [
        TransferMarked(_NAME, 2, b"two"),
        TransferMarked(_NAME, 3, b"three"),
        TransferLanded(_NAME, kv_bytes, b"note"),
    ]
    assert pair.held.read([6, 2, 4, 0], 14) == pair.owned.read(_SOURCE, 14)
    assert not pair.receiver.extend(_NAME, [1])


@pytest.mark.parametrize("how", ["given up", "sender gone", "revoked", "expired"])
async def test_marks_stand_when_an_open_push_ends(how: str) -> None:
    pair = _MarkedPair()
    pair.grant([6, 2, 4], expires_in_s=0.05 if how == "expired" else 30.0)
    pair.sender.write(_NAME, 0, 0, _SOURCE[:2])
    pair.sender.mark(_NAME, 2, b"")
    await _until(lambda: PushMarked(_NAME, 2) in pair.pushed)
    if how == "given up":
        pair.sender.abort(_NAME)
    elif how == "sender gone":
        pair.sender.close()
    elif how == "revoked":
        pair.receiver.revoke(_NAME)
    await _until(lambda: isinstance(pair.landed[-1], TransferReleased))
    (marked, released) = pair.landed
    assert marked == TransferMarked(_NAME, 2, b"")
    assert isinstance(released, TransferReleased)
    assert released.given_up == (how == "given up")
    assert pair.held.read([6, 2], 8) == pair.owned.read(_SOURCE, 8)
    assert how == "sender gone" or isinstance(pair.pushed[-1], PushFailed)


async def test_a_mark_of_blocks_that_are_not_there_is_refused() -> None:
    pair = _MarkedPair()
    ticket = pair.grant([6, 2, 4])
    pair.sender.write(_NAME, 0, 0, _SOURCE[:2])
    pair.sender.mark(_NAME, 1, b"")
    await _until(lambda: PushMarked(_NAME, 1) in pair.pushed)
    # The block was overwritten at the holder.
    pair.held.put(ticket.block_ids[1], pair.owned.get(_SOURCE[2]))
    pair.sender.mark(_NAME, 2, b"")
    # The blocks are free once the sender has confirmed that it writes no more.
    await _until(lambda: isinstance(pair.landed[-1], TransferReleased))
    assert [type(event) for event in pair.pushed] == [PushMarked, PushFailed]
    assert "wrong digest" in str(pair.pushed[-1])
    assert [type(event) for event in pair.landed] == [TransferMarked, TransferReleased]


async def test_the_last_block_of_a_mark_must_be_full() -> None:
    pair = _MarkedPair()
    pair.grant([6, 2, 4, 0])
    pair.sender.write(_NAME, 0, 0, _SOURCE)
    pair.sender.mark(_NAME, 4, b"")
    await _until(lambda: pair.pushed)
    assert "wrong digest" in str(pair.pushed[-1])
