"""Requirements on every replica store. Subclass ReplicaConformance in a test module and provide the `harness` fixture.

It holds a store to kaveri/kv/replicas/store.py: bytes, watermarks, events, memory, and the ends of owners. Owners and
engines are Kaveri's own senders and receivers. It does not verify speed, nor senders that break the protocol: the suite
for transports does.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pytest

from kaveri.errors import InvalidArgument, LayoutMismatch, NoCapacity
from kaveri.errors import TransferFailed as TransferRefused
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.notes import token_note
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaEvent,
    ReplicaGivenUp,
    ReplicaGrew,
    ReplicaKey,
    ReplicaOrphaned,
    ReplicaStore,
)
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.push import PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport

EventT = TypeVar("EventT")

SOON_S = 60.0
"""Long enough for a busy machine; the awaited events take a small part of it."""
_POOL_BLOCKS = 64
"""Blocks of an owner's pool, and of an engine's."""


class ReplicaHarness(Protocol):
    """Makes the stores under test."""

    layout: KvLayout
    """Layout of the store, with at least 2 layers."""
    transports: Sequence[Transport]
    """Transports of owners and engines. Owners push to the store, and it to engines that listen on a Unix socket."""

    def store(self, memory_bytes: int) -> ReplicaStore:
        """Make a store of at most memory_bytes, not started. All of one harness take pushes at the same addresses."""


class Heard:
    """A listener that records events, and waits for them. Thread-safe."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        """The listener."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[EventT], is_wanted: Callable[[EventT], bool] = lambda _: True) -> list[EventT]:
        """Return the events of this kind that match."""
        return [event for event in tuple(self.events) if isinstance(event, kind) and is_wanted(event)]

    def wait_for(self, kind: type[EventT], is_wanted: Callable[[EventT], bool] = lambda _: True) -> EventT:
        """Wait for the first of these events. Raises AssertionError after SOON_S."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.of(kind, is_wanted), SOON_S)
        assert arrived, f"no {kind.__name__} after {SOON_S} s; the last events: {self.events[-5:]}"
        return self.of(kind, is_wanted)[0]


class ReplicaOwner:
    """An instance that owns requests: a pool of random bytes, and a sender that pushes them."""

    def __init__(self, harness: ReplicaHarness, seed: int = 0) -> None:
        self.layout = harness.layout
        self.pool = KvPool(harness.layout, _POOL_BLOCKS)
        rng = np.random.default_rng(seed)
        self.pool.memory[:] = rng.integers(0, 256, self.pool.memory.shape, np.uint8)
        self.token_ids = [int(token_id) for token_id in rng.integers(0, 2**32, self.tokens(_POOL_BLOCKS))]
        """Tokens of a request that has the pool's blocks in their order."""
        self.heard = Heard()
        self.sender = KvSender(self.pool, self.heard, transports=harness.transports)

    def tokens(self, block_count: int) -> int:
        """Return the tokens of this many blocks."""
        return block_count * self.layout.block_tokens

    def write(self, ticket: Ticket, first: int, end: int) -> None:
        """Queue blocks [first, end)."""
        for layer in range(self.layout.layer_count):
            self.sender.write(ticket.transfer_id, layer, first, range(first, end))

    def mark(self, ticket: Ticket, first: int, end: int) -> None:
        """Queues blocks [first, end) and marks them."""
        self.write(ticket, first, end)
        note = token_note(self.token_ids[self.tokens(first) : self.tokens(end)])
        self.sender.mark(ticket.transfer_id, end, note)

    def unanswered_bytes(self) -> int:
        """Bytes written by pushes that are under way."""
        return sum(peer.unaccepted_bytes for peer in self.sender.flow().peers)

    def wait_for_mark(self, ticket: Ticket, block_count: int) -> None:
        """Wait until the store has answered a mark."""
        marked = PushMarked(ticket.transfer_id, block_count)
        self.heard.wait_for(PushMarked, lambda event: event == marked)

    def wait_for_blocks(self, ticket: Ticket, block_count: int) -> None:
        """Wait until the store has granted this many blocks in all."""
        extended = PushExtended(ticket.transfer_id, block_count)
        self.heard.wait_for(PushExtended, lambda event: event == extended)

    def wait_for_failure(self, ticket: Ticket) -> str:
        """Return why the push has failed."""
        return self.heard.wait_for(PushFailed, lambda event: event.transfer_id == ticket.transfer_id).reason


