"""A landing as a link brings it on, one call after another."""

import queue
from collections.abc import Callable, Iterator

import pytest

from kaveri.errors import TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transports import make_transports

LAYOUT = KvLayout("model", 1, block_tokens=4, kv_head_count=1, head_dim=8, dtype="float32")
SOON_S = 60.0

Event = TransferLanded | TransferReleased


@pytest.fixture
def events() -> "queue.Queue[Event]":
    return queue.Queue()


@pytest.fixture
def receiver(events: "queue.Queue[Event]", monkeypatch: pytest.MonkeyPatch) -> Iterator[KvReceiver]:
    """Its timers never come round, as in a process that stood still and has just been let go on."""

    def never(self: Reporter, delay_s: float, call: Callable[[], None]) -> None:
        """Replaces Reporter.call_after."""

    monkeypatch.setattr(Reporter, "call_after", never)
    made = KvReceiver(KvPool(LAYOUT, 4), events.put, listen=(), epoch=1, transports=make_transports())
    yield made
    made.close()


@pytest.mark.parametrize(("expires_in_s", "lands"), [(60.0, True), (0.0, False)])
def test_nothing_lands_once_its_ticket_has_expired_whether_or_not_the_timer_has_run(
    receiver: KvReceiver, events: "queue.Queue[Event]", expires_in_s: float, lands: bool
) -> None:
    answers: list[tuple[bytes, str | None]] = []
    ticket = receiver.grant((), 4, expires_in_s, first_block=1)
    credit = receiver.admit(lambda *_: None)
    landing = receiver.open(ticket.transfer_id, ticket.secret, 1, lambda *answer: answers.append(answer), credit)
    if lands:
        landing.finish(b"note")
        assert events.get(timeout=SOON_S) == TransferLanded(ticket.transfer_id, 0, b"note")
        assert answers == [(ticket.transfer_id, None)]
        return
    with pytest.raises(TransferFailed, match="the ticket expired"):
        landing.finish(b"note")
    assert events.get(timeout=SOON_S) == TransferReleased(ticket.transfer_id, "the ticket expired")
    assert answers == [(ticket.transfer_id, "the ticket expired")]
