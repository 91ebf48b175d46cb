"""What every KV transport must do, as tests over a real sender and a real receiver.

The author of a transport subclasses TransportConformance in a test module and names it::

    class TestMyLink(TransportConformance):
        factory = "my_package.link:MyTransport"     # called without arguments

        def address(self, directory: Path) -> str:   # where a receiver may listen
            return str(directory / "kv.sock")

Randomised runs print their seed; KAVERI_KV_SEEDS is how many there are. What it does not verify: speed, behaviour over
a network that loses or delays, and memory that is not the host's.
"""

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kaveri.errors import LayoutMismatch, TransferFailed
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.digest import Digest, DigestFactory, xxh3
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import (
    PEER_BLOCKS,
    PEER_LAYOUT,
    PeerProcess,
    fill_pool,
    load_transport,
    ticket_from_json,
    ticket_to_json,
)

WAIT_S = 20.0
"""Deadline of every wait; a loaded machine is slow, a hang is for ever."""
PROMPT_S = 1.0
"""What the contract calls promptly."""
SMALL_LAYOUT = KvLayout("conformance", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="float32")
"""320-byte blocks: odd sizes find more than round ones."""
MARK = 0xEE
"""What the tests write into blocks that were given back. Nothing else may write there afterwards."""

Event = PushAccepted | PushFailed | TransferLanded | TransferReleased


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits for a condition; fails the test after the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.002)


