"""Bookkeeping of a replica store, event by event: cases that real transfers rarely reach."""

from unittest.mock import Mock

import pytest

from kaveri.errors import NoCapacity, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.notes import token_note
from kaveri.kv.replicas.replicas import EVICTED, Replicas
from kaveri.kv.replicas.store import ReplicaDropped, ReplicaEvent, ReplicaGrew, ReplicaKey, ReplicaOrphaned
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.kv.transfer.push import PushFailed, PushListener
from kaveri.kv.transfer.receiver import KvReceiver, LandingListener, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import Ticket

_LAYOUT = KvLayout("model", layer_count=1, block_tokens=4, kv_head_count=1, head_dim=4, dtype="float32")
_KEY = ReplicaKey("r", 0, 1)


class _ReplicasBench:
    def __init__(self, block_count: int = 8, min_free: int = 0) -> None:
        self.events: list[ReplicaEvent] = []
        self.receiver = Mock(spec=KvReceiver, endpoints=(), epoch=1)
        self.sender = Mock(spec=KvSender)
        self.sender.mark.side_effect = AssertionError("an engine's ticket is not marked")
        self.allocator = BlockAllocator(block_count)
        self.freed_count = 0
        self.store = Replicas(
            _LAYOUT, self.allocator, self._receiver, self._sender, min_free=min_free, on_freed=self._count_freed
        )
        self.store.start(self.events.append)

    def open(self, block_count: int, key: ReplicaKey = _KEY) -> Ticket:
        return self.store.open(key, _LAYOUT, max(1, 4 * block_count), 60.0)

    def mark(self, ticket: Ticket, first: int, end: int) -> None:
        self.receiver.tell(TransferMarked(ticket.transfer_id, end, token_note(range(4 * first, 4 * end))))
        self.store.check_integrity()

    def end(self, ticket: Ticket, *, given_up: bool = False) -> None:
        self.receiver.tell(TransferReleased(ticket.transfer_id, "gone", given_up))
        self.store.check_integrity()

    def landing(self, token_count: int) -> Ticket:
        blocks = tuple(range(-(-token_count // 4)))
        return Ticket(bytes([token_count] * 16), bytes(16), 2, (), blocks, token_count, 60.0, _LAYOUT)

    def used_blocks(self) -> int:
        return self.store.usage().used_bytes // _LAYOUT.block_bytes

    def _count_freed(self) -> None:
        self.freed_count += 1

    def _receiver(self, listener: LandingListener) -> Mock:
        self.receiver.tell = listener
        return self.receiver

    def _sender(self, listener: PushListener) -> Mock:
        self.sender.tell = listener
        return self.sender


def test_marks_that_come_behind_the_seal_do_not_count() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(3)
    bench.mark(ticket, 0, 2)
    bench.store.seal(_KEY)
    bench.mark(ticket, 2, 3)
    assert bench.store.watermark(_KEY) == 8
    bench.receiver.revoke.assert_called_once_with(ticket.transfer_id)
    bench.end(ticket)
    assert bench.events == [ReplicaGrew(_KEY, 8), ReplicaOrphaned(_KEY, "gone")]
    assert bench.used_blocks() == 2


def test_owner_that_gives_up_while_it_is_sealed_off_takes_nothing_with_it() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(1)
    bench.mark(ticket, 0, 1)
    bench.store.seal(_KEY)
    bench.end(ticket, given_up=True)
    assert bench.store.watermark(_KEY) == 4


def test_blocks_of_a_dropped_replica_wait_for_all_that_touches_them() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(2)
    bench.mark(ticket, 0, 2)
    landing = bench.landing(8)
    push = bench.store.push(_KEY, landing)
    bench.sender.write_layers.assert_called_once_with(landing.transfer_id, range(1), 0, list(ticket.block_ids[:2]))
    bench.store.drop(_KEY)
    bench.sender.abort.assert_called_once_with(landing.transfer_id)
    bench.receiver.revoke.assert_called_once_with(ticket.transfer_id)
    assert (bench.used_blocks(), bench.store.usage().replica_count) == (3, 0)
    bench.end(ticket)
    assert bench.used_blocks() == 3, "a push still reads them"
    bench.sender.tell(PushFailed(landing.transfer_id, "aborted"))
    assert bench.used_blocks() == 0
    assert isinstance(push.exception(), TransferFailed)
    assert bench.events == [ReplicaGrew(_KEY, 8)]


def test_push_that_its_owner_has_ended_in_order_leaves_an_orphan() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(2)
    bench.mark(ticket, 0, 2)
    bench.receiver.tell(TransferLanded(ticket.transfer_id, 1, b""))
    assert bench.events[1:] == [ReplicaOrphaned(_KEY, "the owner has ended its push")]
    assert bench.used_blocks() == 2


def test_replicas_that_wait_for_blocks_get_them_in_order_and_before_new_ones() -> None:
    bench = _ReplicasBench(6)
    keys = [ReplicaKey(name, 0, 1) for name in "abc"]
    tickets = [bench.open(1, key) for key in keys]
    for ticket in tickets:
        bench.mark(ticket, 0, 2)
    assert not bench.receiver.extend.called
    with pytest.raises(NoCapacity):
        bench.open(0)
    bench.end(tickets[1], given_up=True)
    assert bench.events[-1] == ReplicaDropped(keys[1], "gone")
    extended = [call.args[0] for call in bench.receiver.extend.mock_calls]
    assert extended == [tickets[0].transfer_id, tickets[2].transfer_id]
    assert bench.used_blocks() == 6


def test_blocks_that_an_ending_push_does_not_take_stay_free() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(1)
    bench.receiver.extend.return_value = False
    bench.mark(ticket, 0, 2)
    assert bench.used_blocks() == 2
    bench.end(ticket)
    assert bench.events == [ReplicaGrew(_KEY, 8), ReplicaOrphaned(_KEY, "gone")]


def test_replica_is_taken_with_its_blocks_and_those_behind_are_free_once_its_owner_has_stopped_writing() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(3)
    bench.mark(ticket, 0, 2)
    bench.store.seal(_KEY)
    blocks = bench.store.give_blocks(_KEY, "request", 7, 1)
    assert blocks[:2] == list(ticket.block_ids[:2])
    assert len(blocks) == 3
    assert bench.allocator.blocks_of("request") == tuple(blocks)
    assert bench.store.token_ids(_KEY) == ()
    bench.store.check_integrity()
    assert bench.allocator.free_count == 3, "the owner may still write two blocks"
    bench.end(ticket)
    assert bench.allocator.free_count == 5
    assert bench.events == [ReplicaGrew(_KEY, 8)]


def test_replica_that_is_pushed_or_too_short_or_without_free_blocks_is_not_taken() -> None:
    bench = _ReplicasBench()
    ticket = bench.open(2)
    bench.mark(ticket, 0, 2)
    bench.end(ticket)
    with pytest.raises(TransferFailed, match="8 tokens, not 9"):
        bench.store.give_blocks(_KEY, "request", 9, 0)
    with pytest.raises(NoCapacity):
        bench.store.give_blocks(_KEY, "request", 8, 7)
    bench.store.push(_KEY, bench.landing(8))
    with pytest.raises(TransferFailed, match="pushed elsewhere"):
        bench.store.give_blocks(_KEY, "request", 8, 0)
    bench.store.check_integrity()
    assert bench.store.watermark(_KEY) == 8


def test_replicas_given_up_are_evicted_first_then_the_least_recently_extended_and_never_those_without_owner() -> None:
    bench = _ReplicasBench(20)
    keys = {name: ReplicaKey(name, 0, 1) for name in ("orphan", "complete", "old", "young")}
    tickets = {name: bench.store.open(key, _LAYOUT, 8, 60.0, stays=True) for name, key in keys.items()}
    for name in ("young", "orphan", "complete", "old", "young"):
        done = bench.store.watermark(keys[name]) // 4
        bench.mark(tickets[name], done, done + 1)
    bench.end(tickets["orphan"])
    bench.end(tickets["complete"], given_up=True)
    assert bench.store.evictable_blocks == 1 + 3 + 3
    bench.events.clear()
    bench.store.evict(1)
    assert bench.events == [ReplicaDropped(keys["complete"], EVICTED)]
    bench.store.evict(2)
    assert bench.events[1:] == [ReplicaDropped(keys["old"], EVICTED)]
    bench.receiver.revoke.assert_called_once_with(tickets["old"].transfer_id)
    bench.store.evict(3)
    assert len(bench.events) == 2, "the blocks of the last one are on their way"
    freed_count = bench.freed_count
    bench.end(tickets["old"])
    assert bench.freed_count == freed_count + 1
    bench.store.evict(20)
    assert bench.events[2:] == [ReplicaDropped(keys["young"], EVICTED)]
    freed_count = bench.freed_count
    bench.store.evict(20)
    assert bench.freed_count == freed_count, "the engine would ask again and again"
    assert bench.store.watermark(keys["orphan"]) == 4


def test_replicas_leave_blocks_free_for_the_other_users_of_the_pool() -> None:
    bench = _ReplicasBench(8, min_free=3)
    bench.allocator.allocate("request", 1)
    with pytest.raises(NoCapacity, match="left free"):
        bench.open(4)
    ticket = bench.open(3)
    assert bench.store.usage().total_bytes == 5 * _LAYOUT.block_bytes, "all but those that are left free"
    bench.mark(ticket, 0, 4)
    assert bench.store.is_starved(_KEY)
    bench.allocator.release("request")
    assert not bench.store.is_starved(_KEY)
    assert bench.used_blocks() == 5
    bench.store.check_integrity()
