"""Flow control of pushes on real links: which pushes wait, and for how many bytes."""

import contextlib
import importlib.util
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest, Digests, xxh3
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushAccepted
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.testing.transport_peer import (
    WAIT_S,
    PeerNursery,
    PeerProcess,
    Recorder,
    fill_pool,
    load_transport,
    wait_until,
)
from kaveri.testing.transport_world import PEER_BLOCKS, PEER_LAYOUT, TransportWorld
from tests.library.kv.kv_pair import HookedDigest
from tests.library.kv.kv_pair import push as push_all

LAYOUT = KvLayout("flow", 8, block_tokens=16, kv_head_count=8, head_dim=64, dtype="float32")
"""64 KiB blocks."""
POOL_BLOCKS = 80
LONG_BLOCKS = 64
"""A long push is of 4 MiB in each layer, 32 MiB in all."""
SHORT_BLOCKS = 2
MIB = 1 << 20

_FACTORIES = {
    "unix": "kaveri.kv.transports:unix_transport",
    "tcp": "kaveri.kv.transports:tcp_transport",
    "shm": "kaveri.kv.transports.shm:ShmTransport",
    "gloo": "kaveri.kv.transports:gloo_transport",
    "nixl": "kaveri.kv.transports.nixl:NixlTransport",
}
_NEEDS_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
_TRANSPORTS = [pytest.param(name, marks=[_NEEDS_NIXL] if name == "nixl" else []) for name in _FACTORIES]


class FlowWorld(TransportWorld):
    """TransportWorld whose receiver gives little credit, and may be slow."""

    credit_bytes = 128 * MIB
    digest: Callable[[], Digest] = xxh3

    def start_receiver(self, epoch: int = 1) -> KvReceiver:
        transport = load_transport(self.factory)
        self.receiver = KvReceiver(
            self.target,
            self.landed,
            listen=[KvEndpoint(transport.name, self.address)],
            epoch=epoch,
            transports=[transport],
            digests=Digests.ON,
            digest=type(self).digest,
            credit_bytes=self.credit_bytes,
        )
        return self.receiver

    def expect_landed(self, *pushes: tuple[Ticket, list[int]]) -> None:
        """Wait for the landing of concurrent pushes, and compare the whole pool."""
        for ticket, source in pushes:
            assert isinstance(self.landed.wait(ticket), TransferLanded), self.landed.events
            assert isinstance(self.pushed.wait(ticket), PushAccepted)
            self.expect(ticket, source)
        self.check_target()


class SmallCreditWorld(FlowWorld):
    """FlowWorld with credit for eight blocks: less than one layer of a long push, two per sender."""

    credit_bytes = 8 * LAYOUT.block_bytes


SLOW_BYTE = 0xAA
GO = threading.Event()


def stand_still(data: memoryview) -> None:
    """Block the receiving thread at a block that begins with SLOW_BYTE, until GO is set."""
    if data[0] == SLOW_BYTE:
        assert GO.wait(WAIT_S)


class SlowWorld(FlowWorld):
    digest = partial(HookedDigest, stand_still)


@contextlib.contextmanager
def open_world(kind: type[FlowWorld], name: str, directory: Path) -> Iterator[FlowWorld]:
    address = str(directory / "kv.sock") if name in ("unix", "shm") else "127.0.0.1:0"
    world = kind(_FACTORIES[name], address, LAYOUT, POOL_BLOCKS)
    try:
        yield world
        world.check_integrity()
        world.receiver.check_integrity()
    finally:
        world.close()


