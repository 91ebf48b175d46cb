"""Pushes to receivers of other layouts, and to the ranks of one instance, over real links."""

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.block_map import first_source_block
from kaveri.kv.digest import Digest, DigestFactory, xxh3
from kaveri.kv.layout import KvLayout
from kaveri.kv.mapped_sender import STAGINGS_MAX, MappedSender
from kaveri.kv.partition import KvPartition
from kaveri.kv.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.testing.transport_conformance import WAIT_S, Recorder, open_descriptors, wait_until
from tests.library.kv.kv_reference import MARK, Instance, Reference, layouts, make_reference, partitions

MODEL = KvLayout("model", 4, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
NOTE = b"hand-over"
_names = itertools.count()


class ReceivingInstance:
    """An Instance with a receiver for each rank, and what has landed there."""

    def __init__(self, instance: Instance, transport: str, folder: str | Path, digest: DigestFactory = xxh3) -> None:
        self.instance = instance
        self.landed = Recorder()
        self.receivers: list[KvReceiver] = []
        for pool in instance.pools:
            address = str(Path(folder) / f"{next(_names)}.sock") if transport in PATH_NAMES else "127.0.0.1:0"
            listen, spoken = [KvEndpoint(transport, address)], make_transports((transport,))
            self.receivers.append(
                KvReceiver(pool, self.landed, listen=listen, epoch=next(_names), transports=spoken, digest=digest)
            )

    def grant(self, token_count: int, first_block: int = 0, expires_in_s: float = 60.0) -> list[Ticket]:
        """A ticket of each rank, for all blocks but those before first_block."""
        return [
            replace(receiver.grant(ids[first_block:], token_count, expires_in_s), first_block=first_block)
            for receiver, ids in zip(self.receivers, self.instance.block_ids, strict=True)
        ]

    def assert_holds(self, reference: Reference, token_count: int, first_block: int = 0) -> None:
        """The tokens from first_block on are there; the end of the last block is empty; nothing else was written."""
        instance = self.instance
        first = first_block * instance.partition.layout.block_tokens
        end = len(instance.block_ids[0]) * instance.partition.layout.block_tokens
        for rank in range(len(instance.pools)):
            for token in range(max(first, token_count), end):
                rows = instance.rows(rank, token)
                assert (rows == 0).all(), f"rank {rank}, token {token}: an end is not empty"
                rows[:] = MARK
        instance.assert_holds(reference, range(first, token_count))

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


class Source:
    """One rank's pool with one request in it, and its sender."""

    def __init__(self, instance: Instance, transport: str, staging_bytes: int, rank: int = 0) -> None:
        self.pool, self.block_ids = instance.pools[rank], instance.block_ids[rank]
        self.pushed = Recorder()
        transports = make_transports((transport,))
        self.sender = MappedSender(
            self.pool, self.pushed, transports=transports, staging_bytes=staging_bytes, idle_s=WAIT_S
        )

    def open(self, tickets: list[Ticket]) -> bytes:
        """The whole to one, or parts to several. Returns the transfer's name."""
        if len(tickets) == 1:
            self.sender.open(tickets[0])
            return tickets[0].transfer_id
        self.sender.open_parts(b"parts", tickets)
        return b"parts"

    def steps(self, ticket: Ticket, chance: random.Random) -> Iterator[tuple[int, int, int]]:
        """(layer, first index, end) of blocks as they may become readable: chunk by chunk and layer by layer."""
        count = len(self.block_ids) - first_source_block(ticket, self.pool.layout)
        written = [0] * self.pool.layout.layer_count
        while any(done < count for done in written):
            layer = chance.choice([layer for layer, done in enumerate(written) if done < count])
            end = chance.randint(written[layer] + 1, count)
            yield layer, written[layer], end
            written[layer] = end

    def write(self, name: bytes, ticket: Ticket, layer: int, first: int, end: int) -> None:
        skipped = first_source_block(ticket, self.pool.layout)
        self.sender.write(name, layer, first, self.block_ids[skipped + first : skipped + end])

    def push(self, tickets: list[Ticket], seed: int = 0) -> bytes:
        """All of it, in an order of chance."""
        name = self.open(tickets)
        for step in self.steps(tickets[0], random.Random(seed)):
            self.write(name, tickets[0], *step)
        self.sender.finish(name, NOTE)
        return name

    def wait(self, name: bytes) -> PushAccepted | PushFailed:
        with self.pushed._changed:
            assert self.pushed._changed.wait_for(lambda: name in self.pushed.events, WAIT_S), "no event"
            event = self.pushed.events[name]
        assert isinstance(event, PushAccepted | PushFailed)
        return event

    def close(self) -> None:
        self.sender.close()
        self.sender.check_integrity()
        assert not self.pushed.doubled


@pytest.fixture
def folder() -> Iterator[str]:
    # Paths of Unix sockets are short, those of pytest are not.
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@st.composite
def whole_and_split(draw: st.DrawFn) -> tuple[KvPartition, KvPartition]:
    """One rank, and any partition of the same model."""
    layout = draw(layouts())
    source = KvPartition(draw(partitions(layout)).layout, (layout.layer_count,))
    return source, draw(partitions(layout))


@pytest.mark.parametrize("transport", ["unix", "shm", "tcp"])
@settings(max_examples=25, deadline=None)
@given(
    whole_and_split(),
    st.integers(1, 300),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from((1, 20_000, 1 << 20)),
)
def test_every_byte_reaches_its_place_in_every_rank_of_any_instance(
    transport: str,
    pair: tuple[KvPartition, KvPartition],
    token_count: int,
    first_block: int,
    seed: int,
    staging_bytes: int,
) -> None:
    chance = np.random.default_rng(seed)
    reference = make_reference(pair[0].layout, token_count, chance)
    source, destination = (Instance.of(partition, token_count, chance) for partition in pair)
    source.write(reference)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        receiving = ReceivingInstance(destination, transport, folder)
        stack.callback(receiving.close)
        sending = Source(source, transport, staging_bytes)
        stack.callback(sending.close)
        # What decode has already is not pushed.
        first_block = min(first_block, len(destination.block_ids[0]))
        tickets = receiving.grant(token_count, first_block)
        accepted = sending.wait(sending.push(tickets, seed))
        assert isinstance(accepted, PushAccepted), accepted
        sizes = [len(ticket.block_ids) * ticket.layout.layer_count * ticket.layout.block_bytes for ticket in tickets]
        assert accepted.kv_bytes == sum(sizes)
        for ticket, size in zip(tickets, sizes, strict=True):
            assert receiving.landed.wait(ticket) == TransferLanded(ticket.transfer_id, size, NOTE)
        mapped = any(ticket.layout != pair[0].layout for ticket in tickets)
        assert accepted.transport == (f"{transport} mapped" if mapped else transport)
        if mapped:
            receiving.assert_holds(reference, token_count, first_block)
        sending.sender.check_integrity()
