"""What every KV transport must do, as tests over a real sender and a real receiver.

The author of a transport subclasses TransportConformance in a test module and names it::

    class TestMyLink(TransportConformance):
        factory = "my_package.link:MyTransport"     # called without arguments

        def address(self, directory: Path) -> str:   # where a receiver may listen
            return str(directory / "kv.sock")

Randomised runs (transport_runs.py) print their seeds. KAVERI_KV_RUNS=500 makes as many of them, and KAVERI_KV_SEED says
with which seed they begin. What is not verified: speed, behaviour over a network that loses or delays, and memory that
is not the host's.
"""

import contextlib
import dataclasses
import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kaveri.errors import LayoutMismatch, NoCapacity, TransferFailed
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.digest import DigestFactory, xxh3
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import CREDIT_BYTES, KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import (
    WAIT_S,
    Event,
    PeerNursery,
    PeerProcess,
    Recorder,
    fill_pool,
    load_transport,
    open_descriptors,
    wait_until,
)
from kaveri.testing.transport_runs import MARK, OneByteWrong, RandomRun

RUN_COUNT = int(os.environ.get("KAVERI_KV_RUNS", "40"))
FIRST_SEED = int(os.environ.get("KAVERI_KV_SEED") or random.randrange(1_000_000_000))
SMALL_LAYOUT = KvLayout("conformance", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="float32")
"""320-byte blocks: odd sizes find more than round ones."""
PEER_LAYOUT = KvLayout("conformance", 4, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
"""16 KiB blocks."""
PEER_BLOCKS = 512


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


class TransportConformance:
    """Subclass it; see the head of the file."""

    factory: ClassVar[str]

    def address(self, directory: Path) -> str:
        """Where a receiver may listen."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def nursery(cls) -> Iterator[PeerNursery]:
        """Starts processes."""
        with PeerNursery(cls.factory) as nursery:
            yield nursery

    @pytest.fixture
    def nothing_left(self, nursery: PeerNursery) -> Iterator[None]:
        # Once for the process: what the transport starts for good.
        load_transport(self.factory)
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

    @pytest.mark.timeout(120 + 5 * RUN_COUNT)
    def test_no_random_run_shows_a_wrong_byte_or_leaves_anything(
        self, tmp_path: Path, nursery: PeerNursery, nothing_left: None
    ) -> None:
        address = self.address(tmp_path)
        mapped_before = _mapped_pool_count()
        for seed in range(FIRST_SEED, FIRST_SEED + RUN_COUNT):
            print(f"seed {seed}", flush=True)
            try:
                RandomRun(self.factory, address, nursery, seed).carry_out()
            except BaseException as error:
                error.add_note(f"KAVERI_KV_SEED={seed} KAVERI_KV_RUNS=1 begins with this run")
                raise
        assert _mapped_pool_count() <= mapped_before

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

    def test_a_receiver_out_of_room_grants_nothing_and_takes_more_when_a_transfer_ends(self, world: World) -> None:
        tickets = [world.grant(world.allocator.total // 2) for _ in range(2)]
        for ticket in tickets:
            world.sender.open(ticket)
        with pytest.raises(NoCapacity):
            world.grant(2)
        world.sender.abort(tickets[0].transfer_id)
        world.require_released(tickets[0])
        # On blocks of the transfer that was given up, beside the one that is under way.
        world.require_works()
        source = list(range(len(tickets[1].block_ids)))
        for layer in range(SMALL_LAYOUT.layer_count):
            world.sender.write(tickets[1].transfer_id, layer, 0, source)
        world.sender.finish(tickets[1].transfer_id, b"note")
        world.landed.wait(tickets[1])
        world.require_landed(tickets[1], source)

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
    def test_abort_and_revoke_end_both_sides_before_the_ticket_does(
        self, world: World, end: str, layers_written: int
    ) -> None:
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
        world.require_released(ticket)
        if end == "abort" or layers_written:
            world.require_failed(ticket)
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
        # The sender gives up by itself, too, unless it is connected soon enough to be refused.
        world.require_works()
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

    def test_a_sender_killed_half_way_gives_the_blocks_back(self, large_world: World, nursery: PeerNursery) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        ticket = world.grant(len(source))
        with nursery.start() as peer:
            peer.start_sender(PEER_LAYOUT, PEER_BLOCKS, 0)
            self._push_all_but_the_end(peer, ticket, source)
            wait_until(lambda: self._arrived(world, ticket, 0, source[:1]), "the first block has arrived")
            peer.signal(signal.SIGKILL)
            world.require_released(ticket)
        world.require_works()

    def test_a_receiver_killed_half_way_fails_the_push_and_its_successor_takes_the_next(
        self, large_world: World, nursery: PeerNursery
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS))
        address = self._peer_address(world)
        with nursery.start() as peer:
            pool, endpoints = peer.start_receiver(PEER_LAYOUT, PEER_BLOCKS, address, 1, CREDIT_BYTES)
            old, ticket = (peer.ask("grant", blocks, 1, 60.0) for blocks in ([], source))
            world.sender.open(ticket)
            for layer in range(PEER_LAYOUT.layer_count):
                world.sender.write(ticket.transfer_id, layer, 0, source)
            wait_until(lambda: bool((pool.memory[0, 0] == world.source.memory[0, 0]).all()), "the first block is there")
            peer.signal(signal.SIGKILL)
            world.require_failed(ticket)
        with nursery.start() as peer:
            pool, _ = peer.start_receiver(PEER_LAYOUT, PEER_BLOCKS, endpoints[0].address, 2, CREDIT_BYTES)
            world.push(old, [])
            assert "epoch" in world.require_failed(old)
            ticket = peer.ask("grant", source, 1, 60.0)
            world.push(ticket, source)
            assert isinstance(world.pushed.wait(ticket), PushAccepted)
            assert (pool.memory == world.source.memory).all()
            assert not peer.end()

    @pytest.mark.parametrize("how", ["revoked", "expired"])
    def test_blocks_of_a_stopped_sender_are_not_reused_before_it_is_fenced_off(
        self, large_world: World, nursery: PeerNursery, how: str
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        with nursery.start() as peer:
            # Before the ticket's time begins.
            peer.start_sender(PEER_LAYOUT, PEER_BLOCKS, 0)
            ticket = world.grant(len(source), expires_in_s=60.0 if how == "revoked" else 5.0)
            # Granted later, so that it expires later.
            witness = world.grant(1, expires_in_s=5.0)
            self._push_all_but_the_end(peer, ticket, source)
            wait_until(lambda: self._arrived(world, ticket, 0, source[:1]), "the first block has arrived")
            peer.signal(signal.SIGSTOP)
            if how == "revoked":
                world.receiver.revoke(ticket.transfer_id)
            if load_transport(self.factory).capabilities.can_revoke:
                assert how in world.require_released(ticket)
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
            peer.tell("finish", ticket.transfer_id, b"")
            assert isinstance(peer.wait(ticket), PushFailed)
        # check_integrity of the fixture finds whatever came late: the released blocks are marked.

    def test_a_stopped_receiver_holds_the_source_blocks_no_longer_than_the_ticket(
        self, large_world: World, nursery: PeerNursery
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS))
        with nursery.start() as peer:
            peer.start_receiver(PEER_LAYOUT, PEER_BLOCKS, self._peer_address(world), 1, CREDIT_BYTES)
            ticket = peer.ask("grant", source, 1, 2.0)
            peer.signal(signal.SIGSTOP)
            world.push(ticket, source)
            world.require_failed(ticket)
            peer.signal(signal.SIGCONT)
            assert isinstance(peer.wait(ticket), TransferReleased)

    @staticmethod
    def _push_all_but_the_end(peer: PeerProcess, ticket: Ticket, source: list[int]) -> None:
        peer.tell("open", ticket)
        for layer in range(PEER_LAYOUT.layer_count):
            peer.tell("write", ticket.transfer_id, layer, 0, source)

    @staticmethod
    def _peer_address(world: World) -> str:
        """Where a receiver in another process may listen, beside the world's own."""
        return f"{world.address}.peer" if world.address.startswith("/") else world.address

    @staticmethod
    def _address_again(world: World) -> str:
        """The address of the running receiver, for its successor."""
        return world.receiver.endpoints[0].address

    @staticmethod
    def _arrived(world: World, ticket: Ticket, layer: int, source: list[int]) -> bool:
        """The bytes of these first blocks of a layer are in the target pool."""
        blocks = list(ticket.block_ids[: len(source)])
        return bool((world.target.memory[layer, blocks] == world.source.memory[layer, source]).all())


def _mapped_pool_count() -> int:
    """Pools, one's own and others', that are mapped in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kaveri-kv")