@pytest.fixture(params=_TRANSPORTS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def nursery(name: str) -> Iterator[PeerNursery]:
    with PeerNursery(_FACTORIES[name]) as nursery:
        yield nursery


@pytest.fixture
def world(name: str, tmp_path: Path) -> Iterator[FlowWorld]:
    with open_world(FlowWorld, name, tmp_path) as world:
        yield world


@pytest.fixture
def small_world(name: str, tmp_path: Path) -> Iterator[FlowWorld]:
    with open_world(SmallCreditWorld, name, tmp_path) as world:
        yield world


class WrittenBytes:
    """Records a sender's writes; blocks its thread from the first one until release()."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self._released = threading.Event()
        self.writes: list[tuple[bytes, int]] = []

    def __call__(self, transfer_id: bytes, layer: int, blocks: Sequence[int]) -> None:
        self.writes.append((transfer_id, len(blocks) * LAYOUT.block_bytes))
        self.began.set()
        assert self._released.wait(WAIT_S)

    def release(self) -> None:
        self._released.set()

    def of(self, transfer_id: bytes) -> int:
        return sum(byte_count for writer, byte_count in self.writes if writer == transfer_id)

    def before_the_end_of(self, transfer_id: bytes, other_id: bytes) -> int:
        last = max(i for i, (writer, _) in enumerate(self.writes) if writer == transfer_id)
        return sum(byte_count for writer, byte_count in self.writes[:last] if writer == other_id)


def sender_of(
    world: TransportWorld, on_local_done: WrittenBytes | None = None, credit_timeout_s: float = 10.0
) -> KvSender:
    return KvSender(
        world.source,
        world.pushed,
        transports=[load_transport(world.factory)],
        on_local_done=on_local_done,
        credit_timeout_s=credit_timeout_s,
    )


def credit_is_where_it_should_be(receiver: KvReceiver, senders: Sequence[KvSender]) -> bool:
    """True if both sides count the same credit, and each sender that wants to write has some; nothing may be in
    flight."""
    flow = receiver.flow()
    peers = [peer for sender in senders for peer in sender.flow().peers if peer.transport]
    return (
        flow.arriving_bytes == 0
        and flow.sender_count == len(peers)
        and flow.held_bytes == sum(peer.credit_bytes for peer in peers)
        and all(peer.credit_bytes >= LAYOUT.block_bytes for peer in peers)
    )


def first_block_arrived(world: TransportWorld, ticket: Ticket, layer: int) -> bool:
    return bool((world.target.memory[layer, ticket.block_ids[0]] == world.source.memory[layer, 0]).all())


def test_a_short_push_overtakes_a_long_one_of_the_same_sender(world: FlowWorld) -> None:
    written = WrittenBytes()
    with contextlib.closing(sender_of(world, written)) as sender:
        long, short = world.grant(LONG_BLOCKS), world.grant(SHORT_BLOCKS)
        world.push(long, list(range(LONG_BLOCKS)), sender)
        assert written.began.wait(WAIT_S)
        world.push(short, [70, 79], sender)
        written.release()
        world.expect_landed((long, list(range(LONG_BLOCKS))), (short, [70, 79]))
    # A turn of the long one, and what was under way.
    assert written.before_the_end_of(short.transfer_id, long.transfer_id) <= 12 * MIB
    assert written.of(long.transfer_id) == 32 * MIB


def test_a_flood_that_is_taken_in_slowly_holds_up_no_other_sender_and_stays_in_its_window(
    name: str, tmp_path: Path
) -> None:
    GO.clear()
    with open_world(SlowWorld, name, tmp_path) as world, contextlib.closing(sender_of(world)) as flooding:
        world.source.memory[:, :LONG_BLOCKS, 0] = SLOW_BYTE
        world.source.memory[:, LONG_BLOCKS:, 0] = 1
        flood, short = (world.grant(LONG_BLOCKS), list(range(LONG_BLOCKS))), (world.grant(SHORT_BLOCKS), [70, 79])
        world.push(*flood, flooding)
        wait_until(lambda: world.receiver.flow().arriving_bytes > 0, "the flood arrives")
        world.push(*short)
        assert isinstance(world.landed.wait(short[0]), TransferLanded)
        assert isinstance(world.pushed.wait(short[0]), PushAccepted)
        (peer,) = flooding.flow().peers
        assert peer.unaccepted_bytes <= world.receiver.flow().window_bytes
        assert world.receiver.flow().held_bytes <= 128 * MIB
        GO.set()
        world.expect_landed(flood, short)


def test_several_senders_share_a_little_credit(small_world: FlowWorld) -> None:
    world = small_world
    senders = [sender_of(world) for _ in range(6)]
    with contextlib.ExitStack() as stack:
        for sender in senders:
            stack.enter_context(contextlib.closing(sender))
        pushes = []
        for i, sender in enumerate(senders):
            source = list(range(i, i + 10))
            pushes.append((world.grant(len(source)), source))
            world.push(*pushes[-1], sender)
        limit_bytes = (8 + 2 * len(senders)) * LAYOUT.block_bytes
        assert world.receiver.flow().held_bytes <= limit_bytes
        world.expect_landed(*pushes)
        wait_until(lambda: credit_is_where_it_should_be(world.receiver, senders), "all credit is back")
        assert 0 < world.receiver.flow().held_bytes <= limit_bytes
    wait_until(lambda: world.receiver.flow().held_bytes == 0, "the credit of closed senders is home")


@pytest.mark.parametrize("seed", range(2))
def test_no_credit_is_lost_however_transfers_and_senders_end(small_world: FlowWorld, seed: int) -> None:
    print(f"seed {seed}")
    world, chance = small_world, random.Random(seed)
    senders = [sender_of(world) for _ in range(3)]
    try:
        for _ in range(3):
            transfers: list[tuple[Ticket, list[int]]] = []
            for sender in senders:
                ending = chance.choice(("land", "land", "abort", "revoke", "expire"))
                source = chance.sample(range(POOL_BLOCKS), chance.randint(1, 20))
                # Short: the receiver hears nothing else of a sender that is closed before it has opened its push.
                ticket = world.grant(len(source), expires_in_s=0.2 if ending == "expire" else 2.0)
                transfers.append((ticket, source))
                sender.open(ticket)
                layer_count = LAYOUT.layer_count if ending == "land" else chance.randint(0, LAYOUT.layer_count)
                for layer in range(layer_count):
                    sender.write(ticket.transfer_id, layer, 0, source)
                if ending == "land":
                    sender.finish(ticket.transfer_id, b"note")
                elif ending == "abort":
                    sender.abort(ticket.transfer_id)
                elif ending == "revoke":
                    world.receiver.revoke(ticket.transfer_id)
            if chance.random() < 0.5:
                victim = chance.randrange(len(senders))
                senders[victim].close()
                senders[victim] = sender_of(world)
            for ticket, source in transfers:
                if isinstance(world.landed.wait(ticket), TransferLanded):
                    world.expect(ticket, source)
                world.pushed.wait(ticket)
            wait_until(lambda: credit_is_where_it_should_be(world.receiver, senders), "all credit is back")
            world.receiver.check_integrity()
            world.check_target()
            assert world.receiver.flow().leased_block_count == 0
            for ticket, _ in transfers:
                world.allocator.release(ticket.transfer_id)
    finally:
        for sender in senders:
            sender.close()
    wait_until(lambda: world.receiver.flow().held_bytes == 0, "the credit of closed senders is home")


@pytest.mark.parametrize("end", ["abort", "revoke"])
def test_a_push_given_up_within_a_write_costs_the_same_credit_on_both_sides(world: FlowWorld, end: str) -> None:
    source = list(range(LONG_BLOCKS))
    for layer in range(0, LAYOUT.layer_count, 2):
        ticket = world.grant(LONG_BLOCKS)
        world.push(ticket, source)
        wait_until(partial(first_block_arrived, world, ticket, layer), "the first block of the layer has arrived")
        if end == "abort":
            world.sender.abort(ticket.transfer_id)
        else:
            world.receiver.revoke(ticket.transfer_id)
        if isinstance(world.landed.wait(ticket), TransferLanded):
            world.expect(ticket, source)
        world.pushed.wait(ticket)
        wait_until(lambda: credit_is_where_it_should_be(world.receiver, [world.sender]), "all credit is back")
        world.allocator.release(ticket.transfer_id)


@pytest.mark.parametrize("credit_bytes", [128 * MIB, MIB])
def test_a_frozen_receiver_holds_up_nothing_but_pushes_to_itself(
    name: str, nursery: PeerNursery, tmp_path: Path, credit_bytes: int
) -> None:
    # With much credit the sender may be in the middle of a write when the receiver freezes; with little it waits.
    pushed, source, blocks = Recorder(), KvPool(PEER_LAYOUT, PEER_BLOCKS), list(range(PEER_BLOCKS))
    fill_pool(source, 0)
    with contextlib.ExitStack() as stack:
        transports = [load_transport(_FACTORIES[name])]
        sender = stack.enter_context(contextlib.closing(KvSender(source, pushed, transports=transports)))

        def receiver(epoch: int) -> PeerProcess:
            peer = stack.enter_context(nursery.start())
            address = str(tmp_path / f"{epoch}.sock") if name in ("unix", "shm") else "127.0.0.1:0"
            peer.start_receiver(PEER_LAYOUT, PEER_BLOCKS, address, epoch, credit_bytes)
            return peer

        def push(peer: PeerProcess, *, frozen: bool = False) -> Ticket:
            ticket: Ticket = peer.ask("grant", blocks, 1, WAIT_S / 2)
            if frozen:
                peer.signal(signal.SIGSTOP)
            push_all(sender, ticket, blocks)
            return ticket

        freezing, live = receiver(1), receiver(2)
        assert isinstance(pushed.wait(push(freezing)), PushAccepted)
        stuck = push(freezing, frozen=True)
        for _ in range(3):
            assert isinstance(pushed.wait(push(live)), PushAccepted)
        freezing.signal(signal.SIGCONT)
        assert pushed.wait(stuck)
        assert freezing.wait(stuck)
