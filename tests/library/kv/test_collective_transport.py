"""The gloo and NCCL transports: a missing message ends its connection only; memory is bounded; torch is imported
late."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferReleased
from kaveri.kv.transfer.sender import PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports import make_transports, transport_names
from kaveri.kv.transports.extra import collective
from kaveri.kv.transports.extra.collective import _BUFFER_COUNT, _MESSAGE_BYTES, CollectiveLink, CollectiveTransport
from kaveri.kv.transports.frames import HELLO_BYTES, Header, Kind, pack_hello, unpack_hello
from kaveri.testing.transport_peer import WAIT_S, PeerNursery, Recorder, wait_until
from tests.library.kv.kv_pair import (
    HookedDigest,
    failure,
    kv_pair,
    limited,
    push,
    receiving,
    release,
    require_lands,
    sending,
)

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
LARGE_LAYOUT = KvLayout("m", 2, block_tokens=64, kv_head_count=4, head_dim=128, dtype="float32")
"""256 KiB blocks, eight to a message."""
EPOCH = 7
ANYWHERE = KvEndpoint("gloo", "127.0.0.1:0")
PROGRESS_TIMEOUT_S = 2.0
"""Of the receiver: the pushes that are in order take far less, on a busy machine too."""


@pytest.fixture
def end() -> Iterator[tuple[KvReceiver, Recorder]]:
    transport = limited(CollectiveTransport("gloo"), progress_timeout_s=PROGRESS_TIMEOUT_S)
    with receiving(KvPool(LAYOUT, 8), ANYWHERE, transports=[transport], epoch=EPOCH) as end:
        yield end


@pytest.fixture
def receiver(end: tuple[KvReceiver, Recorder]) -> KvReceiver:
    return end[0]


@pytest.fixture
def landed(end: tuple[KvReceiver, Recorder]) -> Recorder:
    return end[1]


@pytest.fixture
def link(receiver: KvReceiver) -> Iterator[CollectiveLink]:
    listener = Mock()
    link = CollectiveTransport("gloo").connect(receiver.endpoints[0], EPOCH, KvPool(LAYOUT, 8), listener)
    yield link
    wait_until(lambda: listener.lost.called, "the connection is lost")
    link.close()


def test_a_message_that_never_comes_costs_its_connection_and_the_next_pair_works(
    receiver: KvReceiver, landed: Recorder, link: CollectiveLink
) -> None:
    ticket = receiver.grant([0, 2], 8, 60.0)
    link.open(ticket)
    link._send(Header(Kind.DATA, ticket.transfer_id, 0, range(1), 0, 2))
    assert "connection lost" in release(landed, ticket)
    assert not receiver.pool.memory.any()
    require_lands(receiver, landed, CollectiveTransport("gloo"))


@pytest.mark.parametrize("block_count", [0, _MESSAGE_BYTES // LAYOUT.block_bytes + 1, 2**31])
def test_a_message_that_fits_no_buffer_ends_the_connection(
    receiver: KvReceiver, landed: Recorder, link: CollectiveLink, block_count: int
) -> None:
    ticket = receiver.grant([0, 2], 8, 60.0)
    link.open(ticket)
    link._send(Header(Kind.DATA, ticket.transfer_id, 0, range(1), 0, block_count))
    assert "protocol error" in release(landed, ticket)


def test_more_announcements_than_buffers_end_the_connection(
    receiver: KvReceiver, landed: Recorder, link: CollectiveLink
) -> None:
    ticket = receiver.grant([0, 2], 8, 60.0)
    link.open(ticket)
    for _ in range(_BUFFER_COUNT + 1):
        link._send(Header(Kind.DATA, ticket.transfer_id, 0, range(1), 0, 2))
    assert isinstance(landed.wait(ticket), TransferReleased)
    require_lands(receiver, landed, CollectiveTransport("gloo"))


def test_a_stranger_that_does_not_join_the_pair_holds_nobody_up(receiver: KvReceiver, landed: Recorder) -> None:
    host, port = receiver.endpoints[0].address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(pack_hello())
        hello = b""
        while len(hello) < HELLO_BYTES:
            hello += stranger.recv(HELLO_BYTES - len(hello))
        assert unpack_hello(hello).epoch == EPOCH
        require_lands(receiver, landed, CollectiveTransport("gloo"))


def test_a_sender_whose_receiver_takes_nothing_gives_its_blocks_back_and_reads_no_more() -> None:
    source, target = KvPool(LARGE_LAYOUT, 64), KvPool(LARGE_LAYOUT, 64)
    takes, read_bytes = threading.Event(), list[int]()

    def wait(_: memoryview) -> None:
        assert takes.wait(WAIT_S)

    transports = make_transports(("gloo",))
    with (
        receiving(target, ANYWHERE, transports=transports, digest=partial(HookedDigest, wait)) as (receiver, landed),
        sending(source, transports, digest=partial(HookedDigest, lambda data: read_bytes.append(len(data)))) as (
            sender,
            pushed,
        ),
    ):
        ticket = receiver.grant(range(64), 64, 60.0)
        push(sender, ticket, list(range(64)))
        wait_until(lambda: len(read_bytes) == _BUFFER_COUNT, "all buffers are full")
        sender.abort(ticket.transfer_id)
        assert isinstance(pushed.wait(ticket), PushFailed)
        assert sum(read_bytes) == _BUFFER_COUNT * _MESSAGE_BYTES
        takes.set()
        assert isinstance(landed.wait(ticket), TransferReleased)


def test_blocks_larger_than_a_message_land() -> None:
    layout = replace(LARGE_LAYOUT, block_tokens=640)
    assert layout.block_bytes > _MESSAGE_BYTES
    source, target = KvPool(layout, 8), KvPool(layout, 8)
    source.memory[:] = np.random.default_rng(5).integers(0, 256, source.memory.shape, dtype=np.uint8)
    with kv_pair(source, target, ANYWHERE, make_transports(("gloo",))) as pair:
        pair.accepted(pair.push([6, 2, 3, 0, 7], [0, 1, 5, 3, 2]))
    assert (target.memory[:, [6, 2, 3, 0, 7]] == source.memory[:, [0, 1, 5, 3, 2]]).all()
    assert not target.memory[:, [1, 4, 5]].any()


def test_the_pair_meets_on_the_listening_host_only(receiver: KvReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[str, int]] = []
    bind: Callable[..., None] = socket.socket.bind

    def recorded(self: socket.socket, address: tuple[str, int]) -> None:
        bind(self, address)
        bound.append(address)

    monkeypatch.setattr(socket.socket, "bind", recorded)
    CollectiveTransport("gloo").connect(receiver.endpoints[0], EPOCH, KvPool(LAYOUT, 8), Mock()).close()
    assert bound == [("127.0.0.1", 0)]


@pytest.mark.parametrize("when", ["before the store is joined", "before the pair is made"])
def test_a_receiver_that_freezes_while_the_pair_meets_holds_up_neither_the_push_nor_the_senders_end(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    factory = "kaveri.kv.transports:gloo_transport"
    name = "_joined_store" if when == "before the store is joined" else "_gloo_group"
    original = getattr(collective, name)
    threads = set(threading.enumerate())
    with PeerNursery(factory) as nursery, nursery.start() as peer:

        def freeze(*arguments: object) -> object:
            peer.signal(signal.SIGSTOP)
            return original(*arguments)

        peer.start_receiver(LAYOUT, 8, "127.0.0.1:0", EPOCH, 1 << 20)
        ticket = peer.ask("grant", [1], 4, 60.0)
        monkeypatch.setattr(collective, name, freeze)
        transport = limited(CollectiveTransport("gloo"), connect_timeout_s=1.0)
        with sending(KvPool(LAYOUT, 8), [transport]) as (sender, pushed):
            sender.open(ticket)
            try:
                assert "meeting the other side: not within 1 s" in failure(pushed, ticket)
            except BaseException:
                # Closing the sender would wait for the frozen receiver.
                peer.signal(signal.SIGCONT)
                raise
        peer.signal(signal.SIGCONT)
        wait_until(lambda: set(threading.enumerate()) <= threads, "no thread is left")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nccl_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPU") as raised:
        make_transports(("nccl",))
    assert raised.value.field == "kv_transports"


def test_gloo_and_nixl_are_used_only_when_asked_for() -> None:
    assert [transport.name for transport in make_transports()] == ["shm", "unix", "tcp"]
    assert transport_names("gloo,tcp") == ("gloo", "tcp")


def test_an_engine_listens_for_gloo_beside_tcp() -> None:
    settings = EngineSettings(engine="fake", kv_transports=("gloo", "tcp"), kv_host="127.0.0.1", kv_cache_memory=2**20)
    with contextlib.closing(build_engine(settings)) as engine:
        assert [endpoint.transport for endpoint in engine.info.kv_endpoints] == ["gloo", "tcp"]


def test_the_library_without_these_transports_imports_neither_torch_nor_nixl() -> None:
    program = """
import sys
from kaveri.kv.transports import make_transports
make_transports()
assert not {"torch", "nixl_cu13"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_meetings_with_processes_that_stand_still_are_bounded() -> None:
    going_on = threading.Event()

    def stand_still() -> collective._Pair:
        assert going_on.wait(WAIT_S)
        raise LinkLost("it is gone")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collective._met_within, WAIT_S, stand_still)
        try:
            wait_until(waiting.running, "one meeting is waited for")
            for _ in range(collective._MOST_MEETINGS - 1):
                with pytest.raises(LinkLost, match="not within"):
                    collective._met_within(0.01, stand_still)
            with pytest.raises(LinkLost, match="meetings"):
                collective._met_within(0.01, stand_still)
        finally:
            going_on.set()
        with pytest.raises(LinkLost, match="it is gone"):
            waiting.result(WAIT_S)

    def meets_again() -> bool:
        with pytest.raises(LinkLost) as raised:
            collective._met_within(WAIT_S, stand_still)
        return raised.value.reason == "it is gone"

    wait_until(meets_again, "a meeting has ended")
