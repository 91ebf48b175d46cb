"""NIXL: an aborted write never lands later, invalid offers are refused, the process stays clean."""

import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transports import make_transports
from kaveri.kv.transports.frames import pack_hello
from kaveri.kv.transports.nixl import _OFFER, NixlTransport, _Agent, _SendingAgent
from kaveri.testing.transport_peer import WAIT_S, Recorder, open_descriptors, wait_until
from kaveri.testing.transport_runs import FREED
from tests.library.kv.kv_pair import push, receiving, release, sending

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
EPOCH = 7

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")


def require_lands(sender: KvSender, receiver: KvReceiver, pushed: Recorder, landed: Recorder) -> None:
    ticket = receiver.grant([1, 3], 8, 60.0)
    push(sender, ticket, [1, 3])
    assert isinstance(pushed.wait(ticket), PushAccepted)
    assert isinstance(landed.wait(ticket), TransferLanded)
    assert (receiver.pool.memory[:, [1, 3]] == 7).all()


@pytest.fixture
def source() -> KvPool:
    source = KvPool(LAYOUT, 8)
    source.memory[:] = 7
    return source


@pytest.fixture
def end() -> Iterator[tuple[KvReceiver, Recorder]]:
    nixl = make_transports(("nixl",))
    with receiving(KvPool(LAYOUT, 4), KvEndpoint("nixl", "127.0.0.1:0"), transports=nixl, epoch=EPOCH) as end:
        yield end


@pytest.fixture
def receiver(end: tuple[KvReceiver, Recorder]) -> KvReceiver:
    return end[0]


@pytest.fixture
def landed(end: tuple[KvReceiver, Recorder]) -> Recorder:
    return end[1]


@needs_nixl
@pytest.mark.parametrize(("way", "is_warm"), [("tcp", True), ("posix,self,tcp", True), ("all", False)])
def test_a_write_that_is_given_up_costs_the_connection_and_never_lands(
    source: KvPool, receiver: KvReceiver, landed: Recorder, monkeypatch: pytest.MonkeyPatch, way: str, is_warm: bool
) -> None:
    # is_warm: UCX is connected and has sent the bytes; the receiver only has to take them in.
    monkeypatch.setenv("UCX_TLS", way)
    with sending(source, make_transports(("nixl",))) as (sender, pushed):
        if is_warm:
            require_lands(sender, receiver, pushed, landed)
        posted = threading.Event()
        post = _SendingAgent.post

        def recorded(agent: _SendingAgent, layer: int, sources: list[int], targets: list[int]) -> None:
            post(agent, layer, sources, targets)
            posted.set()

        with monkeypatch.context() as patch:
            patch.setattr(_SendingAgent, "post", recorded)
            # A receiver that does not drive its side, as if it were frozen.
            patch.setattr(_Agent, "progress", lambda _: None)
            ticket = receiver.grant([2, 0], 8, 60.0)
            push(sender, ticket, [1, 3])
            assert posted.wait(WAIT_S)
            sender.abort(ticket.transfer_id)
            assert isinstance(pushed.wait(ticket), PushFailed)
            assert "connection lost" in release(landed, ticket)
        receiver.pool.memory[:] = FREED
        require_lands(sender, receiver, pushed, landed)
    assert (receiver.pool.memory[:, [0, 2]] == FREED).all()


