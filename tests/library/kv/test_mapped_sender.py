"""Pushes to receivers with other layouts or other numbers of ranks, over real links."""

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.digest import DigestFactory, xxh3
from kaveri.kv.transfer.mapped_pushes import STAGINGS_MAX
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, first_source_block
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import PATH_NAMES, make_transports
from kaveri.kv.transports.socket import SocketTransport
from kaveri.testing.transport_peer import WAIT_S, Recorder, open_descriptors, wait_until
from tests.library.kv.kv_pair import HookedDigest, limited
from tests.library.kv.kv_reference import MARK, KvPartition, RankPools, Reference, make_reference, whole_and_split

MODEL = KvLayout("model", 4, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
NOTE = b"hand-over"
_names = itertools.count()


class ReceivingInstance:
    def __init__(self, instance: RankPools, transport: str, folder: str | Path, digest: DigestFactory = xxh3) -> None:
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
        return [
            replace(receiver.grant(ids[first_block:], token_count, expires_in_s), first_block=first_block)
            for receiver, ids in zip(self.receivers, self.instance.block_ids, strict=True)
        ]

    def assert_holds(self, reference: Reference, token_count: int, first_block: int = 0) -> None:
        """Assert that the tokens from first_block on are there, padded with zeros to a whole block, and nothing else
        was written."""
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


class RankSource:
    def __init__(self, instance: RankPools, transport: str | Transport, staging_bytes: int, rank: int = 0) -> None:
        self.pool, self.block_ids = instance.pools[rank], instance.block_ids[rank]
        self.pushed = Recorder()
        transports = make_transports((transport,)) if isinstance(transport, str) else [transport]
        self.sender = KvSender(self.pool, self.pushed, transports=transports, staging_bytes=staging_bytes)
        self._parts: dict[bytes, list[Ticket]] = {}

    def open(self, tickets: list[Ticket]) -> bytes:
        """Open a push of the whole KV to one ticket, or of parts to several. Returns the first ticket's transfer id."""
        name = tickets[0].transfer_id
        self._parts[name] = tickets
        for ticket in tickets:
            self.sender.open(ticket, part=len(tickets) > 1)
        return name

    def steps(self, ticket: Ticket, chance: random.Random) -> Iterator[tuple[int, int, int]]:
        """Yield (layer, first index, end) of blocks in the order of a chunked prefill."""
        count = len(self.block_ids) - first_source_block(ticket, self.pool.layout)
        written = [0] * self.pool.layout.layer_count
        while any(done < count for done in written):
            layer = chance.choice([layer for layer, done in enumerate(written) if done < count])
            end = chance.randint(written[layer] + 1, count)
            yield layer, written[layer], end
            written[layer] = end

    def write(self, name: bytes, ticket: Ticket, layer: int, first: int, end: int) -> None:
        skipped = first_source_block(ticket, self.pool.layout)
        for part in self._parts[name]:
            self.sender.write(part.transfer_id, layer, first, self.block_ids[skipped + first : skipped + end])

    def finish(self, name: bytes) -> None:
        for part in self._parts[name]:
            self.sender.finish(part.transfer_id, NOTE)

    def abort(self, name: bytes) -> None:
        for part in self._parts[name]:
            self.sender.abort(part.transfer_id)

    def push(self, tickets: list[Ticket], seed: int = 0) -> bytes:
        name = self.open(tickets)
        for step in self.steps(tickets[0], random.Random(seed)):
            self.write(name, tickets[0], *step)
        self.finish(name)
        return name

    def wait(self, name: bytes) -> PushAccepted | PushFailed:
        """Wait for the end of all parts: the first failure, or the sum of the acceptances."""
        accepted = PushAccepted(name, 0, "")
        for part in self._parts[name]:
            event = self.pushed.wait(part)
            if not isinstance(event, PushAccepted):
                assert isinstance(event, PushFailed)
                return event
            accepted = PushAccepted(name, accepted.kv_bytes + event.kv_bytes, event.transport)
        return accepted

    def close(self) -> None:
        self.sender.close()
        self.sender.check_integrity()
        assert not self.pushed.doubled


@pytest.fixture
def folder() -> Iterator[str]:
    # Paths of Unix sockets are short, those of pytest are not.
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.mark.parametrize("transport", ["unix", "shm", "tcp"])
@settings(max_examples=60)
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
    source, destination = (RankPools.of(partition, token_count, chance) for partition in pair)
    source.write(reference)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        receiving = ReceivingInstance(destination, transport, folder)
        stack.callback(receiving.close)
        sending = RankSource(source, transport, staging_bytes)
        stack.callback(sending.close)
        # Blocks that decode has already are not pushed.
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


@pytest.mark.parametrize("transport", ["nixl", "gloo"])
def test_optional_transports_carry_mapped_pushes_too(folder: str, transport: str) -> None:
    pytest.importorskip("nixl_cu13" if transport == "nixl" else "torch")
    with MappedPair(folder, one_rank(16), 500, 100_000, transport) as pair:
        for partition in (one_rank(64, "2HND"), KvPartition.even(replace(MODEL, block_tokens=32), tensor_ranks=2)):
            receiving = pair.receiving(partition)
            pair.require_landed(receiving, pair.source.push(receiving.grant(500)))


def held_digest(gate: threading.Event) -> DigestFactory:

    def wait(_: memoryview) -> None:
        assert gate.wait(WAIT_S), "never let go"

    return partial(HookedDigest, wait)


def one_rank(block_tokens: int, order: str = "2NHD", model: KvLayout = MODEL) -> KvPartition:
    return KvPartition.even(replace(model, block_tokens=block_tokens, order=order))


class MappedPair:
    def __init__(
        self,
        folder: str,
        source: KvPartition,
        token_count: int,
        staging_bytes: int,
        transport: str,
        sending: Transport | None = None,
    ) -> None:
        self.folder, self.transport, self.token_count = folder, transport, token_count
        self.chance = np.random.default_rng(token_count)
        self.reference = make_reference(source.layout, token_count, self.chance)
        instance = RankPools.of(source, token_count, self.chance)
        instance.write(self.reference)
        self.source = RankSource(instance, sending or transport, staging_bytes)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.source.close)

    def receiving(self, partition: KvPartition, digest: DigestFactory = xxh3) -> ReceivingInstance:
        instance = RankPools.of(partition, self.token_count, self.chance)
        receiving = ReceivingInstance(instance, self.transport, self.folder, digest)
        # Before the sender is closed, which might wait for what the receiver does not take.
        self._stack.callback(receiving.close)
        return receiving

    def require_landed(self, receiving: ReceivingInstance, name: bytes) -> None:
        event = self.source.wait(name)
        assert isinstance(event, PushAccepted), event
        receiving.assert_holds(self.reference, self.token_count)

    def __enter__(self) -> "MappedPair":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


