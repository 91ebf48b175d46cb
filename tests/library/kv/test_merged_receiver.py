"""KV that several ranks push to several ranks, split and merged by one plan, over real links."""

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch, NoCapacity
from kaveri.kv.block_map import first_source_block
from kaveri.kv.layout import KvLayout
from kaveri.kv.mapped_sender import MappedSender
from kaveri.kv.merged_receiver import MergedReceiver
from kaveri.kv.partition import KvPartition
from kaveri.kv.plan import KvPlan, make_plan
from kaveri.kv.receiver import TransferLanded, TransferReleased
from kaveri.kv.sender import PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.testing.transport_peer import WAIT_S, Recorder, open_descriptors, wait_until
from tests.library.kv.kv_reference import MARK, Instance, Reference, make_reference, pairs

MODEL = KvLayout("model", 4, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
NOTE = b"hand-over"
_names = itertools.count()


def addresses(transport: str, folder: str) -> Callable[[], Sequence[KvEndpoint]]:
    def listen() -> Sequence[KvEndpoint]:
        path = str(Path(folder) / f"{next(_names)}.sock")
        return [KvEndpoint(transport, path if transport in PATH_NAMES else "127.0.0.1:0")]

    return listen


class World:
    """Two instances of one model with a request: senders of all ranks here, receivers of all ranks there."""

    def __init__(
        self, pair: tuple[KvPartition, KvPartition], token_count: int, transport: str, staging_bytes: int, seed: int = 0
    ) -> None:
        chance = np.random.default_rng(seed)
        self.token_count = token_count
        self.plan: KvPlan = make_plan(*pair)
        self.reference: Reference = make_reference(pair[0].layout, token_count, chance)
        self.source, self.destination = (Instance.of(partition, token_count, chance) for partition in pair)
        self.source.write(self.reference)
        self.pushed, self.landed = Recorder(), Recorder()
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        spoken = make_transports((transport,))
        self.receivers = [
            MergedReceiver(
                pool,
                self.landed,
                listen=addresses(transport, folder),
                epoch=next(_names),
                # Enough for one transfer, were all parts of one shape.
                staging_bytes=len(self.plan.shares_to(rank)) * pool.memory.nbytes,
                transports=spoken,
            )
            for rank, pool in enumerate(self.destination.pools)
        ]
        self.senders = [
            MappedSender(pool, self.pushed, transports=spoken, staging_bytes=staging_bytes)
            for pool in self.source.pools
        ]
        for end in (*self.receivers, *self.senders):
            self._stack.callback(end.close)

    def grant(self, expires_in_s: float = 60.0, first_block: int = 0) -> tuple[list[bytes], dict[int, list[Ticket]]]:
        """The transfers of all destination ranks, and the tickets of each source rank."""
        names: list[bytes] = []
        tickets: dict[int, list[Ticket]] = {}
        for rank, receiver in enumerate(self.receivers):
            shares = self.plan.shares_to(rank)
            parts = [self.plan.share_layout(share) for share in shares]
            block_ids = self.destination.block_ids[rank][first_block:]
            name, granted = receiver.grant(block_ids, self.token_count, parts, expires_in_s, first_block=first_block)
            names.append(name)
            for share, ticket in zip(shares, granted, strict=True):
                tickets.setdefault(share.source_rank, []).append(ticket)
        return names, tickets

    def push(self, rank: int, tickets: list[Ticket], note: bytes = NOTE) -> bytes:
        """All that a source rank has to give."""
        sender, name = self.senders[rank], f"rank {rank}, {next(_names)}".encode()
        sender.open_parts(name, tickets)
        layout = self.source.pools[rank].layout
        for layer in range(layout.layer_count):
            sender.write(name, layer, 0, self.source.block_ids[rank][first_source_block(tickets[0], layout) :])
        sender.finish(name, note)
        return name

    def events(self, recorder: Recorder, names: Sequence[bytes]) -> list[object]:
        wait_until(lambda: all(name in recorder.events for name in names), "every transfer ends", WAIT_S)
        return [recorder.events[name] for name in names]

    def assert_holds(self, first_block: int = 0) -> None:
        """Every token from first_block on is there, and nothing was written but the ends of last blocks."""
        block_tokens = self.destination.partition.layout.block_tokens
        first, end = first_block * block_tokens, len(self.destination.block_ids[0]) * block_tokens
        for rank in range(len(self.destination.pools)):
            for token in range(self.token_count, end):
                self.destination.rows(rank, token)[:] = MARK
        self.destination.assert_holds(self.reference, range(first, self.token_count))

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for receiver in self.receivers:
            receiver.check_integrity()
        assert not self.pushed.doubled
        assert not self.landed.doubled


@pytest.mark.parametrize("transport", ["unix", "shm", "tcp"])
@settings(max_examples=30)
@given(
    pairs(),
    st.integers(1, 300),
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
    st.sampled_from((1, 20_000, 1 << 20)),
)
def test_every_byte_gets_from_all_ranks_to_all_ranks_of_any_two_instances(
    transport: str,
    pair: tuple[KvPartition, KvPartition],
    token_count: int,
    first_block: int,
    seed: int,
    staging_bytes: int,
) -> None:
    with World(pair, token_count, transport, staging_bytes, seed) as world:
        # What decode has already is not pushed.
        first_block = min(first_block, len(world.destination.block_ids[0]))
        names, tickets = world.grant(first_block=first_block)
        ranks = list(tickets)
        random.Random(seed).shuffle(ranks)
        pushes = [world.push(rank, tickets[rank]) for rank in ranks]
        assert all(isinstance(event, PushAccepted) for event in world.events(world.pushed, pushes))
        landed = world.events(world.landed, names)
        for event, pool, ids in zip(landed, world.destination.pools, world.destination.block_ids, strict=True):
            assert isinstance(event, TransferLanded), event
            assert event.note == NOTE
            assert event.kv_bytes >= pool.memory[:, ids[first_block:]].nbytes
        world.assert_holds(first_block)


TWO_TO_ONE = (
    KvPartition.even(MODEL, tensor_ranks=2),
    KvPartition.even(replace(MODEL, block_tokens=32, order="2HND")),
)


def test_a_part_that_never_comes_releases_all_when_the_tickets_expire() -> None:
    before = open_descriptors(), set(threading.enumerate())
    with World(TWO_TO_ONE, 100, "unix", 1 << 20) as world:
        (name,), tickets = world.grant(expires_in_s=0.3)
        world.push(0, tickets[0])
        assert world.events(world.landed, [name]) == [TransferReleased(name, "the ticket expired")]
        world.receivers[0].check_integrity()
        # The room is there again.
        (name,), tickets = world.grant()
        for rank in range(2):
            world.push(rank, tickets[rank])
        assert isinstance(world.events(world.landed, [name])[0], TransferLanded)
        world.assert_holds()
    wait_until(lambda: open_descriptors() <= before[0], "descriptors are closed")
    assert set(threading.enumerate()) <= before[1]


def test_one_rank_that_gives_up_ends_the_transfer_for_the_others() -> None:
    with World(TWO_TO_ONE, 100, "unix", 1 << 20) as world:
        (name,), tickets = world.grant()
        world.senders[0].open_parts(b"one", tickets[0])
        world.senders[1].open_parts(b"other", tickets[1])
        world.senders[1].abort(b"other")
        assert isinstance(world.events(world.landed, [name])[0], TransferReleased)
        (failed,) = world.events(world.pushed, [b"one"])
        assert isinstance(failed, PushFailed)
        assert failed.reason.startswith("rejected: ")  # "revoked", or unknown by the time that it comes


def test_a_revoked_transfer_is_released_once_nobody_can_write() -> None:
    with World(TWO_TO_ONE, 100, "shm", 1 << 20) as world:
        (name,), tickets = world.grant()
        world.senders[0].open_parts(b"one", tickets[0])
        world.receivers[0].revoke(name)
        world.receivers[0].revoke(b"unknown")
        assert world.events(world.landed, [name]) == [TransferReleased(name, "revoked")]


def test_ranks_that_hand_over_different_notes_are_not_believed() -> None:
    with World(TWO_TO_ONE, 100, "unix", 1 << 20) as world:
        (name,), tickets = world.grant()
        world.push(0, tickets[0], b"one token")
        world.push(1, tickets[1], b"another")
        assert world.events(world.landed, [name]) == [TransferReleased(name, "the parts carry different notes")]


def test_parts_must_be_the_whole_and_fit_into_staging() -> None:
    with World(TWO_TO_ONE, 100, "unix", 1 << 20) as world:
        receiver, ids = world.receivers[0], world.destination.block_ids[0]
        parts = [world.plan.share_layout(share) for share in world.plan.shares]
        with pytest.raises(InvalidArgument, match="layer 0, KV head 2 is missing"):
            receiver.grant(ids, 100, parts[:1], 1.0)
        with pytest.raises(LayoutMismatch, match="block_tokens"):
            receiver.grant(ids, 100, [parts[0], replace(parts[1], block_tokens=16)], 1.0)
        with pytest.raises(LayoutMismatch, match="kv_heads"):
            receiver.grant(ids, 100, [parts[0], replace(parts[1], first_kv_head=3)], 1.0)
        granted = [receiver.grant(ids, 100, parts, 60.0)[0] for _ in range(3)]
        with pytest.raises(NoCapacity):
            receiver.grant(ids, 100, parts, 60.0)
        receiver.check_integrity()
        for name in granted:
            receiver.revoke(name)
        world.events(world.landed, granted)
        receiver.check_integrity()


@pytest.mark.usefixtures("breaks_are_expected")
def test_a_part_that_cannot_be_merged_releases_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("not as it should be")

    with World(TWO_TO_ONE, 100, "unix", 1 << 20) as world:
        (name,), tickets = world.grant()
        monkeypatch.setattr(MergedReceiver, "_copy", broken)
        world.push(0, tickets[0])
        (released,) = world.events(world.landed, [name])
        assert isinstance(released, TransferReleased)
        assert "not as it should be" in released.reason
