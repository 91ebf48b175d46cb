"""Threads of KV transfers that cannot start or that break: their transfers fail, all others continue."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from kaveri.errors import ConfigError, TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.staged_pushes import StagedPush
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import LinkListener
from kaveri.kv.transports import make_transports
from kaveri.testing.transport_peer import Recorder, fill_pool, wait_until
from tests.library.kv.kv_pair import failure, kv_pair, push
from tests.library.kv.kv_stranger import LAYOUT
from tests.library.kv.test_kv_peer import TICKET, give_credit, sending_over


@pytest.fixture(params=["tcp", "shm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(kind: str, tmp_path: Path) -> KvEndpoint:
    return KvEndpoint(kind, "127.0.0.1:0" if kind == "tcp" else str(tmp_path / "kv.sock"))


@contextlib.contextmanager
def no_thread_named(name: str) -> Iterator[None]:
    start = threading.Thread.start

    def start_others(self: threading.Thread) -> None:
        if self.name == name or self.name.startswith(f"{name}-"):
            raise RuntimeError("can't start new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        yield


def require_failure_and_next(endpoint: KvEndpoint, block_tokens: int, thread: str, refused_at_once: bool) -> str:
    """Push while no thread of that name can start, which fails, then push again. Returns why the first failed."""
    source, target = KvPool(LAYOUT, 4), KvPool(replace(LAYOUT, block_tokens=block_tokens), 8)
    fill_pool(source, 1)
    blocks = [6, 2, 1, 0][: 8 // block_tokens]
    with kv_pair(source, target, endpoint, make_transports((endpoint.transport,))) as pair:
        ticket = pair.receiver.grant(blocks, 8, 60.0)
        with no_thread_named(thread):
            if refused_at_once:
                with pytest.raises(TransferFailed, match="no thread") as raised:
                    pair.sender.open(ticket)
                reason = raised.value.reason
            else:
                push(pair.sender, ticket, [0, 1])
                reason = failure(pair.pushed, ticket)
        second = pair.push(blocks, [0, 1])
        pair.accepted(second)
        assert isinstance(pair.landed.wait(second), TransferLanded)
    return reason


@pytest.mark.parametrize("thread", ["kv-send", "kv-answers", "kv-receive"])
def test_a_push_that_there_is_no_thread_for_fails_and_the_next_one_lands(
    endpoint: KvEndpoint, nothing_left: None, thread: str
) -> None:
    reason = require_failure_and_next(endpoint, LAYOUT.block_tokens, thread, thread == "kv-send")
    assert thread == "kv-receive" or "no thread" in reason


def test_a_receiver_without_a_thread_to_listen_says_so_and_leaves_nothing(
    endpoint: KvEndpoint, nothing_left: None
) -> None:
    transports = make_transports((endpoint.transport,))
    with no_thread_named("kv-accept"), pytest.raises(ConfigError, match="can't start new thread"):
        KvReceiver(KvPool(LAYOUT, 8), Recorder(), listen=[endpoint], epoch=1, transports=transports)
    assert endpoint.transport == "tcp" or not Path(endpoint.address).exists()


@pytest.mark.parametrize("thread", ["kv-stage", "kv-sender", "kv-send"])
@pytest.mark.usefixtures("breaks_are_expected")
def test_a_mapped_push_that_there_is_no_thread_for_fails_and_the_next_one_lands(
    tmp_path: Path, nothing_left: None, thread: str
) -> None:
    require_failure_and_next(KvEndpoint("unix", str(tmp_path / "kv.sock")), 2, thread, thread == "kv-stage")


def test_a_transport_that_breaks_fails_its_pushes_with_a_reason_and_the_next_one_is_tried_anew() -> None:
    is_broken = True

    def on_connect(listener: LinkListener) -> None:
        if is_broken:
            raise ValueError("not as it should be")
        give_credit(listener)

    second = replace(TICKET, transfer_id=bytes([2] * 16))
    with sending_over(on_connect) as (sender, pushed, _):
        with structlog.testing.capture_logs() as lines:
            sender.open(TICKET)
            failed = pushed.wait(TICKET)
            wait_until(lambda: any(line["event"] == "kv_peer_failed" for line in lines), "its end is logged")
        assert isinstance(failed, PushFailed)
        assert "not as it should be" in failed.reason
        is_broken = False
        push(sender, second, [0])
        assert isinstance(pushed.wait(second), PushAccepted)


@pytest.mark.usefixtures("breaks_are_expected")
def test_a_listener_that_fails_ends_no_other_mapped_push(tmp_path: Path) -> None:
    # The event is reported on the copying thread: the push was given up while its blocks were copied.
    endpoint, transports = KvEndpoint("unix", str(tmp_path / "kv.sock")), make_transports(("unix",))
    source, told = KvPool(LAYOUT, 4), Recorder()

    def hear(event: PushAccepted | PushFailed) -> None:
        told(event)
        raise ValueError("the listener's own trouble")

    receiver = KvReceiver(
        KvPool(replace(LAYOUT, block_tokens=2), 8), Recorder(), listen=[endpoint], epoch=1, transports=transports
    )
    sender = KvSender(source, hear, transports=transports)
    with contextlib.closing(receiver), contextlib.closing(sender):
        first, second = (receiver.grant([6, 2, 1, 0], 8, 60.0) for _ in range(2))
        copy = StagedPush.copy

        def copy_and_give_up(self: StagedPush, *arguments: Any) -> None:
            copy(self, *arguments)
            if self.transfer_id == first.transfer_id:
                receiver.revoke(first.transfer_id)
                wait_until(lambda: self.outcome is not None, "the rejection is heard")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedPush, "copy", copy_and_give_up)
            push(sender, first, [0, 1])
            assert isinstance(told.wait(first), PushFailed)
        push(sender, second, [0, 1])
        event = told.wait(second)
        assert isinstance(event, PushAccepted), event