WIDE = replace(MODEL, kv_head_count=8, head_dim=64)
"""A token of a layer is 2 KiB: prompts outgrow what a socket's buffers take."""


def test_a_receiver_that_takes_nothing_holds_up_nobody_else(folder: str) -> None:
    with MappedPair(folder, one_rank(16, model=WIDE), 1000, 1 << 20, "unix") as pair:
        gate = threading.Event()
        stuck = pair.receiving(one_rank(32, model=WIDE), digest=held_digest(gate))
        free = pair.receiving(one_rank(32, model=WIDE))
        held = pair.source.push(stuck.grant(1000))
        landed = [pair.source.wait(pair.source.push(free.grant(1000), seed)) for seed in range(3)]
        assert all(isinstance(event, PushAccepted) for event in landed), landed
        assert held not in pair.source.pushed.events
        assert [peer.push_count for peer in pair.source.sender.flow().peers if peer.unaccepted_bytes] == [1]
        free.assert_holds(pair.reference, 1000)
        gate.set()
        pair.require_landed(stuck, held)


def test_a_push_that_waits_for_staging_ends_with_its_ticket_and_gives_all_back(folder: str) -> None:
    # A frame that is cut short by its ticket's end costs its link so long. Much longer than the ticket has: on a busy
    # machine the link would be given up first.
    sending = limited(SocketTransport("unix"), progress_timeout_s=2.0)
    with MappedPair(folder, one_rank(16, model=WIDE), 1000, 1 << 20, "unix", sending) as pair:
        gate = threading.Event()
        stuck = pair.receiving(one_rank(32, model=WIDE), digest=held_digest(gate))
        name = pair.source.push(stuck.grant(1000, expires_in_s=0.3))
        failed = pair.source.wait(name)
        assert isinstance(failed, PushFailed)
        assert "expired" in failed.reason
        pair.source.sender.check_integrity()
        gate.set()
        working = pair.receiving(one_rank(32, model=WIDE))
        pair.require_landed(working, pair.source.push(working.grant(1000)))


