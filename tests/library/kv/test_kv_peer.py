"""A sender's Peer (one receiver) over scripted links."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Capabilities, LinkListener, LinkLost
from kaveri.testing.transport_peer import WAIT_S, Recorder, wait_until
from tests.library.kv.kv_pair import failure, push, sending

LAYOUT = KvLayout("m", 1, block_tokens=4, kv_head_count=1, head_dim=8, dtype="float32")
TICKET = Ticket(bytes(16), bytes(16), 1, (KvEndpoint("scripted", "here"),), (0,), 4, 60.0, LAYOUT)


class ScriptedLink:
    """Link that takes all bytes it has credit for, and accepts the push at the end. told: receives its opens and
    aborts."""

    wants_digest = False
    is_worn = False

    def __init__(self, listener: LinkListener, on_close: Callable[[], None], told: list[tuple[str, bytes]]) -> None:
        self._listener = listener
        self._on_close = on_close
        self._told = told

    def open(self, ticket: Ticket) -> None:
        self._told.append(("open", ticket.transfer_id))

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        return len(layers) * len(source_blocks)

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        self._listener.answered(ticket.transfer_id, None)

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        self._told.append(("abort", ticket.transfer_id))

    def break_off(self) -> None: ...

    def close(self) -> None:
        self._on_close()


class ScriptedTransport:
    name = label = "scripted"
    capabilities = Capabilities(can_revoke=True, is_byte_stream=True, write_bytes=1 << 20)

    def __init__(self, on_connect: Callable[[LinkListener], None], on_close: Callable[[], None]) -> None:
        self._on_connect = on_connect
        self._on_close = on_close
        self.told: list[tuple[str, bytes]] = []

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> ScriptedLink:
        self._on_connect(listener)
        return ScriptedLink(listener, self._on_close, self.told)

    def listen(self, address: str, pool: KvPool, intake: object) -> None:
        raise AssertionError


def nothing() -> None: ...


def give_credit(listener: LinkListener) -> None:
    listener.credited(1 << 20, 1 << 20)


@contextlib.contextmanager
def sending_over(
    on_connect: Callable[[LinkListener], None] = give_credit, on_close: Callable[[], None] = nothing, **options: float
) -> Iterator[tuple[KvSender, Recorder, ScriptedTransport]]:
    transport = ScriptedTransport(on_connect, on_close)
    with sending(KvPool(LAYOUT, 1), [transport], **options) as (sender, pushed):
        yield sender, pushed, transport


def test_a_new_connection_has_all_its_time_to_give_credit_though_the_last_one_gave_none() -> None:
    second = replace(TICKET, transfer_id=bytes([2] * 16))
    listeners: list[LinkListener] = []
    closing, closed = threading.Event(), threading.Event()

    def on_close() -> None:
        closing.set()
        # The next push comes while the connection that gave no credit is on its way out.
        assert closed.wait(WAIT_S)

    with sending_over(listeners.append, on_close, credit_timeout_s=1.0) as (sender, pushed, _):
        push(sender, TICKET, [0])
        assert "no credit" in failure(pushed, TICKET)
        assert closing.wait(WAIT_S)
        push(sender, second, [0])
        closed.set()
        wait_until(lambda: sender.flow().credit_waits == 2 or second.transfer_id in pushed.events, "a wait for credit")
        listeners[1].credited(2 * LAYOUT.block_bytes, 2 * LAYOUT.block_bytes)
        event = pushed.wait(second)
    assert isinstance(event, PushAccepted), event


def test_a_receiver_that_cannot_be_reached_at_first_is_told_of_what_was_given_up_meanwhile() -> None:
    tickets = [replace(TICKET, transfer_id=bytes([number] * 16)) for number in range(2)]
    given_up, attempts = threading.Event(), list[LinkListener]()

    def on_connect(listener: LinkListener) -> None:
        assert given_up.wait(WAIT_S)
        attempts.append(listener)
        if len(attempts) <= 3:
            raise LinkLost("nobody answers")

    with sending_over(on_connect) as (sender, pushed, transport):
        for ticket in tickets:
            sender.open(ticket)
            sender.abort(ticket.transfer_id)
            assert pushed.wait(ticket) == PushFailed(ticket.transfer_id, "aborted")
        given_up.set()
        wait_until(lambda: len(transport.told) == 4, "both are notified")
    ids = {ticket.transfer_id for ticket in tickets}
    assert {name for what, name in transport.told if what == "open"} == ids
    assert {name for what, name in transport.told if what == "abort"} == ids
    assert len(attempts) == 4


def test_a_receiver_that_is_never_reached_is_tried_no_longer_than_the_ticket_lasts() -> None:
    before, attempts = threading.active_count(), list[LinkListener]()
    given_up = threading.Event()

    def on_connect(listener: LinkListener) -> None:
        assert given_up.wait(WAIT_S)
        attempts.append(listener)
        raise LinkLost("nobody answers")

    with sending_over(on_connect, idle_s=0.01) as (sender, pushed, transport):
        ticket = replace(TICKET, expires_in_s=1.0)
        sender.open(ticket)
        sender.abort(ticket.transfer_id)
        given_up.set()
        pushed.wait(ticket)
        wait_until(lambda: len(attempts) >= 2, "it is tried again")
        # The sender's reporter thread remains.
        wait_until(lambda: threading.active_count() == before + 1, "the peer's thread has ended")
    assert not transport.told


def test_source_blocks_are_not_given_back_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    writing, written = threading.Event(), threading.Event()

    def write(self: ScriptedLink, ticket: Ticket, layers: range, first: int, blocks: Sequence[int], *_: object) -> int:
        writing.set()
        assert written.wait(WAIT_S)
        return len(layers) * len(blocks)

    monkeypatch.setattr(ScriptedLink, "write", write)
    sentinel = replace(TICKET, transfer_id=bytes([2] * 16), epoch=2)
    with sending_over() as (sender, pushed, _):
        push(sender, TICKET, [0])
        assert writing.wait(WAIT_S)
        sender.abort(TICKET.transfer_id)
        # Later events would follow it.
        sender.open(sentinel)
        sender.abort(sentinel.transfer_id)
        assert pushed.wait(sentinel) == PushFailed(sentinel.transfer_id, "aborted")
        assert TICKET.transfer_id not in pushed.events
        written.set()
        assert pushed.wait(TICKET) == PushFailed(TICKET.transfer_id, "aborted")
    assert not pushed.doubled


def test_a_note_that_is_too_long_is_refused_and_a_shorter_one_taken() -> None:
    with sending_over() as (sender, pushed, _):
        sender.open(TICKET)
        sender.write(TICKET.transfer_id, 0, 0, [0])
        with pytest.raises(ValueError, match="a note of 4097 bytes"):
            sender.finish(TICKET.transfer_id, bytes(4097))
        sender.finish(TICKET.transfer_id, bytes(4096))
        assert isinstance(pushed.wait(TICKET), PushAccepted)


def test_a_receiver_that_accepts_before_the_end_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: ScriptedLink, ticket: Ticket, layers: range, first: int, blocks: Sequence[int], *_: object) -> int:
        self._listener.answered(ticket.transfer_id, None)
        return len(layers) * len(blocks)

    monkeypatch.setattr(ScriptedLink, "write", write)
    with sending_over() as (sender, pushed, _):
        sender.open(TICKET)
        sender.write(TICKET.transfer_id, 0, 0, [0])
        assert pushed.wait(TICKET) == PushFailed(TICKET.transfer_id, "accepted before its end")


def test_the_answer_of_a_former_connection_ends_no_push_of_the_next() -> None:
    listeners = list[LinkListener]()

    def on_connect(listener: LinkListener) -> None:
        listeners.append(listener)
        if len(listeners) == 1:
            give_credit(listener)

    second = replace(TICKET, transfer_id=bytes([2] * 16))
    with sending_over(on_connect) as (sender, pushed, _):
        push(sender, TICKET, [0])
        assert isinstance(pushed.wait(TICKET), PushAccepted)
        listeners[0].lost("gone")
        push(sender, second, [0])
        wait_until(lambda: sender.flow().credit_waits == 1, "it waits for credit")
        listeners[0].answered(second.transfer_id, "an old answer")
        give_credit(listeners[1])
        assert isinstance(pushed.wait(second), PushAccepted)
    assert len(listeners) == 2


def test_a_receiver_that_gives_credit_too_little_for_a_block_is_not_taken_for_gone() -> None:
    listeners = list[LinkListener]()
    with sending_over(listeners.append, credit_timeout_s=1.0) as (sender, pushed, _):
        push(sender, TICKET, [0])
        wait_until(lambda: sender.flow().credit_waits == 1, "it waits for credit")
        began_s = time.monotonic()
        # For longer than the credit timeout.
        while time.monotonic() - began_s < 2.0:
            listeners[0].credited(1, 1 << 20)
            time.sleep(0.1)
        assert not pushed.events
        give_credit(listeners[0])
        assert isinstance(pushed.wait(TICKET), PushAccepted)
