"""A listener's connection limit: which connections are dropped for new ones, and what remains of their transfers."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import xxh3
from kaveri.kv.transfer.landing import PoolLanding
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports, socket_listener
from kaveri.kv.transports.frames import Header, Kind
from kaveri.kv.transports.shm import ShmTransport
from kaveri.kv.transports.socket import SocketTransport
from kaveri.testing.transport_peer import WAIT_S, Recorder, fill_pool, wait_until
from tests.library.kv.kv_pair import limited, release, require_lands
from tests.library.kv.kv_stranger import EPOCH, LAYOUT, Stranger, require_landing

LIMIT = 4
_MAKERS: dict[str, Callable[[], Transport]] = {
    "tcp": lambda: limited(SocketTransport("tcp"), connection_limit=LIMIT),
    "unix": lambda: limited(SocketTransport("unix"), connection_limit=LIMIT),
    "shm": lambda: limited(ShmTransport(), connection_limit=LIMIT),
}


class ReceiverWithSenders:
    def __init__(self, transport: Transport, folder: Path, stack: contextlib.ExitStack) -> None:
        address = "127.0.0.1:0" if transport.name == "tcp" else str(folder / "kv.sock")
        self._stack = stack
        self.landed = Recorder()
        self.receiver = KvReceiver(
            KvPool(LAYOUT, 8),
            self.landed,
            listen=[KvEndpoint(transport.name, address)],
            epoch=EPOCH,
            transports=[transport],
        )
        stack.callback(self.receiver.close)

    def connect(self) -> Stranger:
        stranger = Stranger.at(self.receiver.endpoints[0])
        self._stack.enter_context(stranger.socket)
        return stranger

    def greet(self) -> Stranger:
        stranger = self.connect()
        stranger.greet()
        if self.receiver.endpoints[0].transport == "shm":
            stranger.read(8)  # the size of its pool
        return stranger

    def push(self) -> None:
        (transport,) = make_transports((self.receiver.endpoints[0].transport,))
        require_lands(self.receiver, self.landed, transport)


MakePlace = Callable[[Transport], ReceiverWithSenders]


@pytest.fixture
def make_place(tmp_path: Path, nothing_left: None) -> Iterator[MakePlace]:
    with contextlib.ExitStack() as stack:
        yield lambda transport: ReceiverWithSenders(transport, tmp_path, stack)


@pytest.fixture
def place(make_place: MakePlace) -> ReceiverWithSenders:
    return make_place(_MAKERS["tcp"]())


def test_a_flood_of_silent_connections_keeps_no_sender_out(make_place: MakePlace) -> None:
    place = make_place(SocketTransport("tcp"))
    for number in range(300):
        stranger = place.connect()
        if number % 2:
            stranger.greet()
    place.push()


@pytest.mark.parametrize("kind", _MAKERS)
def test_strangers_keep_no_sender_out_of_any_transport(make_place: MakePlace, kind: str) -> None:
    place = make_place(_MAKERS[kind]())
    for _ in range(3 * LIMIT):
        place.greet()
    place.push()


def test_a_new_connection_takes_the_place_of_the_oldest_stranger(
    place: ReceiverWithSenders, content: np.ndarray
) -> None:
    strangers = [place.greet() for _ in range(LIMIT)]
    place.greet()
    strangers[0].require_closed()
    require_landing(place.receiver, place.landed, strangers[1], content)


def test_senders_that_have_shown_a_ticket_keep_their_places_however_many_strangers_come(
    place: ReceiverWithSenders, content: np.ndarray
) -> None:
    known = [place.greet() for _ in range(LIMIT - 1)]
    for sender in known:
        require_landing(place.receiver, place.landed, sender, content)
    for _ in range(3 * LIMIT):
        place.greet()
    for sender in known:
        require_landing(place.receiver, place.landed, sender, content)


def test_a_wrong_secret_is_no_ticket(place: ReceiverWithSenders) -> None:
    strangers = [place.greet() for _ in range(LIMIT)]
    for stranger in strangers:
        ticket = place.receiver.grant([1], 4, 60.0)
        stranger.send(Header(Kind.OPEN, ticket.transfer_id, 24), bytes(16) + EPOCH.to_bytes(8, "little"))
        assert stranger.answer()[::2] == (Kind.REJECTED, "wrong secret")
    place.greet()
    strangers[0].require_closed()


def test_a_ticket_of_another_life_is_refused_on_the_data_plane_too(
    place: ReceiverWithSenders, content: np.ndarray
) -> None:
    sender = place.greet()
    ticket = place.receiver.grant([6, 2, 3], 12, 60.0)
    sender.open(replace(ticket, epoch=EPOCH - 1))
    kind, transfer_id, reason = sender.answer()
    assert (kind, transfer_id) == (Kind.REJECTED, ticket.transfer_id)
    assert reason == f"the ticket is of epoch {EPOCH - 1}, this receiver of epoch {EPOCH}"
    # The ticket is still valid.
    sender.open(ticket)
    sender.push(ticket, content)
    assert sender.answer() == (Kind.ACCEPTED, ticket.transfer_id, "")


@pytest.mark.parametrize("is_talking", [False, True])
def test_a_stranger_is_sent_away_in_time_and_an_idle_sender_is_not(
    place: ReceiverWithSenders, content: np.ndarray, monkeypatch: pytest.MonkeyPatch, is_talking: bool
) -> None:
    known = place.greet()
    require_landing(place.receiver, place.landed, known, content)
    monkeypatch.setattr(socket_listener, "_TICKET_WITHIN_S", 0.2)
    stranger = place.greet()
    stranger.socket.settimeout(0.01 if is_talking else WAIT_S)

    def is_sent_away() -> bool:
        with contextlib.suppress(TimeoutError):
            if is_talking:
                stranger.send(Header(Kind.ABORT, bytes(16)))
            return not stranger.socket.recv(1 << 16)
        return False

    with contextlib.suppress(ConnectionError):
        wait_until(is_sent_away, "the stranger is sent away")
    require_landing(place.receiver, place.landed, known, content)


@pytest.mark.parametrize("kind", _MAKERS)
def test_a_connection_that_loses_its_place_while_it_shows_its_ticket_writes_nothing(
    make_place: MakePlace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = make_place(_MAKERS[kind]())
    opened = KvReceiver.open

    def open_and_drop(self: KvReceiver, *arguments: object) -> PoolLanding:
        landing = opened(self, *arguments)  # type: ignore[arg-type]
        (listener,) = self._listeners
        (connection,) = listener._connections.values()  # type: ignore[attr-defined]
        assert connection.drop_stranger()
        return landing

    monkeypatch.setattr(KvReceiver, "open", open_and_drop)
    stranger = place.greet()
    ticket = place.receiver.grant([1], 4, 60.0)
    stranger.open(ticket)
    assert "another one took its place" in release(place.landed, ticket)
    with contextlib.suppress(ConnectionError, EOFError):
        while True:
            assert stranger.answer()[0] == Kind.REJECTED


def _landings(receiver: KvReceiver) -> int:
    gc.collect()
    reports = [each._report for each in gc.get_objects() if isinstance(each, PoolLanding)]
    return sum(report.func == receiver._note_event for report in reports)


@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_transfers_of_an_idle_sender_that_were_ended_here_leave_nothing(
    make_place: MakePlace, content: np.ndarray, kind: str, how: str
) -> None:
    place = make_place(_MAKERS[kind]())
    sender = place.greet()
    for _ in range(1000 if how == "revoked" else 20):
        ticket = place.receiver.grant([1], 4, 60.0 if how == "revoked" else 0.01)
        sender.open(ticket)
        if how == "revoked":
            place.receiver.revoke(ticket.transfer_id)
        kind_of_answer, transfer_id, _ = sender.answer()
        assert (kind_of_answer, transfer_id) == (Kind.REJECTED, ticket.transfer_id)
        assert isinstance(place.landed.wait(ticket), TransferReleased)
    wait_until(lambda: _landings(place.receiver) == 0, "nothing is left of them")
    require_landing(place.receiver, place.landed, sender, content)


def test_a_transfer_that_is_revoked_while_it_is_being_opened_leaves_nothing(
    place: ReceiverWithSenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = KvReceiver.open

    def open_and_revoke(self: KvReceiver, transfer_id: bytes, *arguments: object) -> PoolLanding:
        landing = opened(self, transfer_id, *arguments)  # type: ignore[arg-type]
        self.revoke(transfer_id)
        return landing

    monkeypatch.setattr(KvReceiver, "open", open_and_revoke)
    sender = place.greet()
    ticket = place.receiver.grant([1], 4, 60.0)
    sender.open(ticket)
    assert sender.answer()[0] == Kind.REJECTED
    wait_until(lambda: _landings(place.receiver) == 0, "nothing is left of it")


def test_a_second_opening_of_a_transfer_leaves_the_first_one_as_it_is(
    place: ReceiverWithSenders, content: np.ndarray
) -> None:
    sender = place.greet()
    ticket = place.receiver.grant([6, 2, 3], 12, 30.0)
    sender.open(ticket)
    sender.open(ticket)
    assert sender.answer() == (Kind.REJECTED, ticket.transfer_id, "the ticket is in use already")
    sender.push(ticket, content)
    assert sender.answer() == (Kind.ACCEPTED, ticket.transfer_id, "")
    assert isinstance(place.landed.wait(ticket), TransferLanded)


@pytest.mark.parametrize("last_word", ["fenced", "abort", "end", "gone"])
@pytest.mark.parametrize("how", ["revoked", "wrong block", "expired"])
def test_blocks_stay_in_quarantine_until_a_one_sided_sender_has_let_go(
    make_place: MakePlace, how: str, last_word: str
) -> None:
    place = make_place(_MAKERS["shm"]())
    sender = place.greet()
    ticket = place.receiver.grant([1, 2, 3], 12, 0.2 if how == "expired" else 60.0)
    sender.open(ticket)
    assert sender.answer()[0] == Kind.GRANTED
    sender.send(Header(Kind.DATA, ticket.transfer_id, 0, range(1), 0, 3))
    if how == "revoked":
        place.receiver.revoke(ticket.transfer_id)
    elif how == "wrong block":
        sender.send(Header(Kind.DATA, ticket.transfer_id, 0, range(1, 2), 1, 1))
    assert sender.answer()[0] == Kind.REJECTED
    # Frames sent while it still holds the blocks change nothing.
    for index in range(3):
        sender.send(Header(Kind.DATA, ticket.transfer_id, 0, range(1, 2), index, 1))
    witness = place.receiver.grant([4], 4, 60.0)
    sender.open(witness)
    assert sender.answer() == (Kind.GRANTED, witness.transfer_id, "")
    flow = place.receiver.flow()
    assert (flow.leased_block_count, flow.quarantined_block_count) == (4, 3)
    assert not place.landed.events
    if last_word == "gone":
        sender.socket.close()
    else:
        kinds = {"fenced": Kind.FENCED, "abort": Kind.ABORT, "end": Kind.END}
        sender.send(Header(kinds[last_word], ticket.transfer_id))
    assert isinstance(place.landed.wait(ticket), TransferReleased)
    wait_until(lambda: place.receiver.flow().quarantined_block_count == 0, "no block is in quarantine")


def test_a_one_sided_sender_that_broke_the_rules_holds_its_blocks_until_it_is_gone(make_place: MakePlace) -> None:
    place = make_place(_MAKERS["shm"]())
    sender = place.greet()
    ticket = place.receiver.grant([1, 2, 3], 12, 60.0)
    sender.open(ticket)
    assert sender.answer()[0] == Kind.GRANTED
    sender.socket.sendall(bytes([255] * 64))
    assert sender.answer()[0] == Kind.REJECTED
    assert sender.socket.recv(1) == b""
    for _ in range(20):
        witness = place.receiver.grant([4], 4, 60.0)
        place.receiver.revoke(witness.transfer_id)
        place.landed.wait(witness)
    assert ticket.transfer_id not in place.landed.events
    assert place.receiver.flow().quarantined_block_count == 3
    sender.socket.close()
    assert isinstance(place.landed.wait(ticket), TransferReleased)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_one_sided_sender_writes_nothing_once_it_has_let_go(make_place: MakePlace, is_stopped: bool) -> None:
    place = make_place(_MAKERS["shm"]())
    source = KvPool(LAYOUT, 4)
    fill_pool(source, 1)
    link = ShmTransport().connect(place.receiver.endpoints[0], EPOCH, source, Mock())
    with contextlib.closing(link):
        ticket = place.receiver.grant([6, 2], 8, 60.0)
        link.open(ticket)
        assert link.write(ticket, range(1), 0, [0, 1], xxh3(), lambda: False) == 2
        place.receiver.revoke(ticket.transfer_id)
        assert isinstance(place.landed.wait(ticket), TransferReleased)
        place.receiver.pool.memory[:] = 0
        assert link.write(ticket, range(1, 2), 0, [0, 1], xxh3(), lambda: is_stopped) == 0
        assert not place.receiver.pool.memory.any()


@pytest.mark.usefixtures("breaks_are_expected")
def test_a_transfer_that_cannot_be_aborted_keeps_no_other_of_its_connection(
    place: ReceiverWithSenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = place.greet()
    tickets = [place.receiver.grant([block], 4, 60.0) for block in range(3)]
    for ticket in tickets:
        sender.open(ticket)
    sender.send(Header(Kind.END, bytes(16)))
    assert sender.answer()[0] == Kind.REJECTED  # all are open
    abort = PoolLanding.abort

    def abort_all_but_the_first(self: PoolLanding, reason: str) -> None:
        if self.ticket is tickets[0] and threading.current_thread().name.startswith("kv-receive"):
            raise TransferFailed("cannot be aborted")
        abort(self, reason)

    monkeypatch.setattr(PoolLanding, "abort", abort_all_but_the_first)
    sender.socket.close()
    for ticket in tickets[1:]:
        assert isinstance(place.landed.wait(ticket), TransferReleased)
    place.receiver.close()
    assert isinstance(place.landed.wait(tickets[0]), TransferReleased)


@pytest.mark.parametrize("how", ["revoked", "given up", "landed", "gone"])
def test_a_transfer_that_has_ended_takes_no_share_of_the_credit(
    make_place: MakePlace, content: np.ndarray, how: str
) -> None:
    place = make_place(SocketTransport("tcp"))
    alone_bytes = place.receiver.flow().window_bytes
    senders = [place.greet() for _ in range(8)]
    tickets = [place.receiver.grant([6, 2, 3], 12, 60.0) for _ in senders]
    for sender, ticket in zip(senders, tickets, strict=True):
        sender.open(ticket)
    wait_until(lambda: place.receiver.flow().window_bytes == alone_bytes // 2, "eight share what four may have")
    for sender, ticket in zip(senders, tickets, strict=True):
        if how == "revoked":
            place.receiver.revoke(ticket.transfer_id)
        elif how == "given up":
            sender.send(Header(Kind.ABORT, ticket.transfer_id))
        elif how == "landed":
            sender.push(ticket, content)
        else:
            sender.socket.close()
        place.landed.wait(ticket)
    wait_until(lambda: place.receiver.flow().window_bytes == alone_bytes, "the next one has a whole window")
    place.receiver.check_integrity()