class Target:
    """An engine's pool that replicas are pushed to."""

    def __init__(self, harness: ReplicaHarness, socket: Path) -> None:
        self.pool = KvPool(harness.layout, _POOL_BLOCKS)
        self.heard = Heard()
        self.receiver = KvReceiver(
            self.pool, self.heard, listen=[KvEndpoint("unix", str(socket))], epoch=7, transports=harness.transports
        )
        self._free = list(range(_POOL_BLOCKS))

    def grant(self, token_count: int) -> Ticket:
        """Grant a ticket for blocks of no other ticket of this pool."""
        count = self.pool.layout.block_count(token_count)
        blocks, self._free = self._free[:count], self._free[count:]
        return self.receiver.grant(blocks, token_count, 60.0)

    def require_holds(self, ticket: Ticket, owner: ReplicaOwner) -> None:
        """Assert that the ticket's blocks hold the owner's first blocks."""
        self.heard.wait_for(TransferLanded, lambda event: event.transfer_id == ticket.transfer_id)
        theirs = owner.pool.memory[:, : len(ticket.block_ids)]
        assert (self.pool.memory[:, list(ticket.block_ids)] == theirs).all(), "the replica is not what its owner wrote"


class ReplicaWorld:
    """A store with its owners and engines; all are closed at the end."""

    def __init__(self, harness: ReplicaHarness, block_count: int, folder: Path, stack: ExitStack) -> None:
        self.harness = harness
        self.layout = harness.layout
        self.block_bytes = harness.layout.layer_count * harness.layout.block_bytes
        self.heard = Heard()
        self.store = harness.store(block_count * self.block_bytes)
        self.store.start(self.heard)
        stack.callback(self.store.close)
        self._folder = folder
        self._stack = stack
        self._count = 0

    def owner(self, seed: int = 0) -> ReplicaOwner:
        """Make another instance that owns requests."""
        owner = ReplicaOwner(self.harness, seed)
        self._stack.callback(owner.sender.close)
        return owner

    def target(self) -> Target:
        """Make another engine."""
        self._count += 1
        target = Target(self.harness, self._folder / f"target{self._count}.sock")
        self._stack.callback(target.receiver.close)
        return target

    def open(self, owner: ReplicaOwner, name: str = "r", block_count: int = 1, expires_in_s: float = 60.0) -> Ticket:
        """Open a replica of a request that has this many whole blocks, and the owner's push for it."""
        token_count = max(1, owner.tokens(block_count))
        ticket = self.store.open(key_of(name), self.layout, token_count, expires_in_s)
        owner.sender.open(ticket)
        return ticket

    def copied(self, owner: ReplicaOwner, name: str = "r", block_count: int = 1) -> Ticket:
        """Do the same, and mark all its whole blocks."""
        ticket = self.open(owner, name, block_count)
        owner.mark(ticket, 0, block_count)
        owner.wait_for_mark(ticket, block_count)
        self.heard.wait_for(ReplicaGrew, lambda event: event.key == key_of(name))
        return ticket

    def wait_until_used(self, block_count: int) -> None:
        """Wait until exactly this many blocks of the store are in use."""
        used_bytes = block_count * self.block_bytes
        self.wait_until(lambda: self.store.usage().used_bytes == used_bytes, f"{block_count} blocks in use")
        self.store.check_integrity()

    def wait_until_grown(self, token_count: int) -> None:
        """Wait until a replica has reported this watermark."""
        self.heard.wait_for(ReplicaGrew, lambda event: event.token_count == token_count)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds."""
        give_up_at_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < give_up_at_s, f"no {what} after {SOON_S} s: {self.store.usage()}"
            threading.Event().wait(0.002)

    def told(self, name: str) -> list[ReplicaEvent]:
        """Return the events of a replica."""
        kinds = (ReplicaGrew, ReplicaOrphaned, ReplicaDropped, ReplicaGivenUp)
        return [event for event in self.heard.of(object) if isinstance(event, kinds) and event.key == key_of(name)]


def key_of(name: str) -> ReplicaKey:
    """Return the key of a test's replica."""
    return ReplicaKey(name, 0, 1)