@needs_nixl
@pytest.mark.parametrize("block_bytes", [320, 16384])
@pytest.mark.parametrize("way", ["tcp", "posix,self,tcp", "all"])
def test_what_nixl_calls_written_is_there(monkeypatch: pytest.MonkeyPatch, way: str, block_bytes: int) -> None:
    monkeypatch.setenv("UCX_TLS", way)
    layout = replace(LAYOUT, head_dim=block_bytes // 64)
    source, target = KvPool(layout, 64), KvPool(layout, 64)
    source.memory[:] = 7
    with contextlib.ExitStack() as stack:
        receiving = stack.enter_context(contextlib.closing(_Agent(target)))
        address = target.memory.ctypes.data
        sending = stack.enter_context(contextlib.closing(_SendingAgent(source, address, 64, receiving.metadata())))
        for layer, polls_before_progress in ((0, 0), (1, 1000)):
            polls = 0
            sending.post(range(layer, layer + 1), range(0, 64, 2), range(1, 64, 2))
            give_up_at_s = time.monotonic() + WAIT_S
            while not sending.is_written():
                polls += 1
                if polls > polls_before_progress:
                    receiving.progress()
                assert time.monotonic() < give_up_at_s
            assert (target.memory[layer, 1::2] == 7).all()
    assert not target.memory[:, 0::2].any()


@needs_nixl
def test_a_receiver_polls_only_while_something_is_written(
    source: KvPool, receiver: KvReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[bool] = []
    progress = _Agent.progress
    idle = threading.Event()

    def counted(agent: _Agent) -> None:
        polls.append(idle.is_set())
        progress(agent)

    monkeypatch.setattr(_Agent, "progress", counted)
    with sending(source, make_transports(("nixl",))) as (sender, pushed):
        ticket = receiver.grant([2, 0], 8, 60.0)
        sender.open(ticket)
        sender.write(ticket.transfer_id, 0, 0, [1, 3])
        wait_until(lambda: bool((receiver.pool.memory[0, [2, 0]] == 7).all()), "the first layer has arrived")
        # The receiver has handled its DATA frame once a second transfer over the connection has landed.
        second = receiver.grant([1], 4, 60.0)
        push(sender, second, [0])
        assert isinstance(pushed.wait(second), PushAccepted)
        idle.set()
        third = receiver.grant([3], 4, 60.0)
        sender.open(third)
        sender.abort(third.transfer_id)
        pushed.wait(third)
        assert polls
        assert not any(polls)


@needs_nixl
@pytest.mark.parametrize(
    ("offer", "problem"),
    [
        (_OFFER.pack(0, 4, 1 << 31), "an offer of 2147483648 bytes"),
        (_OFFER.pack(0, 4, 8) + b"garbage!", "meeting the receiver's agent"),
        (_OFFER.pack(0, 4, 100) + b"half", "receiving|closed"),
    ],
)
def test_a_receiver_with_a_bad_offer_is_not_connected_to(source: KvPool, offer: bytes, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(pack_hello(EPOCH) + offer)

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = KvEndpoint("nixl", f"127.0.0.1:{server.getsockname()[1]}")
        listener = Mock()
        with pytest.raises(LinkLost, match=problem):
            NixlTransport().connect(endpoint, EPOCH, source, listener)
        assert not listener.answered.called
        assert not listener.credited.called
        thread.join()


@needs_nixl
def test_an_agent_is_gone_even_while_its_error_is_at_hand(source: KvPool) -> None:
    NixlTransport()
    before = open_descriptors()
    with pytest.raises(LinkLost) as meeting:
        _SendingAgent(source, 0, 4, b"garbage!")
    with contextlib.closing(_Agent(source)) as receiving:
        metadata = receiving.metadata()
        agent = _SendingAgent(source, source.memory.ctypes.data, 8, metadata)
        with pytest.raises(LinkLost) as writing:
            agent.post(range(1), [1], [99])
        agent.close()
    assert not open_descriptors() - before, (meeting, writing)


@needs_nixl
def test_a_process_starts_ucx_with_the_transport_ends_well_and_has_printed_nothing() -> None:
    program = f"""
from pathlib import Path
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transports.nixl import NixlTransport, _Agent
assert "libucp" not in Path("/proc/self/maps").read_text()
NixlTransport()
assert "libucp" in Path("/proc/self/maps").read_text()
agent = _Agent(KvPool({LAYOUT!r}, 4))
assert agent.metadata()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_without_the_package_nixl_is_refused_with_the_name_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    monkeypatch.delitem(sys.modules, "nixl_cu13._api", raising=False)
    with pytest.raises(ConfigError, match=r"\[nixl\]") as raised:
        make_transports(("nixl",))
    assert raised.value.field == "kv_transports"
