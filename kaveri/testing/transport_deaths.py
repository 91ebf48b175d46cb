"""Conformance tests of KV transports when a side ends or stops; included in transport_conformance.py."""

import dataclasses
import signal
import threading

import pytest

from kaveri.errors import TransferFailed
from kaveri.kv.transfer.receiver import CREDIT_BYTES, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.transport_peer import PeerNursery, PeerProcess, load_transport, wait_until
from kaveri.testing.transport_world import PEER_BLOCKS, PEER_LAYOUT, TransportSuite, TransportWorld


class DeathTests(TransportSuite):
    """Tests with senders, receivers and connections that are closed, killed, stopped or restarted."""

    def test_a_closed_receiver_fails_the_push_and_gives_the_blocks_back(self, world: TransportWorld) -> None:
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

    def test_a_closed_sender_gives_the_blocks_back_on_both_sides(self, world: TransportWorld) -> None:
        ticket = world.grant(2)
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, [1, 2])
        wait_until(lambda: self._arrived(world, ticket, 0, [1, 2]), "the first layer has arrived")
        world.sender.close()
        world.require_failed(ticket)
        world.require_released(ticket)
        with pytest.raises(TransferFailed):
            world.sender.open(ticket)

    def test_a_receiver_restarted_at_the_same_address_takes_its_own_tickets_only(self, world: TransportWorld) -> None:
        world.require_works()
        first, second = world.grant(2), world.grant(2)
        world.address = self._address_again(world)
        world.receiver.close()
        world.require_released(first)
        world.require_released(second)
        world.start_receiver(second.epoch + 1)
        # The sender may still use the former connection: then the first push detects its end.
        world.push(dataclasses.replace(first, endpoints=world.receiver.endpoints), [1, 2])
        assert world.require_failed(first)
        world.push(dataclasses.replace(second, endpoints=world.receiver.endpoints), [1, 2])
        assert "epoch" in world.require_failed(second)
        world.require_works()

    def test_nobody_at_the_address_fails_the_push(self, world: TransportWorld) -> None:
        ticket = world.grant(2)
        world.receiver.close()
        world.push(ticket, [1, 2])
        assert "connect" in world.require_failed(ticket)

    def test_an_idle_connection_is_given_up_and_made_again(self, world: TransportWorld) -> None:
        world.sender.close()
        before = threading.active_count()
        world.sender = world.start_sender(idle_s=0.02)
        world.require_works()
        # The remaining thread is the sender's reporter.
        wait_until(lambda: threading.active_count() == before + 1, "the connection's threads have ended")
        world.require_works()

    def test_a_receiver_killed_half_way_fails_the_push_and_its_successor_takes_the_next(
        self, large_world: TransportWorld, nursery: PeerNursery
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
        self, large_world: TransportWorld, nursery: PeerNursery, how: str
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        with nursery.start() as peer:
            # Start the sender before the ticket's time begins.
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
                # Quarantined blocks hold anything, so only the other transfer's are compared.
                other = world.grant(2)
                world.push(other, [1, 0])
                assert isinstance(world.landed.wait(other), TransferLanded)
                world.expect(other, [1, 0])
                assert ticket.transfer_id not in world.landed.events, "released while its sender could still write"
            peer.signal(signal.SIGCONT)
            assert how in world.require_released(ticket)
            peer.tell("finish", ticket.transfer_id, b"")
            assert isinstance(peer.wait(ticket), PushFailed)
        # check_integrity of the fixture detects late writes: the released blocks are marked.

    def test_a_stopped_receiver_holds_the_source_blocks_no_longer_than_the_ticket(
        self, large_world: TransportWorld, nursery: PeerNursery
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
    def _peer_address(world: TransportWorld) -> str:
        return f"{world.address}.peer" if world.address.startswith("/") else world.address

    @staticmethod
    def _address_again(world: TransportWorld) -> str:
        return world.receiver.endpoints[0].address
