"""A sender and a receiver over one transport, and the expected content of the receiver's pool."""

from dataclasses import replace

import numpy as np

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.blocks import BlockAllocator
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory, Digests, xxh3
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import WAIT_S, Event, Recorder, fill_pool, load_transport
from kaveri.testing.transport_runs import FREED

SMALL_LAYOUT = KvLayout("conformance", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="float32")
"""320-byte blocks: odd sizes find more than round ones."""
PEER_LAYOUT = KvLayout("conformance", 4, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
"""16 KiB blocks."""
PEER_BLOCKS = 512


class TransportWorld:
    """A sender and a receiver over one transport, with the account of the receiver's blocks.

    The receiver's pool must equal `expected` whenever idle: granted blocks change by a landing only, blocks of released
    transfers are filled with FREED at once and stay so, and all others never change. Of an open transfer, what was
    marked is compared with its source when it is released.
    """

    def __init__(self, factory: str, address: str, layout: KvLayout, block_count: int) -> None:
        self.factory, self.address = factory, address
        self.source, self.target = KvPool(layout, block_count), KvPool(layout, block_count)
        fill_pool(self.source, 0)
        self.expected = self.target.memory.copy()
        self.allocator = BlockAllocator(block_count)
        self.tickets: dict[bytes, Ticket] = {}
        self.sources: dict[bytes, list[int]] = {}
        """Source blocks of open transfers, in order."""
        self.kept_counts: dict[bytes, int] = {}
        """Blocks of released open transfers that were marked and right then."""
        self.pushed, self.landed = Recorder(), Recorder(self._settle)
        self.epoch = 0
        self.receiver = self.start_receiver()
        self.sender = self.start_sender()

    def start_receiver(self) -> KvReceiver:
        """Start a receiver of the next epoch at the world's address."""
        self.epoch += 1
        transport = load_transport(self.factory)
        listen = [KvEndpoint(transport.name, self.address)]
        self.receiver = KvReceiver(
            self.target, self.landed, listen=listen, epoch=self.epoch, transports=[transport], digests=Digests.ON
        )
        return self.receiver

    def start_sender(self, digest: DigestFactory = xxh3, idle_s: float = 60.0) -> KvSender:
        """Start another sender; the caller closes it, unless it becomes self.sender."""
        transports = [load_transport(self.factory)]
        return KvSender(self.source, self.pushed, transports=transports, digest=digest, idle_s=idle_s)

    def grant(self, block_count: int, expires_in_s: float = 60.0) -> Ticket:
        """Take blocks and lease them to a transfer."""
        owner = object()
        blocks = self.allocator.allocate(owner, block_count)
        token_count = block_count * self.target.layout.block_tokens
        ticket = self.receiver.grant(blocks, token_count, expires_in_s)
        self.allocator.move(owner, ticket.transfer_id)
        self.tickets[ticket.transfer_id] = ticket
        return ticket

    def grant_open(self, block_count: int, source_blocks: list[int], expires_in_s: float = 60.0) -> Ticket:
        """Lease blocks to an open transfer, for the first block_count of these source blocks."""
        owner = object()
        blocks = self.allocator.allocate(owner, block_count)
        token_count = len(source_blocks) * self.target.layout.block_tokens
        ticket = self.receiver.grant(blocks, token_count, expires_in_s, is_open=True)
        self.allocator.move(owner, ticket.transfer_id)
        self.tickets[ticket.transfer_id] = ticket
        self.sources[ticket.transfer_id] = source_blocks
        return ticket

    def extend(self, ticket: Ticket, block_count: int) -> None:
        """Lease more blocks to an open transfer."""
        blocks = tuple(self.allocator.allocate(ticket.transfer_id, block_count))
        known = self.tickets[ticket.transfer_id]
        self.tickets[ticket.transfer_id] = replace(known, block_ids=known.block_ids + blocks)
        assert self.receiver.extend(ticket.transfer_id, blocks)

    def push(self, ticket: Ticket, source_blocks: list[int], sender: KvSender | None = None) -> None:
        """Push all of a transfer, layer by layer."""
        sender = sender or self.sender
        sender.open(ticket)
        for layer in range(self.source.layout.layer_count):
            sender.write(ticket.transfer_id, layer, 0, source_blocks)
        sender.finish(ticket.transfer_id, b"note")

    def expect(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """Expect that this transfer, once landed, has put these blocks where its ticket says."""
        self.expected[:, ticket.block_ids] = self.source.memory[:, source_blocks]

    def require_landed(self, ticket: Ticket, source_blocks: list[int]) -> None:
        """Wait for the landing and for its acceptance, and compare the whole pool."""
        landed, accepted = self.landed.wait(ticket), self.pushed.wait(ticket)
        kv_bytes = self.source.memory[:, source_blocks].nbytes
        assert landed == TransferLanded(ticket.transfer_id, kv_bytes, b"note"), landed
        assert accepted == PushAccepted(ticket.transfer_id, kv_bytes, load_transport(self.factory).label), accepted
        self.expect(ticket, source_blocks)
        self.check_target()

    def require_released(self, ticket: Ticket, timeout_s: float = WAIT_S) -> str:
        """Wait until the blocks are given back; return the reason."""
        event = self.landed.wait(ticket, timeout_s)
        assert isinstance(event, TransferReleased), event
        return event.reason

    def require_failed(self, ticket: Ticket, timeout_s: float = WAIT_S) -> str:
        """Wait until the sender gives the source blocks back; return the reason."""
        event = self.pushed.wait(ticket, timeout_s)
        assert isinstance(event, PushFailed), event
        return event.reason

    def require_works(self) -> None:
        """Assert that another transfer lands."""
        ticket, blocks = self.grant(2), [1, 0]
        self.push(ticket, blocks)
        self.require_landed(ticket, blocks)

    def check_target(self) -> None:
        """Compare the whole target pool with its expected content."""
        wrong = np.argwhere((self.target.memory != self.expected).any(axis=2))
        assert not len(wrong), f"wrong bytes in (layer, block) {wrong[:10].tolist()}"

    def check_integrity(self) -> None:
        """Assert that no event came twice, no block leaked, and none was written to after it was given back."""
        assert not self.pushed.doubled
        assert not self.landed.doubled
        self.allocator.check_integrity(set(self.tickets))
        self.check_target()

    def close(self) -> None:
        """End both sides, and assert that all granted blocks are accounted for."""
        self.sender.close()
        self.receiver.close()
        for event in self.landed.events.values():
            self.allocator.release(event.transfer_id)
        self.allocator.check_integrity(())

    def _settle(self, event: Event) -> None:
        if isinstance(event, TransferReleased):
            blocks = list(self.tickets[event.transfer_id].block_ids)
            if event.transfer_id in self.sources:
                self._note_kept(event.transfer_id, blocks)
            self.target.memory[:, blocks] = FREED
            self.expected[:, blocks] = FREED
            self.allocator.release(event.transfer_id)

    def _note_kept(self, transfer_id: bytes, blocks: list[int]) -> None:
        marks = [step.block_count for step in self.landed.steps.get(transfer_id, ())]
        kept, sent = blocks[: max(marks, default=0)], self.sources[transfer_id]
        assert (self.target.memory[:, kept] == self.source.memory[:, sent[: len(kept)]]).all(), "marked and wrong"
        self.kept_counts[transfer_id] = len(kept)