@pytest.mark.parametrize("transport", ["unix", "shm", "tcp"])
@pytest.mark.parametrize("seed", range(3))
def test_random_pushes_at_once_some_of_them_given_up_leave_no_staging_block_behind(
    folder: str, transport: str, seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = open_descriptors(), set(threading.enumerate())
    model = replace(MODEL, block_tokens=32)
    with MappedPair(folder, one_rank(32), 700, 30_000, transport) as pair:
        partitions = [
            one_rank(16),
            one_rank(64, "2HND"),
            KvPartition.even(replace(model, block_tokens=16), pipeline_stages=2),
            KvPartition.even(replace(model, block_tokens=64, order="2HND"), tensor_ranks=2),
        ]
        source = pair.source
        fates: dict[bytes, tuple[ReceivingInstance, list[Ticket], bool]] = {}
        for number in range(12):
            receiving = pair.receiving(partitions[number % 4])
            given_up = chance.random() < 0.4
            # Where no connection can be opened in time, a receiver hears of the end by its ticket's expiry alone.
            tickets = receiving.grant(700, expires_in_s=WAIT_S / 2 if given_up else 60.0)
            name = source.open(tickets)
            # Number of steps before the push is aborted; None: never.
            steps = list(source.steps(tickets[0], chance))
            for step in steps[: chance.randint(0, len(steps)) if given_up else None]:
                source.write(name, tickets[0], *step)
            if given_up:
                source.abort(name)
            else:
                source.finish(name)
            fates[name] = receiving, tickets, given_up
        for name, (receiving, tickets, given_up) in fates.items():
            event = source.wait(name)
            if given_up:
                assert isinstance(event, PushFailed), event
                for ticket in tickets:
                    assert isinstance(receiving.landed.wait(ticket), TransferReleased)
            else:
                assert isinstance(event, PushAccepted), event
                receiving.assert_holds(pair.reference, 700)
        source.sender.check_integrity()
    wait_until(lambda: open_descriptors() <= before[0], "descriptors are closed")
    assert set(threading.enumerate()) <= before[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "another"),
        ("dtype", "bfloat16"),
        ("head_dim", 16),
        ("order", "vllm-opaque-7"),
        ("layer_count", 3),
        ("kv_head_count", 2),
        ("first_layer", 1),
        ("first_kv_head", 2),
        ("block_tokens", 0),
        ("block_tokens", 1 << 20),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_the_field_before_anything_is_opened(
    folder: str, field: str, value: object
) -> None:
    with MappedPair(folder, one_rank(16), 50, 1 << 20, "unix") as pair:
        (ticket,) = pair.receiving(one_rank(32)).grant(50)
        with pytest.raises(LayoutMismatch) as caught:
            pair.source.sender.open(replace(ticket, layout=replace(ticket.layout, **{field: value})))
        assert caught.value.field == field


def test_a_part_beyond_the_pool_is_refused_by_the_field(folder: str) -> None:
    with MappedPair(folder, one_rank(16), 50, 1 << 20, "unix") as pair:
        ticket = pair.receiving(KvPartition.even(replace(MODEL, block_tokens=32), tensor_ranks=2)).grant(50)[1]
        beyond = replace(ticket, layout=replace(ticket.layout, first_kv_head=3))
        with pytest.raises(LayoutMismatch, match="kv_heads"):
            pair.source.sender.open(beyond, part=True)
        pair.source.sender.check_integrity()


def test_a_new_shape_is_refused_while_as_many_as_there_may_be_are_in_use(folder: str) -> None:
    with MappedPair(folder, one_rank(16), 100, 1 << 20, "unix") as pair:
        waiting = []
        for block_tokens in range(50, 50 + STAGINGS_MAX):
            (ticket,) = pair.receiving(one_rank(block_tokens)).grant(100)
            waiting.append(pair.source.open([ticket]))
        with pytest.raises(TransferFailed, match="other layouts already"):
            pair.source.open(pair.receiving(one_rank(70)).grant(100))
        for name in waiting:
            pair.source.sender.abort(name)
            assert isinstance(pair.source.wait(name), PushFailed)


def test_closing_fails_what_is_under_way_and_refuses_the_rest(folder: str) -> None:
    with MappedPair(folder, one_rank(16), 100, 1 << 20, "unix") as pair:
        receiving = pair.receiving(one_rank(32))
        name = pair.source.open(receiving.grant(100))
        pair.source.sender.close()
        assert isinstance(pair.source.wait(name), PushFailed)
        with pytest.raises(TransferFailed, match="closed"):
            pair.source.open(receiving.grant(100))


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_block_outside_the_pool_is_refused_and_disturbs_no_other_push(folder: str, block_tokens: int) -> None:
    with MappedPair(folder, one_rank(16), 100, 1 << 20, "unix") as pair:
        receiving = pair.receiving(one_rank(block_tokens))
        name = pair.source.open(receiving.grant(100))
        sender = pair.source.sender
        for block in (-1, sender.pool.block_count):
            with pytest.raises(InvalidArgument, match=rf"source_blocks.*\[0, {sender.pool.block_count}\)"):
                sender.write(name, 0, 0, [0, block])
        assert isinstance(pair.source.wait(pair.source.push(receiving.grant(100))), PushAccepted)
        sender.abort(name)
        assert isinstance(pair.source.wait(name), PushFailed)