class ReplicaConformance:
    """The suite. Every test makes a store of its own from the `harness` fixture."""

    @pytest.fixture
    def world(self, harness: ReplicaHarness, tmp_path: Path) -> Iterator[Callable[[int], ReplicaWorld]]:
        """Make the world of a store of this many blocks."""
        with ExitStack() as stack:
            yield lambda block_count: ReplicaWorld(harness, block_count, tmp_path, stack)

    # Growing.

    def test_replica_grows_with_each_mark_and_names_its_tokens(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.open(owner, block_count=5)
        assert ticket.is_open
        assert (len(ticket.block_ids), here.store.watermark(key_of("r"))) == (6, 0)
        for first, end in ((0, 2), (2, 3), (3, 6)):
            owner.mark(ticket, first, end)
            here.wait_until_grown(owner.tokens(end))
            assert here.store.watermark(key_of("r")) == owner.tokens(end)
            assert here.store.token_ids(key_of("r")) == tuple(owner.token_ids[: owner.tokens(end)])
        assert here.told("r") == [ReplicaGrew(key_of("r"), owner.tokens(end)) for end in (2, 3, 6)]
        here.store.check_integrity()

    def test_what_is_written_and_not_marked_does_not_count(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.copied(owner, block_count=2)
        owner.write(ticket, 2, 3)
        owner.sender.abort(ticket.transfer_id)
        here.heard.wait_for(ReplicaDropped)
        assert here.heard.of(ReplicaGrew) == [ReplicaGrew(key_of("r"), owner.tokens(2))]

    def test_owner_gets_its_next_block_with_each_mark(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(30)
        owner = here.owner()
        ticket = here.open(owner, block_count=0)
        assert len(ticket.block_ids) == 1
        for block in range(20):
            owner.mark(ticket, block, block + 1)
            owner.wait_for_blocks(ticket, block + 2)
        here.wait_until_used(21)
        here.store.seal(key_of("r"))
        # The block ahead is not needed any more.
        here.wait_until_used(20)
        target = here.target()
        landing = target.grant(owner.tokens(20))
        here.store.push(key_of("r"), landing).result(SOON_S)
        target.require_holds(landing, owner)

    # Pushing.

    def test_replica_is_pushed_to_several_engines_whole_and_in_part(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        here.copied(owner, block_count=6)
        here.store.seal(key_of("r"))
        targets = [here.target() for _ in range(3)]
        tickets = [target.grant(owner.tokens(count)) for target, count in zip(targets, (1, 5, 6), strict=True)]
        pushes = [here.store.push(key_of("r"), ticket) for ticket in tickets]
        for target, ticket, push in zip(targets, tickets, pushes, strict=True):
            push.result(SOON_S)
            target.require_holds(ticket, owner)
        here.store.drop(key_of("r"))
        here.wait_until_used(0)

    def test_blocks_that_the_engine_has_already_are_left_out(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        here.copied(owner, block_count=4)
        ticket = target.receiver.grant((8, 9), owner.tokens(4), 60.0, first_block=2)
        here.store.push(key_of("r"), ticket).result(SOON_S)
        assert (target.pool.memory[:, [8, 9]] == owner.pool.memory[:, 2:4]).all()

    def test_failed_push_leaves_the_replica_as_it_was(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        here.copied(owner, block_count=3)
        refused = target.grant(owner.tokens(3))
        target.receiver.revoke(refused.transfer_id)
        with pytest.raises(TransferRefused):
            here.store.push(key_of("r"), refused).result(SOON_S)
        foreign = replace(target.grant(owner.tokens(3)), layout=replace(here.layout, model_fingerprint="another"))
        with pytest.raises(LayoutMismatch):
            here.store.push(key_of("r"), foreign).result(SOON_S)
        ticket = target.grant(owner.tokens(3))
        here.store.push(key_of("r"), ticket).result(SOON_S)
        target.require_holds(ticket, owner)
        here.store.check_integrity()

    def test_more_than_is_held_is_not_pushed(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        here.copied(owner, block_count=2)
        for ticket, field in (
            (target.grant(owner.tokens(2) + 1), "ticket.token_count"),
            (replace(target.grant(owner.tokens(2)), block_ids=(0,)), "ticket.block_ids"),
        ):
            with pytest.raises(InvalidArgument) as raised:
                here.store.push(key_of("r"), ticket).result(SOON_S)
            assert raised.value.field == field
        with pytest.raises(TransferRefused):
            here.store.push(key_of("other"), target.grant(owner.tokens(1))).result(SOON_S)

    # Owners that end.

    def test_sealed_replica_takes_no_more_from_its_owner(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        ticket = here.copied(owner, block_count=3)
        here.store.seal(key_of("r"))
        here.store.seal(key_of("r"))
        owner.mark(ticket, 3, 4)
        owner.wait_for_failure(ticket)
        assert here.store.watermark(key_of("r")) == owner.tokens(3)
        landing = target.grant(owner.tokens(3))
        here.store.push(key_of("r"), landing).result(SOON_S)
        target.require_holds(landing, owner)
        here.wait_until_used(3)
        grew, orphaned = here.told("r")
        assert grew == ReplicaGrew(key_of("r"), owner.tokens(3))
        assert isinstance(orphaned, ReplicaOrphaned)

    def test_replica_of_an_owner_that_is_lost_is_kept_until_it_is_dropped(
        self, world: Callable[[int], ReplicaWorld]
    ) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        ticket = here.copied(owner, block_count=3)
        owner.write(ticket, 3, 4)
        # Seen by all others, its process has ended.
        owner.sender.close()
        here.heard.wait_for(ReplicaOrphaned)
        here.wait_until_used(3)
        landing = target.grant(owner.tokens(3))
        here.store.push(key_of("r"), landing).result(SOON_S)
        target.require_holds(landing, owner)
        here.store.drop(key_of("r"))
        here.wait_until_used(0)

    def test_replica_that_its_owner_gave_up_is_dropped(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.copied(owner, block_count=3)
        owner.sender.abort(ticket.transfer_id)
        here.heard.wait_for(ReplicaDropped)
        here.wait_until_used(0)
        assert here.store.watermark(key_of("r")) == 0
        here.copied(owner, block_count=2)

    def test_replica_that_stays_is_kept_when_its_owner_gives_it_up(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        ticket = here.store.open(key_of("r"), here.layout, owner.tokens(3), 60.0, stays=True)
        owner.sender.open(ticket)
        owner.mark(ticket, 0, 3)
        here.wait_until_grown(owner.tokens(3))
        owner.sender.abort(ticket.transfer_id)
        here.heard.wait_for(ReplicaGivenUp)
        here.wait_until_used(3)
        landing = target.grant(owner.tokens(3))
        here.store.push(key_of("r"), landing).result(SOON_S)
        target.require_holds(landing, owner)
        here.store.drop(key_of("r"))
        here.wait_until_used(0)
        empty = here.store.open(key_of("empty"), here.layout, owner.tokens(1), 60.0, stays=True)
        owner.sender.open(empty)
        owner.sender.abort(empty.transfer_id)
        here.heard.wait_for(ReplicaDropped, lambda event: event.key == key_of("empty"))
        here.wait_until_used(0)

    def test_replica_without_a_whole_block_goes_with_its_owner(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.open(owner, block_count=2)
        owner.write(ticket, 0, 1)
        here.wait_until(lambda: owner.unanswered_bytes() == here.block_bytes, "block under way")
        owner.sender.close()
        here.heard.wait_for(ReplicaDropped)
        here.wait_until_used(0)

    @pytest.mark.parametrize("is_marked", [False, True])
    def test_owner_that_marks_nothing_for_too_long_counts_as_lost(
        self, world: Callable[[int], ReplicaWorld], is_marked: bool
    ) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.open(owner, block_count=2, expires_in_s=0.5)
        if is_marked:
            owner.mark(ticket, 0, 1)
            here.heard.wait_for(ReplicaOrphaned)
            assert here.store.watermark(key_of("r")) == owner.tokens(1)
        else:
            here.heard.wait_for(ReplicaDropped)
        owner.wait_for_failure(ticket)

    def test_mark_that_does_not_name_its_tokens_is_refused(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.copied(owner, block_count=2)
        owner.write(ticket, 2, 3)
        owner.sender.mark(ticket.transfer_id, 3, token_note(owner.token_ids[: owner.tokens(1) - 1]))
        here.heard.wait_for(ReplicaOrphaned)
        owner.wait_for_failure(ticket)
        assert here.store.watermark(key_of("r")) == owner.tokens(2)
        assert here.store.token_ids(key_of("r")) == tuple(owner.token_ids[: owner.tokens(2)])

    def test_ticket_of_a_former_incarnation_is_refused(self, harness: ReplicaHarness, tmp_path: Path) -> None:
        with ExitStack() as stack:
            former = ReplicaWorld(harness, 10, tmp_path, stack)
            ticket = former.store.open(key_of("r"), former.layout, 1, 60.0)
            former.store.close()
            here = ReplicaWorld(harness, 10, tmp_path, stack)
            owner = here.owner()
            owner.sender.open(ticket)
            owner.mark(ticket, 0, 1)
            owner.wait_for_failure(ticket)
            assert here.heard.events == []

    # Memory.

    def test_memory_is_exactly_what_was_asked_for(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(7)
        assert here.store.usage().total_bytes == 7 * here.block_bytes
        owner = here.owner()
        here.copied(owner, "a", block_count=2)
        here.open(owner, "b", block_count=3)
        assert here.store.usage().used_bytes == 7 * here.block_bytes
        with pytest.raises(NoCapacity) as raised:
            here.open(owner, "c", block_count=0)
        assert raised.value.role == "replica"
        here.store.drop(key_of("b"))
        # "a" takes its next block first, if it still waits for one.
        here.wait_until_used(3)
        here.open(owner, "c", block_count=3)
        here.wait_until_used(7)
        assert here.store.usage().replica_count == 2

    def test_replica_that_grows_in_a_full_store_waits_and_goes_on(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(6)
        owner = here.owner()
        ticket = here.open(owner, "a", block_count=0)
        here.open(owner, "b", block_count=4)
        owner.mark(ticket, 0, 1)
        owner.wait_for_mark(ticket, 1)
        assert not owner.heard.of(PushExtended, lambda event: event.transfer_id == ticket.transfer_id)
        # Waiting copies come before new ones.
        with pytest.raises(NoCapacity):
            here.open(owner, "c", block_count=0)
        here.store.drop(key_of("b"))
        owner.wait_for_blocks(ticket, 2)
        owner.mark(ticket, 1, 2)
        owner.wait_for_mark(ticket, 2)
        here.wait_until_grown(owner.tokens(2))

    def test_drop_ends_the_owners_push_and_pushes_to_engines(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner, target = here.owner(), here.target()
        ticket = here.copied(owner, block_count=3)
        landing = target.grant(owner.tokens(3))
        push = here.store.push(key_of("r"), landing)
        here.store.drop(key_of("r"))
        here.store.drop(key_of("r"))
        owner.wait_for_failure(ticket)
        # It had landed before the drop, or is given up.
        assert push.exception(SOON_S) is None or isinstance(push.exception(), TransferRefused)
        here.wait_until_used(0)
        assert here.told("r") == [ReplicaGrew(key_of("r"), owner.tokens(3))]

    # Bad calls, and the end.

    def test_replicas_of_other_layouts_are_refused_by_field(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(4)
        for field, value in (("model_fingerprint", "another"), ("block_tokens", here.layout.block_tokens * 2)):
            with pytest.raises(LayoutMismatch) as raised:
                here.store.open(key_of("r"), replace(here.layout, **{field: value}), 1, 60.0)  # type: ignore[arg-type]
            assert raised.value.field == field
        assert here.store.usage().used_bytes == 0

    def test_bad_calls_are_refused_and_change_nothing(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(4)
        for token_count, expires_in_s, field in ((0, 60.0, "token_count"), (1, float("nan"), "expires_in_s")):
            with pytest.raises(InvalidArgument) as raised:
                here.store.open(key_of("r"), here.layout, token_count, expires_in_s)
            assert raised.value.field == field
        with pytest.raises(NoCapacity):
            here.store.open(key_of("r"), here.layout, 1000 * here.layout.block_tokens, 60.0)
        unknown = key_of("unknown")
        here.store.seal(unknown)
        here.store.drop(unknown)
        assert (here.store.watermark(unknown), here.store.token_ids(unknown)) == (0, ())
        here.wait_until_used(0)

    def test_replica_that_is_opened_again_begins_again(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(4)
        owner = here.owner()
        former = here.copied(owner, block_count=2)
        ticket = here.open(owner, block_count=0)
        owner.wait_for_failure(former)
        assert here.store.watermark(key_of("r")) == 0
        owner.mark(ticket, 0, 1)
        owner.wait_for_mark(ticket, 1)
        here.wait_until_used(2)
        assert not here.heard.of(ReplicaDropped)

    def test_closed_store_ends_its_transfers_and_says_nothing(self, world: Callable[[int], ReplicaWorld]) -> None:
        here = world(10)
        owner = here.owner()
        ticket = here.copied(owner, block_count=3)
        told = list(here.heard.events)
        here.store.close()
        here.store.close()
        owner.wait_for_failure(ticket)
        assert here.heard.events == told
        with pytest.raises(TransferRefused):
            here.store.open(key_of("other"), here.layout, 1, 60.0)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_owners_and_drops_leave_no_block_behind(
        self, world: Callable[[int], ReplicaWorld], seed: int
    ) -> None:
        print(f"seed {seed}")
        rng = random.Random(seed)
        here = world(24)
        target = here.target()
        live: dict[str, tuple[ReplicaOwner, Ticket, int]] = {}
        owners = [here.owner(number) for number in range(3)]
        for step in range(80):
            act = rng.random()
            if act < 0.4 or not live:
                name, owner, blocks = f"r{step}", rng.choice(owners), rng.randrange(1, 6)
                try:
                    live[name] = owner, here.copied(owner, name, blocks), blocks
                except NoCapacity:
                    here.store.drop(key_of(live.popitem()[0] if live else "none"))
            else:
                name = rng.choice(sorted(live))
                owner, ticket, blocks = live.pop(name)
                if act < 0.6:
                    owner.sender.abort(ticket.transfer_id)
                elif act < 0.8:
                    here.store.seal(key_of(name))
                    if len(ticket.block_ids) <= 5 and step < 40:
                        landing = target.grant(owner.tokens(1))
                        here.store.push(key_of(name), landing).result(SOON_S)
                        target.require_holds(landing, owner)
                    here.store.drop(key_of(name))
                else:
                    here.store.drop(key_of(name))
            here.store.check_integrity()
        for name in live:
            here.store.drop(key_of(name))
        here.wait_until_used(0)
        assert here.store.usage().replica_count == 0
