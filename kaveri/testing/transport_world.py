"""KV sender and receiver over one transport, and the fixtures of transport_conformance.py."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import BlockAllocator, KvPool
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import Event, PeerNursery, Recorder, fill_pool, load_transport, open_descriptors
from kaveri.testing.transport_runs import FREED

SMALL_LAYOUT = KvLayout("conformance", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="float32")
"""KV layout with 320-byte blocks: odd sizes find more bugs than round ones."""
PEER_LAYOUT = KvLayout("conformance", 4, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
"""KV layout with 16 KiB blocks."""
PEER_BLOCKS = 512
_END_WITHIN_S = 20.0


@dataclass
class GrantedTransfer:
    ticket: Ticket
    """Ticket, with the blocks added by extend()."""
    source: list[int]
    """Source blocks of an open transfer, in order."""
    kept_count: int = 0
    """Number of blocks that were marked, and correct, when an open transfer was released."""


class TransportWorld:
    """KV sender and receiver over one transport, with the expected content of the receiver's pool.

    While no transfer runs, the pool must equal `expected`: granted blocks change only when a transfer lands, blocks of
    released transfers are filled with FREED, and other blocks never change. When an open transfer is released, its
    marked blocks are compared with their source."""

    def __init__(self, factory: str, address: str, layout: KvLayout, block_count: int) -> None:
        self.factory, self.address = factory, address
        self._pools = KvPool(layout, block_count), KvPool(layout, block_count)
        fill_pool(self.source, 0)
        self.expected = self.target.memory.copy()
        self.allocator = BlockAllocator(block_count)
        self.transfers: dict[bytes, GrantedTransfer] = {}
        self.pushed, self.landed = Recorder(), Recorder(self._settle)
        self.receiver = self.start_receiver()
        self.sender = self.start_sender()

    @property
    def source(self) -> KvPool:
        """KV pool that all senders read from."""
        return self._pools[0]

    @property
    def target(self) -> KvPool:
        """KV pool that the receiver writes to."""
        return self._pools[1]

    def start_receiver(self, epoch: int = 1) -> KvReceiver:
        """Start a receiver with this epoch; it becomes self.receiver."""
        transport = load_transport(self.factory)
        listen = [KvEndpoint(transport.name, self.address)]
        self.receiver = KvReceiver(
            self.target, self.landed, listen=listen, epoch=epoch, transports=[transport], digests=Digests.ON
        )
        return self.receiver

    def start_sender(self, **options: Any) -> KvSender:
        """Start another sender; the caller must close it. options: of KvSender."""
        return KvSender(self.source, self.pushed, transports=[load_transport(self.factory)], **options)

    def grant(self, block_count: int, expires_in_s: float = 60.0, *, source_blocks: list[int] | None = None) -> Ticket:
        """Grant blocks to a new transfer. source_blocks: for an open one, which may grow; None: not open."""
        owner, is_open = object(), source_blocks is not None
        blocks = self.allocator.allocate(owner, block_count)
        tokens = (block_count if source_blocks is None else len(source_blocks)) * self.target.layout.block_tokens
        ticket = self.receiver.grant(blocks, tokens, expires_in_s, is_open=is_open)
        self.allocator.move(owner, ticket.transfer_id)
        self.transfers[ticket.transfer_id] = GrantedTransfer(ticket, source_blocks or [])
        return ticket

    def extend(self, ticket: Ticket, block_count: int) -> None:
        blocks = tuple(self.allocator.allocate(ticket.transfer_id, block_count))
        known = self.transfers[ticket.transfer_id]
        known.ticket = replace(known.ticket, block_ids=known.ticket.block_ids + blocks)
        assert self.receiver.extend(ticket.transfer_id, blocks)

    def push(self, ticket: Ticket, source_blocks: list[int], sender: KvSender | None = None) -> None:
        """Push all blocks of a transfer, layer by layer."""
        sender = sender or self.sender
        sender.open(ticket)
        for layer in range(self.source.layout.layer_count):
            sender.write(ticket.transfer_id, layer, 0, source_blocks)
        sender.finish(ticket.transfer_id, b"note")

    def expect(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """Expect the content of these source blocks in the ticket's blocks."""
        self.expected[:, ticket.block_ids] = self.source.memory[:, source_blocks]

    def require_landed(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """Wait until receiver and sender report success, and compare the whole pool."""
        landed, accepted = self.landed.wait(ticket), self.pushed.wait(ticket)
        kv_bytes = self.source.memory[:, source_blocks].nbytes
        assert landed == TransferLanded(ticket.transfer_id, kv_bytes, b"note"), landed
        assert accepted == PushAccepted(ticket.transfer_id, kv_bytes, load_transport(self.factory).label), accepted
        self.expect(ticket, source_blocks)
        self.check_target()

    def require_released(self, ticket: Ticket) -> str:
        """Wait until the receiver releases the transfer's blocks without a landing; return the reason."""
        event = self.landed.wait(ticket)
        assert isinstance(event, TransferReleased), event
        return event.reason

    def require_failed(self, ticket: Ticket) -> str:
        """Wait until the push fails at the sender; return the reason."""
        event = self.pushed.wait(ticket)
        assert isinstance(event, PushFailed), event
        return event.reason

    def require_works(self) -> None:
        ticket, blocks = self.grant(2), [1, 0]
        self.push(ticket, blocks)
        self.require_landed(ticket, blocks)

    def check_target(self) -> None:
        wrong = np.argwhere((self.target.memory != self.expected).any(axis=2))
        assert not len(wrong), f"wrong bytes in (layer, block) {wrong[:10].tolist()}"

    def check_integrity(self) -> None:
        """Assert that no event came after a transfer's end, no block leaked, and none was written after its release."""
        assert not self.pushed.doubled
        assert not self.landed.doubled
        self.allocator.check_integrity(set(self.transfers))
        self.check_target()

    def close(self) -> None:
        """Close both sides, and assert that every granted block was released."""
        self.sender.close()
        self.receiver.close()
        for event in self.landed.events.values():
            self.allocator.release(event.transfer_id)
        self.allocator.check_integrity(())

    def _settle(self, event: Event) -> None:
        if isinstance(event, TransferReleased):
            transfer = self.transfers[event.transfer_id]
            blocks = list(transfer.ticket.block_ids)
            kept_count = max((step.block_count for step in self.landed.steps.get(event.transfer_id, ())), default=0)
            sent = self.source.memory[:, transfer.source[:kept_count]]
            assert (self.target.memory[:, blocks[:kept_count]] == sent).all(), "marked and wrong"
            transfer.kept_count = kept_count
            self.target.memory[:, blocks] = FREED
            self.expected[:, blocks] = FREED
            self.allocator.release(event.transfer_id)


class TransportSuite:
    """Fixtures and helpers of the tests in transport_conformance.py. factory: "module:callable" of the transport."""

    factory: ClassVar[str]

    def address(self, directory: Path) -> str:
        """Return a free address at which a receiver can listen."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def nursery(cls) -> Iterator[PeerNursery]:
        with PeerNursery(cls.factory) as nursery:
            yield nursery

    @pytest.fixture
    def nothing_left(self, nursery: PeerNursery) -> Iterator[None]:
        load_transport(self.factory)
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        yield
        # A nursery that waited for an ended process may take a moment.
        until_s = time.monotonic() + _END_WITHIN_S
        while (left := set(threading.enumerate()) - threads) and time.monotonic() < until_s:
            next(iter(left)).join(0.1)
        assert not left, f"threads are left: {left}"
        # Other threads may close descriptors meanwhile, so only new ones count.
        assert not (new := open_descriptors() - descriptors), f"descriptors are left: {new}"

    @contextmanager
    def open_world(self, folder: Path, layout: KvLayout, block_count: int) -> Iterator[TransportWorld]:
        """Open a TransportWorld with pools of `block_count` blocks; check its integrity at the end, and close it."""
        world = TransportWorld(self.factory, self.address(folder), layout, block_count)
        try:
            yield world
            world.check_integrity()
        finally:
            world.close()

    @pytest.fixture
    def world(self, tmp_path: Path, nothing_left: None) -> Iterator[TransportWorld]:
        with self.open_world(tmp_path, SMALL_LAYOUT, 64) as world:
            yield world

    @pytest.fixture
    def large_world(self, tmp_path: Path, nothing_left: None) -> Iterator[TransportWorld]:
        """TransportWorld with the layout and source content of a sender in another process."""
        with self.open_world(tmp_path, PEER_LAYOUT, PEER_BLOCKS) as world:
            yield world

    @staticmethod
    def _arrived(world: TransportWorld, ticket: Ticket, layer: int, source: list[int]) -> bool:
        """Return True if the target pool has this layer of the ticket's first blocks. source: their source blocks."""
        blocks = list(ticket.block_ids[: len(source)])
        return bool((world.target.memory[layer, blocks] == world.source.memory[layer, source]).all())