class Recorder:
    """Keeps the events of one side, and asserts that no transfer has two."""

    def __init__(self, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._changed = threading.Condition()
        self._on_event = on_event
        self.events: dict[bytes, Event] = {}
        self.doubled: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        with self._changed:
            if event.transfer_id in self.events:
                self.doubled.append(event)
            self.events[event.transfer_id] = event
            self._changed.notify_all()

    def wait(self, ticket: Ticket, timeout_s: float = WAIT_S) -> Event:
        """The event of this transfer."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: ticket.transfer_id in self.events, timeout_s)
            assert arrived, f"no event of the transfer within {timeout_s:g} s"
            return self.events[ticket.transfer_id]


class World:
    """A sender and a receiver over one transport, with the account of the receiver's blocks.

    The receiver's pool must equal `expected` at every rest: granted blocks change by a landing only, blocks of released
    transfers are marked at once and stay so, and all others never change.
    """

    def __init__(self, factory: str, address: str, layout: KvLayout, block_count: int) -> None:
        self.factory, self.address = factory, address
        self.source, self.target = KvPool(layout, block_count), KvPool(layout, block_count)
        fill_pool(self.source, 0)
        self.expected = self.target.memory.copy()
        self.allocator = BlockAllocator(block_count)
        self.tickets: dict[bytes, Ticket] = {}
        self.pushed, self.landed = Recorder(), Recorder(self._settle)
        self.epoch = 0
        self.receiver = self.start_receiver()
        self.sender = self.start_sender()

    def start_receiver(self) -> KvReceiver:
        """A receiver of the next epoch at the world's address."""
        self.epoch += 1
        transport = load_transport(self.factory)
        listen = [KvEndpoint(transport.name, self.address)]
        self.receiver = KvReceiver(self.target, self.landed, listen=listen, epoch=self.epoch, transports=[transport])
        return self.receiver

    def start_sender(self, digest: DigestFactory = xxh3, idle_s: float = 60.0) -> KvSender:
        """One more sender; the caller closes it, unless it becomes self.sender."""
        transports = [load_transport(self.factory)]
        return KvSender(self.source, self.pushed, transports=transports, digest=digest, idle_s=idle_s)

    def grant(self, block_count: int, expires_in_s: float = 60.0) -> Ticket:
        """Takes blocks and leases them to a transfer."""
        owner = object()
        blocks = self.allocator.allocate(owner, block_count)
        token_count = block_count * self.target.layout.block_tokens
        ticket = self.receiver.grant(blocks, token_count, expires_in_s)
        self.allocator.move(owner, ticket.transfer_id)
        self.tickets[ticket.transfer_id] = ticket
        return ticket

    def push(self, ticket: Ticket, source_blocks: list[int], sender: KvSender | None = None) -> None:
        """All of a transfer, layer by layer."""
        sender = sender or self.sender
        sender.open(ticket)
        for layer in range(self.source.layout.layer_count):
            sender.write(ticket.transfer_id, layer, 0, source_blocks)
        sender.finish(ticket.transfer_id, b"note")

    def expect(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """This transfer, once landed, has put these blocks where its ticket says."""
        self.expected[:, ticket.block_ids] = self.source.memory[:, source_blocks]

    def require_landed(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """Waits for the landing and for its acceptance, and compares the whole pool."""
        landed, accepted = self.landed.wait(ticket), self.pushed.wait(ticket)
        kv_bytes = self.source.memory[:, source_blocks].nbytes
        assert landed == TransferLanded(ticket.transfer_id, kv_bytes, b"note"), landed
        assert accepted == PushAccepted(ticket.transfer_id, kv_bytes, load_transport(self.factory).label), accepted
        self.expect(ticket, source_blocks)
        self.check_target()

    def require_released(self, ticket: Ticket, timeout_s: float = WAIT_S) -> str:
        """Waits until the blocks are given back; returns why."""
        event = self.landed.wait(ticket, timeout_s)
        assert isinstance(event, TransferReleased), event
        return event.reason

    def require_failed(self, ticket: Ticket, timeout_s: float = WAIT_S) -> str:
        """Waits until the sender gives the source blocks back; returns why."""
        event = self.pushed.wait(ticket, timeout_s)
        assert isinstance(event, PushFailed), event
        return event.reason

    def require_works(self) -> None:
        """One more transfer lands."""
        ticket, blocks = self.grant(2), [1, 0]
        self.push(ticket, blocks)
        self.require_landed(ticket, blocks)

    def check_target(self) -> None:
        """Compares the whole target pool with what it must hold."""
        wrong = np.argwhere((self.target.memory != self.expected).any(axis=2))
        assert not len(wrong), f"wrong bytes in (layer, block) {wrong[:10].tolist()}"

    def check_integrity(self) -> None:
        """No event twice, no block leaked, none written to after it was given back."""
        assert not self.pushed.doubled
        assert not self.landed.doubled
        self.allocator.check_integrity(set(self.tickets))
        self.check_target()

    def close(self) -> None:
        """Ends both sides. All granted blocks are accounted for then."""
        self.sender.close()
        self.receiver.close()
        for event in self.landed.events.values():
            self.allocator.release(event.transfer_id)
        self.allocator.check_integrity(())

    def _settle(self, event: Event) -> None:
        if isinstance(event, TransferReleased):
            blocks = list(self.tickets[event.transfer_id].block_ids)
            self.target.memory[:, blocks] = MARK
            self.expected[:, blocks] = MARK
            self.allocator.release(event.transfer_id)


class OneByteWrong:
    """A digest that sees the first byte of all it is given flipped: to the receiver, a byte flipped on the way."""

    def __init__(self) -> None:
        self._digest: Digest = xxh3()

    def update(self, data: memoryview, /) -> None:
        """Takes more bytes, the first one flipped."""
        flipped = bytearray(data)
        flipped[0] ^= 1
        self._digest.update(memoryview(flipped))

    def intdigest(self) -> int:
        """A digest of other bytes."""
        return self._digest.intdigest()


def open_descriptors() -> set[tuple[str, str]]:
    """Every descriptor of this process with what it refers to, so that one that is given out again counts as new."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        # The one that lists them is gone by now.
        with contextlib.suppress(FileNotFoundError):
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    # Pools are memory files, which close with their last reference: pytest still has one.
    return {(number, target) for number, target in descriptors if not target.startswith("/memfd:kaveri-kv")}


class TransportConformance:
    """Subclass it; see the head of the file."""

    factory: ClassVar[str]

    def address(self, directory: Path) -> str:
        """Where a receiver may listen."""
        raise NotImplementedError

    @pytest.fixture
    def nothing_left(self) -> Iterator[None]:
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        yield
        left = set(threading.enumerate()) - threads
        assert not left, f"threads are left: {left}"
        # Others of this process may close theirs meanwhile, so what counts is what is new.
        assert not (new := open_descriptors() - descriptors), f"descriptors are left: {new}"

    @pytest.fixture
    def world(self, tmp_path: Path, nothing_left: None) -> Iterator[World]:
        world = World(self.factory, self.address(tmp_path), SMALL_LAYOUT, 64)
        try:
            yield world
            world.check_integrity()
        finally:
            world.close()

    @pytest.fixture
    def large_world(self, tmp_path: Path, nothing_left: None) -> Iterator[World]:
        """Its source pool equals that of a sender in another process."""
        world = World(self.factory, self.address(tmp_path), PEER_LAYOUT, PEER_BLOCKS)
        try:
            yield world
            world.check_integrity()
        finally:
            world.close()

    # What lands

    def test_blocks_land_where_the_ticket_says_and_nowhere_else(self, world: World) -> None:
        world.allocator.allocate("hole", 1)
        ticket = world.grant(7)
        source = [40, 3, 4, 5, 63, 0, 1]
        world.push(ticket, source)
        world.require_landed(ticket, source)
        world.allocator.release("hole")

    def test_a_transfer_without_blocks_lands(self, world: World) -> None:
        ticket = world.grant(0)
        world.push(ticket, [])
        world.require_landed(ticket, [])

    def test_more_regions_than_one_system_call_takes_land(self, tmp_path: Path, nothing_left: None) -> None:
        block_count = 5000
        world = World(self.factory, self.address(tmp_path), SMALL_LAYOUT, block_count)
        try:
            ticket = world.grant(block_count)
            source = list(range(0, block_count, 2)) + list(range(1, block_count, 2))
            world.push(ticket, source)
            world.require_landed(ticket, source)
        finally:
            world.close()

    def test_chunks_layers_and_transfers_may_interleave(self, world: World) -> None:
        tickets = [world.grant(6), world.grant(5)]
        sources = [[9, 8, 7, 20, 21, 22], [1, 3, 5, 30, 31]]
        for ticket in tickets:
            world.sender.open(ticket)
        for start, end in ((0, 2), (2, 3), (3, 6)):
            for layer in range(SMALL_LAYOUT.layer_count):
                for ticket, source in zip(tickets, sources, strict=True):
                    world.sender.write(ticket.transfer_id, layer, start, source[start:end])
        for ticket in tickets:
            world.sender.finish(ticket.transfer_id, b"note")
        for ticket, source in zip(tickets, sources, strict=True):
            world.landed.wait(ticket)
            world.expect(ticket, source)
        for ticket, source in zip(tickets, sources, strict=True):
            world.require_landed(ticket, source)

    def test_several_senders_push_into_one_receiver_at_once(self, world: World) -> None:
        senders = [world.start_sender() for _ in range(4)]
        try:
            grants = [(sender, world.grant(5), [i, i + 9, i + 10, i + 30, i + 2]) for i, sender in enumerate(senders)]
            for sender, ticket, source in grants:
                world.push(ticket, source, sender)
            for _, ticket, source in grants:
                world.landed.wait(ticket)
                world.expect(ticket, source)
            for _, ticket, source in grants:
                world.require_landed(ticket, source)
        finally:
            for sender in senders:
                sender.close()

    @pytest.mark.parametrize("seed", range(int(os.environ.get("KAVERI_KV_SEEDS", "6"))))
    def test_random_transfers_that_end_in_random_ways_leave_the_pool_right(self, world: World, seed: int) -> None:
        print(f"seed {seed}")
        chance = random.Random(seed)
        for _ in range(5):
            transfers: list[tuple[Ticket, list[int]]] = []
            for _ in range(chance.randint(1, 5)):
                ticket = world.grant(chance.randint(1, 10))
                transfers.append((ticket, chance.sample(range(64), len(ticket.block_ids))))
            steps = [self._random_steps(world, chance, *transfer) for transfer in transfers]
            while steps:
                step = chance.choice(steps)
                if next(step, None) is None:
                    steps.remove(step)
            for ticket, source in transfers:
                if isinstance(world.landed.wait(ticket), TransferLanded):
                    world.expect(ticket, source)
                world.pushed.wait(ticket)
            world.check_target()
            for ticket, _ in transfers:
                world.allocator.release(ticket.transfer_id)

    @staticmethod
    def _random_steps(world: World, chance: random.Random, ticket: Ticket, source: list[int]) -> Iterator[bool]:
        world.sender.open(ticket)
        yield True
        start = 0
        ending = chance.choice(("land", "land", "abort", "revoke"))
        while start < len(source):
            end = chance.randint(start + 1, len(source))
            for layer in range(SMALL_LAYOUT.layer_count):
                world.sender.write(ticket.transfer_id, layer, start, source[start:end])
                yield True
            start = end
            if ending != "land" and chance.random() < 0.5:
                break
        if ending == "revoke":
            world.receiver.revoke(ticket.transfer_id)
        if ending == "abort":
            world.sender.abort(ticket.transfer_id)
        if ending == "land":
            world.sender.finish(ticket.transfer_id, b"note")

    # What is refused

    def test_a_layout_that_differs_is_refused_at_once(self, world: World) -> None:
        ticket = dataclasses.replace(
            world.grant(1), layout=dataclasses.replace(SMALL_LAYOUT, head_dim=SMALL_LAYOUT.head_dim + 1)
        )
        with pytest.raises(LayoutMismatch):
            world.sender.open(ticket)

    def test_no_transport_in_common_is_refused_at_once(self, world: World) -> None:
        ticket = dataclasses.replace(world.grant(1), endpoints=(KvEndpoint("carrier-pigeon", "the loft"),))
        with pytest.raises(TransferFailed):
            world.sender.open(ticket)

    def test_an_unknown_transfer_is_refused(self, world: World) -> None:
        ticket = dataclasses.replace(world.grant(2), transfer_id=bytes(16))
        world.push(ticket, [1, 2])
        assert "unknown" in world.require_failed(ticket)
        world.require_works()

    def test_a_wrong_secret_is_refused_and_the_right_one_still_lands(self, world: World) -> None:
        ticket = world.grant(2)
        world.push(dataclasses.replace(ticket, secret=bytes(16)), [5, 6])
        assert "secret" in world.require_failed(ticket)
        del world.pushed.events[ticket.transfer_id]
        # Over a connection of its own: an answer to the refused one's end may still be on its way.
        with contextlib.closing(world.start_sender()) as second:
            world.push(ticket, [1, 2], second)
            world.require_landed(ticket, [1, 2])

    def test_a_ticket_of_another_epoch_is_refused(self, world: World) -> None:
        ticket = dataclasses.replace(world.grant(2), epoch=world.epoch + 1)
        world.push(ticket, [1, 2])
        assert "epoch" in world.require_failed(ticket)
        world.require_works()

    def test_a_ticket_in_use_is_refused_to_a_second_sender(self, world: World) -> None:
        ticket, source = world.grant(2), [1, 2]
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, source)
        wait_until(lambda: self._arrived(world, ticket, 0, source), "the first layer has arrived")
        refused = Recorder()
        with contextlib.closing(KvSender(world.source, refused, transports=[load_transport(self.factory)])) as second:
            world.push(ticket, [7, 8], second)
            event = refused.wait(ticket)
            assert isinstance(event, PushFailed)
            assert "in use" in event.reason
        for layer in range(1, SMALL_LAYOUT.layer_count):
            world.sender.write(ticket.transfer_id, layer, 0, source)
        world.sender.finish(ticket.transfer_id, b"note")
        world.require_landed(ticket, source)

    def test_a_ticket_that_has_landed_is_void(self, world: World) -> None:
        ticket = world.grant(2)
        world.push(ticket, [1, 2])
        world.require_landed(ticket, [1, 2])
        del world.pushed.events[ticket.transfer_id]
        world.push(ticket, [3, 4])
        assert "unknown" in world.require_failed(ticket)

    def test_a_second_end_changes_nothing(self, world: World) -> None:
        ticket = world.grant(2)
        world.push(ticket, [1, 2])
        world.sender.finish(ticket.transfer_id, b"another note")
        world.require_landed(ticket, [1, 2])
        world.require_works()

    def test_an_end_before_all_blocks_is_refused(self, world: World) -> None:
        ticket = world.grant(3)
        world.sender.open(ticket)
        for layer in range(SMALL_LAYOUT.layer_count):
            world.sender.write(ticket.transfer_id, layer, 0, [1, 2, 3][: 3 - (layer == 1)])
        world.sender.finish(ticket.transfer_id, b"note")
        assert "incomplete" in world.require_failed(ticket)
        assert "incomplete" in world.require_released(ticket)
        world.require_works()

    def test_a_flipped_byte_is_found_and_the_next_transfer_lands(self, world: World) -> None:
        ticket = world.grant(4)
        with contextlib.closing(world.start_sender(digest=OneByteWrong)) as sender:
            world.push(ticket, [1, 2, 3, 4], sender)
            assert "digest" in world.require_failed(ticket)
        assert "digest" in world.require_released(ticket)
        world.require_works()

    # What is given up

    @pytest.mark.parametrize("layers_written", range(SMALL_LAYOUT.layer_count + 1))
    @pytest.mark.parametrize("end", ["abort", "revoke"])
    def test_abort_and_revoke_end_both_sides_promptly(self, world: World, end: str, layers_written: int) -> None:
        ticket = world.grant(3)
        bystander = world.grant(2)
        world.sender.open(bystander)
        world.sender.open(ticket)
        for layer in range(layers_written):
            world.sender.write(ticket.transfer_id, layer, 0, [1, 2, 3])
        if layers_written:
            wait_until(lambda: self._arrived(world, ticket, layers_written - 1, [1, 2, 3]), "the blocks have arrived")
        if end == "abort":
            world.sender.abort(ticket.transfer_id)
        else:
            world.receiver.revoke(ticket.transfer_id)
        world.require_released(ticket, PROMPT_S)
        if end == "abort" or layers_written:
            world.require_failed(ticket, PROMPT_S)
        for layer in range(SMALL_LAYOUT.layer_count):
            world.sender.write(bystander.transfer_id, layer, 0, [8, 9])
        world.sender.finish(bystander.transfer_id, b"note")
        world.require_landed(bystander, [8, 9])

    def test_unknown_ids_are_ignored(self, world: World) -> None:
        world.receiver.revoke(bytes(16))
        world.sender.write(bytes(16), 0, 0, [1])
        world.sender.finish(bytes(16), b"")
        world.sender.abort(bytes(16))
        world.require_works()

    def test_revoking_what_has_landed_changes_nothing(self, world: World) -> None:
        ticket = world.grant(2)
        world.push(ticket, [1, 2])
        world.require_landed(ticket, [1, 2])
        world.receiver.revoke(ticket.transfer_id)
        world.require_works()
        assert isinstance(world.landed.wait(ticket), TransferLanded)

    def test_a_ticket_that_nobody_uses_expires(self, world: World) -> None:
        ticket = world.grant(2, expires_in_s=0.1)
        assert "expired" in world.require_released(ticket)
        world.push(ticket, [1, 2])
        assert "unknown" in world.require_failed(ticket)

    def test_a_transfer_that_stands_still_expires_on_both_sides(self, world: World) -> None:
        ticket = world.grant(2, expires_in_s=0.2)
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, [1, 2])
        assert "expired" in world.require_released(ticket)
        assert "expired" in world.require_failed(ticket)
        world.require_works()

    # What dies

    def test_a_closed_receiver_fails_the_push_and_gives_the_blocks_back(self, world: World) -> None:
        ticket, unused = world.grant(2), world.grant(2)
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, [1, 2])
        wait_until(lambda: self._arrived(world, ticket, 0, [1, 2]), "the first layer has arrived")
        world.receiver.close()
        world.require_failed(ticket)
        world.require_released(ticket)
        world.require_released(unused)
        with pytest.raises(TransferFailed):
            world.receiver.grant([0], 1, 1.0)

    def test_a_closed_sender_gives_the_blocks_back_on_both_sides(self, world: World) -> None:
        ticket = world.grant(2)
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, [1, 2])
        wait_until(lambda: self._arrived(world, ticket, 0, [1, 2]), "the first layer has arrived")
        world.sender.close()
        world.require_failed(ticket)
        world.require_released(ticket)
        with pytest.raises(TransferFailed):
            world.sender.open(ticket)

    def test_a_receiver_restarted_at_the_same_address_takes_its_own_tickets_only(self, world: World) -> None:
        world.require_works()
        old = world.grant(2)
        world.address = self._address_again(world)
        world.receiver.close()
        world.require_released(old)
        world.start_receiver()
        world.push(dataclasses.replace(old, endpoints=world.receiver.endpoints), [1, 2])
        assert "epoch" in world.require_failed(old)
        world.require_works()

    def test_nobody_at_the_address_fails_the_push(self, world: World) -> None:
        ticket = world.grant(2)
        world.receiver.close()
        world.push(ticket, [1, 2])
        assert "connect" in world.require_failed(ticket)

    def test_an_idle_connection_is_given_up_and_made_again(self, world: World) -> None:
        world.sender.close()
        before = threading.active_count()
        world.sender = world.start_sender(idle_s=0.02)
        world.require_works()
        # Left: the sender's reporter.
        wait_until(lambda: threading.active_count() == before + 1, "the connection's threads have ended")
        world.require_works()

    def test_a_sender_killed_half_way_gives_the_blocks_back(self, large_world: World) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        ticket = world.grant(len(source))
        with PeerProcess("send", self.factory) as peer:
            self._push_all_but_the_end(peer, ticket, source)
            wait_until(lambda: self._arrived(world, ticket, 0, source[:1]), "the first block has arrived")
            peer.signal(signal.SIGKILL)
            world.require_released(ticket)
        world.require_works()

    @pytest.mark.parametrize("how", ["revoked", "expired"])
    def test_blocks_of_a_stopped_sender_are_not_reused_before_it_is_fenced_off(
        self, large_world: World, how: str
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        ticket = world.grant(len(source), expires_in_s=60.0 if how == "revoked" else 4.0)
        # Granted later, so that it expires later.
        witness = world.grant(1, expires_in_s=4.0)
        with PeerProcess("send", self.factory) as peer:
            self._push_all_but_the_end(peer, ticket, source)
            wait_until(lambda: self._arrived(world, ticket, 0, source[:1]), "the first block has arrived")
            peer.signal(signal.SIGSTOP)
            if how == "revoked":
                world.receiver.revoke(ticket.transfer_id)
            if load_transport(self.factory).capabilities.can_revoke:
                assert how in world.require_released(ticket, PROMPT_S if how == "revoked" else WAIT_S)
                world.require_works()
            else:
                if how == "expired":
                    world.require_released(witness)
                # Quarantined blocks hold whatever was written, so only the other transfer's are compared.
                other = world.grant(2)
                world.push(other, [1, 0])
                assert isinstance(world.landed.wait(other), TransferLanded)
                world.expect(other, [1, 0])
                assert ticket.transfer_id not in world.landed.events, "released while its sender could still write"
            peer.signal(signal.SIGCONT)
            assert how in world.require_released(ticket)
            peer.tell("finish")
            assert peer.hear()["event"] == "PushFailed"
        # check_integrity of the fixture finds whatever came late: the released blocks are marked.

    def test_a_stopped_receiver_holds_the_source_blocks_no_longer_than_the_ticket(self, large_world: World) -> None:
        world, source = large_world, list(range(PEER_BLOCKS))
        address = self.address(Path(world.address).parent / "peer") if world.address.startswith("/") else world.address
        Path(address).parent.mkdir(exist_ok=True)
        with PeerProcess("receive", self.factory, address) as peer:
            peer.tell("grant", block_ids=source, token_count=1, expires_in_s=2.0)
            ticket = ticket_from_json(peer.hear())
            peer.signal(signal.SIGSTOP)
            world.push(ticket, source)
            world.require_failed(ticket)
            peer.signal(signal.SIGCONT)
            assert peer.hear()["event"] == "TransferReleased"

    @staticmethod
    def _push_all_but_the_end(peer: PeerProcess, ticket: Ticket, source: list[int]) -> None:
        peer.tell("open", ticket=ticket_to_json(ticket))
        for layer in range(PEER_LAYOUT.layer_count):
            peer.tell("write", layer=layer, first_index=0, source_blocks=source)

    @staticmethod
    def _address_again(world: World) -> str:
        """The address of the running receiver, for its successor."""
        return world.receiver.endpoints[0].address

    @staticmethod
    def _arrived(world: World, ticket: Ticket, layer: int, source: list[int]) -> bool:
        """The bytes of these first blocks of a layer are in the target pool."""
        blocks = list(ticket.block_ids[: len(source)])
        return bool((world.target.memory[layer, blocks] == world.source.memory[layer, source]).all())
