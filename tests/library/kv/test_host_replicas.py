"""Replicas in host memory: bytes, watermarks, events, memory, and lost owners, with real senders and receivers.

Does not verify speed, or senders that break the protocol; the suite of transports covers those.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kaveri.errors import ConfigError, InvalidArgument, LayoutMismatch, NoCapacity
from kaveri.errors import TransferFailed as TransferRefused
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import NOTE_TOKENS_MAX, noted_tokens, token_note
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaEvent,
    ReplicaGivenUp,
    ReplicaGrew,
    ReplicaKey,
    ReplicaOrphaned,
)
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.push import PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, pushed_tickets, taken_tickets, ticket_parts
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_recorder import SOON_S, EventLog

_LAYOUT = KvLayout("model", layer_count=3, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
_POOL_BLOCKS = 64
"""Blocks of an owner's pool, and of an engine's."""
_BLOCK_BYTES = _LAYOUT.layer_count * _LAYOUT.block_bytes


def store_at(folder: Path, memory_bytes: int, transport: str = "unix", layout: KvLayout = _LAYOUT) -> HostReplicas:
    listen = [KvEndpoint(transport, str(folder / "replicas.sock"))]
    epoch = secrets.randbits(63)
    return HostReplicas(layout, memory_bytes, listen=listen, transports=make_transports(), epoch=epoch)


class ReplicaOwner:
    def __init__(self, seed: int) -> None:
        self.pool = KvPool(_LAYOUT, _POOL_BLOCKS)
        rng = np.random.default_rng(seed)
        self.pool.memory[:] = rng.integers(0, 256, self.pool.memory.shape, np.uint8)
        self.token_ids = [int(token_id) for token_id in rng.integers(0, 2**32, self.tokens(_POOL_BLOCKS))]
        """Tokens of a request that has the pool's blocks in their order."""
        self.log = EventLog()
        self.sender = KvSender(self.pool, self.log, transports=make_transports())

    def tokens(self, block_count: int) -> int:
        return block_count * _LAYOUT.block_tokens

    def write(self, ticket: Ticket, first: int, end: int) -> None:
        for layer in range(_LAYOUT.layer_count):
            self.sender.write(ticket.transfer_id, layer, first, range(first, end))

    def mark(self, ticket: Ticket, first: int, end: int) -> None:
        self.write(ticket, first, end)
        note = token_note(self.token_ids[self.tokens(first) : self.tokens(end)])
        self.sender.mark(ticket.transfer_id, end, note)

    def wait_for_mark(self, ticket: Ticket, block_count: int) -> None:
        marked = PushMarked(ticket.transfer_id, block_count)
        self.log.wait_for(PushMarked, lambda event: event == marked)

    def wait_for_blocks(self, ticket: Ticket, block_count: int) -> None:
        extended = PushExtended(ticket.transfer_id, block_count)
        self.log.wait_for(PushExtended, lambda event: event == extended)

    def wait_for_failure(self, ticket: Ticket) -> str:
        return self.log.wait_for(PushFailed, lambda event: event.transfer_id == ticket.transfer_id).reason


class Target:
    def __init__(self, socket: Path) -> None:
        self.pool = KvPool(_LAYOUT, _POOL_BLOCKS)
        self.log = EventLog()
        listen = [KvEndpoint("unix", str(socket))]
        self.receiver = KvReceiver(self.pool, self.log, listen=listen, epoch=7, transports=make_transports())
        self._free = list(range(_POOL_BLOCKS))

    def grant(self, token_count: int) -> Ticket:
        count = _LAYOUT.block_count(token_count)
        blocks, self._free = self._free[:count], self._free[count:]
        return self.receiver.grant(blocks, token_count, 60.0)

    def require_holds(self, ticket: Ticket, owner: ReplicaOwner) -> None:
        self.log.wait_for(TransferLanded, lambda event: event.transfer_id == ticket.transfer_id)
        theirs = owner.pool.memory[:, : len(ticket.block_ids)]
        assert (self.pool.memory[:, list(ticket.block_ids)] == theirs).all(), "the replica is not what its owner wrote"


