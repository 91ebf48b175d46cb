"""Conformance tests of transfers that a KV transport must refuse or abandon; included in transport_conformance.py."""

import contextlib
import dataclasses

import pytest

from kaveri.errors import NoCapacity, TransferFailed
from kaveri.kv.transfer.receiver import TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.testing.transport_peer import Recorder, load_transport, wait_until
from kaveri.testing.transport_world import SMALL_LAYOUT, TransportSuite, TransportWorld


class RefusalTests(TransportSuite):
    """Tests of transfers that the receiver refuses, or that one side ends."""

    # What is refused

    def test_no_transport_in_common_is_refused_at_once(self, world: TransportWorld) -> None:
        ticket = dataclasses.replace(world.grant(1), endpoints=(KvEndpoint("carrier-pigeon", "the loft"),))
        with pytest.raises(TransferFailed):
            world.sender.open(ticket)

    def test_a_wrong_secret_is_refused_and_the_right_one_still_lands(self, world: TransportWorld) -> None:
        ticket = world.grant(2)
        world.push(dataclasses.replace(ticket, secret=bytes(16)), [5, 6])
        assert "secret" in world.require_failed(ticket)
        del world.pushed.events[ticket.transfer_id]
        # A second connection, because a response about the refused transfer may still be on its way.
        with contextlib.closing(world.start_sender()) as second:
            world.push(ticket, [1, 2], second)
            world.require_landed(ticket, [1, 2])

    def test_a_ticket_of_another_epoch_is_refused(self, world: TransportWorld) -> None:
        ticket = dataclasses.replace(world.grant(2), epoch=world.receiver.epoch + 1)
        world.push(ticket, [1, 2])
        assert "epoch" in world.require_failed(ticket)
        world.require_works()

    def test_a_ticket_in_use_is_refused_to_a_second_sender(self, world: TransportWorld) -> None:
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

    def test_what_comes_after_the_landing_changes_nothing(self, world: TransportWorld) -> None:
        ticket = world.grant(2)
        world.push(ticket, [1, 2])
        world.sender.finish(ticket.transfer_id, b"another note")
        world.require_landed(ticket, [1, 2])
        world.receiver.revoke(ticket.transfer_id)
        # The ticket is void.
        del world.pushed.events[ticket.transfer_id]
        world.push(ticket, [3, 4])
        assert "unknown" in world.require_failed(ticket)
        world.require_works()
        assert isinstance(world.landed.wait(ticket), TransferLanded)

    def test_a_receiver_out_of_room_grants_nothing_and_takes_more_when_a_transfer_ends(
        self, world: TransportWorld
    ) -> None:
        tickets = [world.grant(world.allocator.total // 2) for _ in range(2)]
        for ticket in tickets:
            world.sender.open(ticket)
        with pytest.raises(NoCapacity):
            world.grant(2)
        world.sender.abort(tickets[0].transfer_id)
        world.require_released(tickets[0])
        # On blocks of the abandoned transfer, while another one is under way.
        world.require_works()
        source = list(range(len(tickets[1].block_ids)))
        for layer in range(SMALL_LAYOUT.layer_count):
            world.sender.write(tickets[1].transfer_id, layer, 0, source)
        world.sender.finish(tickets[1].transfer_id, b"note")
        world.landed.wait(tickets[1])
        world.require_landed(tickets[1], source)

    # What is given up

    @pytest.mark.parametrize("layers_written", range(SMALL_LAYOUT.layer_count + 1))
    @pytest.mark.parametrize("end", ["abort", "revoke"])
    def test_abort_and_revoke_end_both_sides_before_the_ticket_does(
        self, world: TransportWorld, end: str, layers_written: int
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

    def test_unknown_ids_are_ignored(self, world: TransportWorld) -> None:
        world.receiver.revoke(bytes(16))
        world.sender.write(bytes(16), 0, 0, [1])
        world.sender.finish(bytes(16), b"")
        world.sender.abort(bytes(16))
        world.require_works()

    def test_a_ticket_that_nobody_uses_expires(self, world: TransportWorld) -> None:
        # The sender also gives up by itself, unless it is connected soon enough to be refused.
        world.require_works()
        ticket = world.grant(2, expires_in_s=0.1)
        assert "expired" in world.require_released(ticket)
        world.push(ticket, [1, 2])
        assert "unknown" in world.require_failed(ticket)
