"""Conformance tests of open transfers: KV pushes that may grow, and whose sender marks how many blocks are complete.
Included in transport_conformance.py."""

import contextlib
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kaveri.errors import InvalidArgument
from kaveri.kv.transfer.digest import xxh3
from kaveri.kv.transfer.receiver import TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushExtended, PushMarked
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.transport_peer import PeerNursery, PeerProcess, load_transport, wait_until
from kaveri.testing.transport_runs import FlippedByte
from kaveri.testing.transport_world import PEER_BLOCKS, PEER_LAYOUT, SMALL_LAYOUT, TransportSuite, TransportWorld

_SOURCE = [40, 3, 4, 5, 63, 0, 1, 22]


class MarkTests(TransportSuite):
    """Tests of open transfers: blocks up to the last mark are kept however the transfer ends."""

    def test_a_mark_is_verified_and_reported_to_both_sides(self, world: TransportWorld) -> None:
        ticket = world.grant(3, source_blocks=_SOURCE[:3])
        world.sender.open(ticket)
        self._write(world, ticket, 0, 1)
        world.sender.mark(ticket.transfer_id, 1, b"the first")
        self._require_marked(world, ticket, 1, b"the first")
        assert self._arrived(world, ticket, SMALL_LAYOUT.layer_count - 1, _SOURCE[:1])
        self._write(world, ticket, 1, 3)
        world.sender.mark(ticket.transfer_id, 2, b"")
        world.sender.mark(ticket.transfer_id, 3, b"all")
        self._require_marked(world, ticket, 3, b"all")
        world.sender.finish(ticket.transfer_id, b"note")
        world.landed.wait(ticket)
        world.require_landed(ticket, _SOURCE[:3])
        told = [step.block_count for step in world.landed.steps[ticket.transfer_id]]
        assert told == [step.block_count for step in world.pushed.steps[ticket.transfer_id]] == [1, 2, 3]

    def test_an_open_push_grows_and_ends_with_fewer_blocks_than_it_was_granted(self, world: TransportWorld) -> None:
        ticket = world.grant(1, source_blocks=_SOURCE)
        # Extended before the sender has opened the transfer.
        world.extend(ticket, 2)
        world.sender.open(ticket)
        world.pushed.wait_for_step(PushExtended(ticket.transfer_id, 3))
        self._write(world, ticket, 0, 3)
        world.sender.mark(ticket.transfer_id, 3, b"")
        for count in (4, 6):
            world.extend(ticket, count - len(world.transfers[ticket.transfer_id].ticket.block_ids))
            world.pushed.wait_for_step(PushExtended(ticket.transfer_id, count))
        self._write(world, ticket, 3, 5)
        with pytest.raises(InvalidArgument, match="in 6"):
            world.sender.write(ticket.transfer_id, 0, 5, _SOURCE[5:7])
        world.sender.finish(ticket.transfer_id, b"note")
        assert isinstance(world.landed.wait(ticket), TransferLanded)
        used = world.transfers[ticket.transfer_id].ticket.block_ids[:5]
        world.expected[:, used] = world.source.memory[:, _SOURCE[:5]]
        kv_bytes = world.source.memory[:, _SOURCE[:5]].nbytes
        assert world.landed.wait(ticket) == TransferLanded(ticket.transfer_id, kv_bytes, b"note")
        label = load_transport(self.factory).label
        assert world.pushed.wait(ticket) == PushAccepted(ticket.transfer_id, kv_bytes, label)
        assert not world.receiver.extend(ticket.transfer_id, [0])
        world.receiver.check_integrity()
        world.require_works()

    def test_an_extension_of_more_blocks_than_a_frame_takes_arrives(self, tmp_path: Path, nothing_left: None) -> None:
        block_count = 2500
        source = list(range(block_count))
        with self.open_world(tmp_path, SMALL_LAYOUT, block_count) as world:
            ticket = world.grant(1, source_blocks=source)
            world.sender.open(ticket)
            world.extend(ticket, block_count - 1)
            world.pushed.wait_for_step(PushExtended(ticket.transfer_id, block_count))
            self._write(world, ticket, 0, block_count)
            world.sender.mark(ticket.transfer_id, block_count, b"")
            self._require_marked(world, ticket, block_count)
            world.sender.abort(ticket.transfer_id)
            world.require_released(ticket)
            assert world.transfers[ticket.transfer_id].kept_count == block_count

    @pytest.mark.parametrize(
        "how",
        ["given up", "marks kept", "sender closed", "revoked", "expired", "wrong digest", "end is early", "changed"],
    )
    def test_what_was_marked_survives_the_end_of_its_push(self, world: TransportWorld, how: str) -> None:
        # Layer by layer, so that all of the first two blocks is before any of the third.
        right_bytes = 2 * SMALL_LAYOUT.layer_count * SMALL_LAYOUT.block_bytes
        digest: Any = partial(FlippedByte, right_bytes) if how == "wrong digest" else xxh3

        def is_intact(transfer_id: bytes, block_count: int | None) -> bool:
            if how == "changed" and block_count == 3:
                sender.abort(transfer_id, keep_marked=True)
            return how != "changed" or block_count != 3

        with contextlib.closing(world.start_sender(digest=digest, is_intact=is_intact)) as sender:
            # Connected before the ticket's time begins.
            plain = world.grant(1)
            world.push(plain, [9], sender)
            world.require_landed(plain, [9])
            ticket = world.grant(4, 1.5 if how == "expired" else 60.0, source_blocks=_SOURCE)
            sender.open(ticket)
            self._write(world, ticket, 0, 2, sender)
            sender.mark(ticket.transfer_id, 2, b"two")
            self._require_marked(world, ticket, 2, b"two")
            self._write(world, ticket, 2, 3, sender)
            wait_until(lambda: self._arrived(world, ticket, 2, _SOURCE[:3]), "the third block has arrived")
            if how in ("given up", "marks kept"):
                sender.abort(ticket.transfer_id, keep_marked=how == "marks kept")
            elif how == "sender closed":
                sender.close()
            elif how == "revoked":
                world.receiver.revoke(ticket.transfer_id)
            elif how in ("wrong digest", "changed"):
                sender.mark(ticket.transfer_id, 3, b"three")
            elif how == "end is early":
                sender.write(ticket.transfer_id, 0, 3, _SOURCE[3:4])
                sender.finish(ticket.transfer_id, b"")
            event = world.landed.wait(ticket)
            assert isinstance(event, TransferReleased), event
            assert event.given_up == (how == "given up")
            assert world.transfers[ticket.transfer_id].kept_count == 2
            world.require_failed(ticket)
        assert len(world.landed.steps[ticket.transfer_id]) == len(world.pushed.steps[ticket.transfer_id]) == 1
        world.receiver.check_integrity()
        world.require_works()

    def test_what_was_marked_survives_the_death_of_the_sender(
        self, large_world: TransportWorld, nursery: PeerNursery
    ) -> None:
        world, source = large_world, list(range(PEER_BLOCKS // 2))
        ticket = world.grant(len(source), source_blocks=source)
        with nursery.start() as peer:
            self._push_marked(peer, ticket, source)
            world.landed.wait_for_step(TransferMarked(ticket.transfer_id, 16, b""))
            peer.signal(signal.SIGKILL)
            event = world.landed.wait(ticket)
        assert isinstance(event, TransferReleased)
        assert not event.given_up
        assert world.transfers[ticket.transfer_id].kept_count >= 16
        world.require_works()

        # check_integrity of the fixture detects late writes.

    @pytest.mark.parametrize("told", [0, 1, 2, 4, 1 << 31])
    def test_a_mark_that_goes_back_or_is_ahead_of_its_blocks_ends_its_transfer_only(
        self, world: TransportWorld, told: int
    ) -> None:
        ticket = world.grant(5, source_blocks=_SOURCE)
        lying = _Lying(load_transport(self.factory), {3: told})
        with contextlib.closing(KvSender(world.source, world.pushed, transports=[lying])) as sender:
            sender.open(ticket)
            self._write(world, ticket, 0, 2, sender)
            sender.mark(ticket.transfer_id, 2, b"")
            self._require_marked(world, ticket, 2)
            self._write(world, ticket, 2, 3, sender)
            sender.mark(ticket.transfer_id, 3, b"")
            assert f"a mark at block {told}" in world.require_released(ticket)
            assert f"a mark at block {told}" in world.require_failed(ticket)
            assert world.transfers[ticket.transfer_id].kept_count == 2
            plain = world.grant(2)
            world.push(plain, [7, 9], sender)
            world.require_landed(plain, [7, 9])

    def test_a_sender_is_not_let_to_mark_back_or_ahead_of_what_it_has_queued(self, world: TransportWorld) -> None:
        ticket = world.grant(3, source_blocks=_SOURCE)
        world.sender.open(ticket)
        world.sender.write(ticket.transfer_id, 0, 0, _SOURCE[:2])
        for layer in range(1, SMALL_LAYOUT.layer_count):
            world.sender.write(ticket.transfer_id, layer, 0, _SOURCE[:1])
        for count in (0, 2, 3):
            with pytest.raises(InvalidArgument, match="block_count"):
                world.sender.mark(ticket.transfer_id, count, b"")
        world.sender.mark(ticket.transfer_id, 1, b"")
        with pytest.raises(InvalidArgument, match="block_count"):
            world.sender.mark(ticket.transfer_id, 1, b"")
        with pytest.raises(ValueError, match="a note of"):
            world.sender.mark(ticket.transfer_id, 1, bytes(5000))
        world.sender.mark(bytes(16), 1, b"")
        self._require_marked(world, ticket, 1)
        world.sender.abort(ticket.transfer_id)
        world.require_released(ticket)

    def test_the_time_limit_of_an_open_transfer_counts_from_its_last_mark(self, world: TransportWorld) -> None:
        world.require_works()
        ticket = world.grant(8, 2.0, source_blocks=_SOURCE)
        world.sender.open(ticket)
        for index in range(8):
            # In total, longer than the limit and the sender's grace.
            world.require_released(world.grant(1, expires_in_s=0.45))
            self._write(world, ticket, index, index + 1)
            world.sender.mark(ticket.transfer_id, index + 1, b"")
            self._require_marked(world, ticket, index + 1)
        world.sender.abort(ticket.transfer_id)
        world.require_released(ticket)
        assert world.transfers[ticket.transfer_id].kept_count == 8

    @staticmethod
    def _push_marked(peer: PeerProcess, ticket: Ticket, source: list[int]) -> None:
        peer.start_sender(PEER_LAYOUT, PEER_BLOCKS, 0)
        peer.tell("open", ticket)
        for start in range(0, len(source), 8):
            for layer in range(PEER_LAYOUT.layer_count):
                peer.tell("write", ticket.transfer_id, layer, start, source[start : start + 8])
            peer.tell("mark", ticket.transfer_id, start + 8, b"")

    @staticmethod
    def _write(world: TransportWorld, ticket: Ticket, start: int, end: int, sender: KvSender | None = None) -> None:
        layers, source = range(world.source.layout.layer_count), world.transfers[ticket.transfer_id].source[start:end]
        (sender or world.sender).write_layers(ticket.transfer_id, layers, start, source)

    @staticmethod
    def _require_marked(world: TransportWorld, ticket: Ticket, block_count: int, note: bytes = b"") -> None:
        world.pushed.wait_for_step(PushMarked(ticket.transfer_id, block_count))
        world.landed.wait_for_step(TransferMarked(ticket.transfer_id, block_count, note))


class _Lying:
    """Transport that sends a wrong number of complete blocks with some marks. told: right number to the one sent."""

    def __init__(self, inner: Any, told: dict[int, int]) -> None:
        self._inner = inner
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, *arguments: Any) -> Any:
        link = self._inner.connect(*arguments)
        mark: Callable[..., None] = link.mark

        def lie(ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
            mark(ticket, self._told.get(block_count, block_count), note, digest)

        link.mark = lie
        return link