class ReplicaWorld:
    def __init__(self, transport: str, block_count: int, folder: Path, stack: ExitStack) -> None:
        self.log = EventLog()
        self.store = store_at(folder, block_count * _BLOCK_BYTES, transport)
        self.store.start(self.log)
        stack.callback(self.store.close)
        self._folder = folder
        self._stack = stack
        self._count = 0

    def owner(self, seed: int = 0) -> ReplicaOwner:
        owner = ReplicaOwner(seed)
        self._stack.callback(owner.sender.close)
        return owner

    def target(self) -> Target:
        self._count += 1
        target = Target(self._folder / f"target{self._count}.sock")
        self._stack.callback(target.receiver.close)
        return target

    def open(self, owner: ReplicaOwner, name: str = "r", block_count: int = 1, expires_in_s: float = 60.0) -> Ticket:
        token_count = max(1, owner.tokens(block_count))
        ticket = self.store.open(key_of(name), _LAYOUT, token_count, expires_in_s)
        owner.sender.open(ticket)
        return ticket

    def copied(self, owner: ReplicaOwner, name: str = "r", block_count: int = 1) -> Ticket:
        ticket = self.open(owner, name, block_count)
        owner.mark(ticket, 0, block_count)
        owner.wait_for_mark(ticket, block_count)
        self.log.wait_for(ReplicaGrew, lambda event: event.key == key_of(name))
        return ticket

    def require_pushed(self, owner: ReplicaOwner, token_count: int) -> None:
        """Push a replica of the owner's first tokens to another engine, and require that they arrive."""
        target = self.target()
        landing = target.grant(token_count)
        self.store.push(key_of("r"), landing).result(SOON_S)
        target.require_holds(landing, owner)

    def wait_until_used(self, block_count: int) -> None:
        used_bytes = block_count * _BLOCK_BYTES
        self.wait_until(lambda: self.store.usage().used_bytes == used_bytes, f"{block_count} blocks in use")
        self.store.check_integrity()

    def wait_until_grown(self, token_count: int) -> None:
        self.log.wait_for(ReplicaGrew, lambda event: event.token_count == token_count)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < give_up_at_s, f"no {what} after {SOON_S} s: {self.store.usage()}"
            threading.Event().wait(0.002)

    def told(self, name: str) -> list[ReplicaEvent]:
        kinds = (ReplicaGrew, ReplicaOrphaned, ReplicaDropped, ReplicaGivenUp)
        return [event for event in self.log.of(object) if isinstance(event, kinds) and event.key == key_of(name)]


def key_of(name: str) -> ReplicaKey:
    return ReplicaKey(name, 0, 1)


OpenWorld = Callable[[int], ReplicaWorld]


@pytest.fixture(params=["unix", "shm"])
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenWorld]:
    with ExitStack() as stack:
        yield lambda block_count: ReplicaWorld(request.param, block_count, tmp_path, stack)


@pytest.fixture
def world(open_world: OpenWorld) -> ReplicaWorld:
    return open_world(10)


def test_replica_grows_with_each_mark_and_names_its_tokens(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.open(owner, block_count=5)
    assert ticket.is_open
    assert (len(ticket.block_ids), world.store.watermark(key_of("r"))) == (6, 0)
    for first, end in ((0, 2), (2, 3), (3, 6)):
        owner.mark(ticket, first, end)
        world.wait_until_grown(owner.tokens(end))
        assert world.store.watermark(key_of("r")) == owner.tokens(end)
        assert world.store.token_ids(key_of("r")) == tuple(owner.token_ids[: owner.tokens(end)])
    assert world.told("r") == [ReplicaGrew(key_of("r"), owner.tokens(end)) for end in (2, 3, 6)]
    world.store.check_integrity()


def test_owner_gets_its_next_block_with_each_mark(open_world: OpenWorld) -> None:
    world = open_world(30)
    owner = world.owner()
    ticket = world.open(owner, block_count=0)
    assert len(ticket.block_ids) == 1
    for block in range(20):
        owner.mark(ticket, block, block + 1)
        owner.wait_for_blocks(ticket, block + 2)
    world.wait_until_used(21)
    world.store.seal(key_of("r"))
    # The block ahead is not needed any more.
    world.wait_until_used(20)
    world.require_pushed(owner, owner.tokens(20))


def test_replica_is_pushed_to_several_engines_whole_and_in_part(world: ReplicaWorld) -> None:
    owner = world.owner()
    world.copied(owner, block_count=6)
    world.store.seal(key_of("r"))
    targets = [world.target() for _ in range(3)]
    tickets = [target.grant(owner.tokens(count)) for target, count in zip(targets, (1, 5, 6), strict=True)]
    pushes = [world.store.push(key_of("r"), ticket) for ticket in tickets]
    for target, ticket, push in zip(targets, tickets, pushes, strict=True):
        push.result(SOON_S)
        target.require_holds(ticket, owner)
    world.store.drop(key_of("r"))
    world.wait_until_used(0)


def test_blocks_that_the_engine_has_already_are_left_out(world: ReplicaWorld) -> None:
    owner, target = world.owner(), world.target()
    world.copied(owner, block_count=4)
    ticket = target.receiver.grant((8, 9), owner.tokens(4), 60.0, first_block=2)
    world.store.push(key_of("r"), ticket).result(SOON_S)
    assert (target.pool.memory[:, [8, 9]] == owner.pool.memory[:, 2:4]).all()


def test_failed_push_leaves_the_replica_as_it_was(world: ReplicaWorld) -> None:
    owner, target = world.owner(), world.target()
    world.copied(owner, block_count=3)
    refused = target.grant(owner.tokens(3))
    target.receiver.revoke(refused.transfer_id)
    with pytest.raises(TransferRefused):
        world.store.push(key_of("r"), refused).result(SOON_S)
    foreign = replace(target.grant(owner.tokens(3)), layout=replace(_LAYOUT, model_fingerprint="another"))
    with pytest.raises(LayoutMismatch):
        world.store.push(key_of("r"), foreign).result(SOON_S)
    ticket = target.grant(owner.tokens(3))
    world.store.push(key_of("r"), ticket).result(SOON_S)
    target.require_holds(ticket, owner)
    world.store.check_integrity()


def test_more_than_is_held_is_not_pushed(world: ReplicaWorld) -> None:
    owner, target = world.owner(), world.target()
    world.copied(owner, block_count=2)
    for ticket, field in (
        (target.grant(owner.tokens(2) + 1), "ticket.token_count"),
        (replace(target.grant(owner.tokens(2)), block_ids=(0,)), "ticket.block_ids"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            world.store.push(key_of("r"), ticket).result(SOON_S)
        assert raised.value.field == field
    with pytest.raises(TransferRefused):
        world.store.push(key_of("other"), target.grant(owner.tokens(1))).result(SOON_S)


def test_replica_of_an_owner_that_is_lost_is_kept_until_it_is_dropped(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.copied(owner, block_count=3)
    owner.write(ticket, 3, 4)
    owner.sender.close()
    world.log.wait_for(ReplicaOrphaned)
    world.wait_until_used(3)
    world.require_pushed(owner, owner.tokens(3))
    world.store.drop(key_of("r"))
    world.wait_until_used(0)


def test_replica_that_its_owner_gave_up_is_dropped(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.copied(owner, block_count=3)
    owner.sender.abort(ticket.transfer_id)
    world.log.wait_for(ReplicaDropped)
    world.wait_until_used(0)
    assert world.store.watermark(key_of("r")) == 0
    world.copied(owner, block_count=2)


def test_replica_that_stays_is_kept_when_its_owner_gives_it_up(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.store.open(key_of("r"), _LAYOUT, owner.tokens(3), 60.0, stays=True)
    owner.sender.open(ticket)
    owner.mark(ticket, 0, 3)
    world.wait_until_grown(owner.tokens(3))
    owner.sender.abort(ticket.transfer_id)
    world.log.wait_for(ReplicaGivenUp)
    world.wait_until_used(3)
    world.require_pushed(owner, owner.tokens(3))
    world.store.drop(key_of("r"))
    world.wait_until_used(0)
    empty = world.store.open(key_of("empty"), _LAYOUT, owner.tokens(1), 60.0, stays=True)
    owner.sender.open(empty)
    owner.sender.abort(empty.transfer_id)
    world.log.wait_for(ReplicaDropped, lambda event: event.key == key_of("empty"))
    world.wait_until_used(0)


@pytest.mark.parametrize("is_marked", [False, True])
def test_owner_that_marks_nothing_for_too_long_counts_as_lost(world: ReplicaWorld, is_marked: bool) -> None:
    owner = world.owner()
    ticket = world.open(owner, block_count=2, expires_in_s=0.5)
    if is_marked:
        owner.mark(ticket, 0, 1)
        world.log.wait_for(ReplicaOrphaned)
        assert world.store.watermark(key_of("r")) == owner.tokens(1)
    else:
        world.log.wait_for(ReplicaDropped)
    owner.wait_for_failure(ticket)


def test_mark_that_does_not_name_its_tokens_is_refused(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.copied(owner, block_count=2)
    owner.write(ticket, 2, 3)
    owner.sender.mark(ticket.transfer_id, 3, token_note(owner.token_ids[: owner.tokens(1) - 1]))
    world.log.wait_for(ReplicaOrphaned)
    owner.wait_for_failure(ticket)
    assert world.store.watermark(key_of("r")) == owner.tokens(2)
    assert world.store.token_ids(key_of("r")) == tuple(owner.token_ids[: owner.tokens(2)])


def test_memory_is_exactly_what_was_asked_for(open_world: OpenWorld) -> None:
    world = open_world(7)
    assert world.store.usage().total_bytes == 7 * _BLOCK_BYTES
    owner = world.owner()
    world.copied(owner, "a", block_count=2)
    world.open(owner, "b", block_count=3)
    assert world.store.usage().used_bytes == 7 * _BLOCK_BYTES
    with pytest.raises(NoCapacity) as raised:
        world.open(owner, "c", block_count=0)
    assert raised.value.role == "replica"
    world.store.drop(key_of("b"))
    # "a" takes its next block first, if it still waits for one.
    world.wait_until_used(3)
    world.open(owner, "c", block_count=3)
    world.wait_until_used(7)
    assert world.store.usage().replica_count == 2


def test_drop_ends_the_owners_push_and_pushes_to_engines(world: ReplicaWorld) -> None:
    owner, target = world.owner(), world.target()
    ticket = world.copied(owner, block_count=3)
    landing = target.grant(owner.tokens(3))
    push = world.store.push(key_of("r"), landing)
    world.store.drop(key_of("r"))
    world.store.drop(key_of("r"))
    owner.wait_for_failure(ticket)
    # It had landed before the drop, or is given up.
    assert push.exception(SOON_S) is None or isinstance(push.exception(), TransferRefused)
    world.wait_until_used(0)
    assert world.told("r") == [ReplicaGrew(key_of("r"), owner.tokens(3))]


def test_replicas_of_other_layouts_are_refused_by_field(open_world: OpenWorld) -> None:
    world = open_world(4)
    for field, value in (("model_fingerprint", "another"), ("block_tokens", _LAYOUT.block_tokens * 2)):
        with pytest.raises(LayoutMismatch) as raised:
            world.store.open(key_of("r"), replace(_LAYOUT, **{field: value}), 1, 60.0)  # type: ignore[arg-type]
        assert raised.value.field == field
    assert world.store.usage().used_bytes == 0


def test_bad_calls_are_refused_and_change_nothing(open_world: OpenWorld) -> None:
    world = open_world(4)
    for token_count, expires_in_s, field in ((0, 60.0, "token_count"), (1, float("nan"), "expires_in_s")):
        with pytest.raises(InvalidArgument) as raised:
            world.store.open(key_of("r"), _LAYOUT, token_count, expires_in_s)
        assert raised.value.field == field
    with pytest.raises(NoCapacity):
        world.store.open(key_of("r"), _LAYOUT, 1000 * _LAYOUT.block_tokens, 60.0)
    unknown = key_of("unknown")
    world.store.seal(unknown)
    world.store.drop(unknown)
    assert (world.store.watermark(unknown), world.store.token_ids(unknown)) == (0, ())
    world.wait_until_used(0)


def test_replica_that_is_opened_again_begins_again(open_world: OpenWorld) -> None:
    world = open_world(4)
    owner = world.owner()
    former = world.copied(owner, block_count=2)
    ticket = world.open(owner, block_count=0)
    owner.wait_for_failure(former)
    assert world.store.watermark(key_of("r")) == 0
    owner.mark(ticket, 0, 1)
    owner.wait_for_mark(ticket, 1)
    world.wait_until_used(2)
    assert not world.log.of(ReplicaDropped)


def test_closed_store_ends_its_transfers_and_says_nothing(world: ReplicaWorld) -> None:
    owner = world.owner()
    ticket = world.copied(owner, block_count=3)
    told = list(world.log.events)
    world.store.close()
    world.store.close()
    owner.wait_for_failure(ticket)
    assert world.log.events == told
    with pytest.raises(TransferRefused):
        world.store.open(key_of("other"), _LAYOUT, 1, 60.0)


def test_memory_is_rounded_down_to_whole_blocks_and_holds_at_least_one(tmp_path: Path) -> None:
    store = store_at(tmp_path, 3 * _BLOCK_BYTES - 1)
    assert store.usage().total_bytes == 2 * _BLOCK_BYTES
    store.close()
    for memory_bytes in (_BLOCK_BYTES - 1, 0, 2**60):
        with pytest.raises(ConfigError) as raised:
            store_at(tmp_path, memory_bytes)
        assert raised.value.field == "replica_memory"


def test_note_names_as_many_tokens_as_fit() -> None:
    token_ids = tuple(range(2**32 - NOTE_TOKENS_MAX, 2**32))
    assert len(token_note(token_ids)) == NOTE_BYTES_MAX
    assert noted_tokens(token_note(token_ids)) == token_ids
    assert noted_tokens(b"\x01\x00\x00\x00\xff") == (1,)


def test_replica_of_two_ranks_is_in_one_pool_and_is_pushed_to_two_ranks(tmp_path: Path) -> None:
    layout = replace(_LAYOUT, order="H-engine", tensor_ranks=2)
    with ExitStack() as stack:
        store = store_at(tmp_path, 8 * layout.layer_count * layout.block_bytes, layout=layout)
        stack.callback(store.close)
        log = EventLog()
        store.start(log)
        pools = [KvPool(layout.rank(rank), 8) for rank in range(2)]
        for rank, pool in enumerate(pools):
            pool.memory[:] = np.random.default_rng(rank).integers(0, 256, pool.memory.shape, np.uint8)
        ticket = store.open(key_of("r"), layout, 12, 60.0)
        assert len(ticket.parts) == 2
        token_ids = list(range(12))
        for rank, pool in enumerate(pools):
            sender = KvSender(pool, lambda _: None, transports=make_transports())
            stack.callback(sender.close)
            sender.open(ticket, pushed_tickets(layout, rank, ticket))
            sender.write_layers(ticket.transfer_id, range(layout.layer_count), 0, (5, 0, 3))
            sender.mark(ticket.transfer_id, 3, token_note(token_ids))
        log.wait_for(ReplicaGrew, lambda event: event.token_count == 12)
        store.seal(key_of("r"))

        landed = EventLog()
        targets = [KvPool(layout.rank(rank), 8) for rank in range(2)]
        endpoints = []
        receivers = []
        for rank, pool in enumerate(targets):
            listen = [KvEndpoint("unix", str(tmp_path / f"target{rank}.sock"))]
            receivers.append(KvReceiver(pool, landed, listen=listen, epoch=1, transports=make_transports()))
            stack.callback(receivers[-1].close)
            endpoints.append(receivers[-1].endpoints)
        parts = ticket_parts(store.layout, layout, endpoints)
        landing = Ticket(bytes(16), bytes(16), 1, (), (1, 2, 4), 12, 60.0, layout, parts=parts)
        for rank, receiver in enumerate(receivers):
            receiver.lease(landing, taken_tickets(rank, landing))
        store.push(key_of("r"), landing).result(SOON_S)
        for source, target in zip(pools, targets, strict=True):
            assert (target.memory[:, [1, 2, 4]] == source.memory[:, [5, 0, 3]]).all()
        assert store.token_ids(key_of("r")) == tuple(token_ids)


def test_ranks_whose_heads_are_not_apart_are_refused(tmp_path: Path) -> None:
    store = store_at(tmp_path, 2**16)
    with pytest.raises(LayoutMismatch) as raised:
        store.open(key_of("r"), replace(_LAYOUT, tensor_ranks=2), 4, 60.0)
    assert raised.value.field == "tensor_ranks"
    store.close()
