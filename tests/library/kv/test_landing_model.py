"""An open landing under random calls, compared with a model of a few numbers."""

import contextlib
import queue
import random
from collections.abc import Sequence

import pytest

from kaveri.errors import TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest, xxh3
from kaveri.kv.transfer.landing import PoolLanding
from kaveri.kv.transfer.receiver import KvReceiver, TransferEvent, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.reporter import Reporter

LAYOUT = KvLayout("model", 2, block_tokens=4, kv_head_count=1, head_dim=8, dtype="float32")
BLOCKS = 40
SOON_S = 60.0


class _ModelSender:
    def __init__(self) -> None:
        self.marked_counts: list[int] = []
        self.block_ids: list[int] = []
        self.answers: list[str | None] = []
        self.digest: Digest = xxh3()
        self.arrived = [0] * LAYOUT.layer_count

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        self.marked_counts.append(block_count)

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        assert first_index == len(self.block_ids), "an extension came out of order"
        self.block_ids += block_ids

    def answer(self, transfer_id: bytes, rejection: str | None) -> None:
        self.answers.append(rejection)


class _TransferRun:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        self._pool = KvPool(LAYOUT, BLOCKS)
        self._receiver = KvReceiver(self._pool, self._events.put, listen=(), epoch=1, transports=())
        self._free = list(range(BLOCKS))
        self._sender = _ModelSender()
        self._taken: list[int] = []
        self._marked = 0
        self._landing: PoolLanding | None = None
        self._is_held = False
        self.must_end: bool | None = None
        """True if the transfer must land, False if it must be released; None while undecided."""

    def carry_out(self) -> None:
        chance = self._chance
        grant = [self._free.pop() for _ in range(chance.randint(0, 4))]
        self._ticket = self._receiver.grant(grant, 4, 60.0, is_open=True)
        self._taken += grant
        self._sender.block_ids += grant
        steps = (self._extend, self._open, self._write, self._write, self._write, self._mark, self._mark, self._end)
        while self.must_end is None:
            chance.choice(steps)()
        self._require_end()

    def _extend(self) -> None:
        blocks = [self._free.pop() for _ in range(self._chance.randint(1, 3)) if self._free]
        if blocks:
            assert self._receiver.extend(self._ticket.transfer_id, blocks)
            self._taken += blocks
        if self._landing is not None:
            assert self._sender.block_ids == self._taken

    def _open(self) -> None:
        if self._landing is not None:
            return
        sender, ticket = self._sender, self._ticket
        credit = self._receiver.admit(lambda *_: None)
        self._landing = self._receiver.open(
            ticket.transfer_id, ticket.secret, 1, sender.answer, credit, progress=sender
        )
        self._is_held = self._chance.random() < 0.5
        if self._is_held:
            self._landing.hold()
        assert sender.block_ids == self._taken

    def _write(self) -> None:
        if self._landing is None:
            return
        layer = self._chance.randrange(LAYOUT.layer_count)
        layers = range(layer, layer + 1)
        if len(set(self._sender.arrived)) == 1 and self._chance.random() < 0.7:
            layers = range(LAYOUT.layer_count)
        start = self._sender.arrived[layers.start]
        count = self._chance.randint(1, 3)
        if start + count > len(self._taken):
            if self._chance.random() < 0.9:
                return
            with pytest.raises(TransferFailed):
                self._landing.begin_write(layers, start, count)
            self.must_end = False
            return
        blocks, digest = self._landing.begin_write(layers, start, count)
        assert list(blocks) == self._taken[start : start + count]
        data = memoryview(self._chance.randbytes(len(layers) * count * LAYOUT.block_bytes))
        self._sender.digest.update(data)
        assert digest is not None
        digest.update(data)
        self._landing.end_write()
        for layer in layers:
            self._sender.arrived[layer] = start + count

    def _mark(self) -> None:
        if self._landing is None:
            return
        low, high = self._marked, min(self._sender.arrived)
        is_right = self._chance.random() < 0.9
        if is_right and low == high:
            return
        count = self._chance.randint(low + 1, high) if is_right else self._chance.choice((0, low, high + 1, 1 << 31))
        digest = self._sender.digest.intdigest()
        if is_right and self._chance.random() < 0.05:
            is_right, digest = False, digest ^ 1
        if not is_right:
            with pytest.raises(TransferFailed):
                self._landing.mark(count, b"", digest)
            self.must_end = False
            return
        self._landing.mark(count, b"%d" % count, digest)
        assert self._events.get(timeout=SOON_S) == TransferMarked(self._ticket.transfer_id, count, b"%d" % count)
        self._marked = count
        assert self._sender.marked_counts[-1] == count

    def _end(self) -> None:
        if self._chance.random() < 0.7:
            return
        if self._landing is None or self._chance.random() < 0.3:
            self._receiver.revoke(self._ticket.transfer_id)
            self.must_end = False
        elif self._chance.random() < 0.3:
            self._landing.abort("the sender gave up", given_up=True)
            self.must_end = False
        else:
            self.must_end = len(set(self._sender.arrived)) == 1
            digest = self._sender.digest.intdigest()
            if self._is_held:
                self._landing.fence()
                self._is_held = False
            if self.must_end:
                self._landing.finish(b"end", digest)
            else:
                with pytest.raises(TransferFailed):
                    self._landing.finish(b"end", digest)

    def _require_end(self) -> None:
        name = self._ticket.transfer_id
        assert not self._receiver.extend(name, [0])
        if self._is_held:
            # What the sender still writes goes into blocks of no other transfer.
            assert self._events.empty()
            assert self._receiver.flow().quarantined_block_count == len(self._taken)
            assert self._landing is not None
            self._landing.fence()
        event = self._events.get(timeout=SOON_S)
        if self.must_end:
            kv_bytes = sum(self._sender.arrived) * LAYOUT.block_bytes
            assert event == TransferLanded(name, kv_bytes, b"end")
            assert self._sender.answers == [None]
        else:
            assert isinstance(event, TransferReleased)
            assert event.given_up == (event.reason == "the sender gave up")
            assert self._landing is None or self._sender.answers == [event.reason]
        assert all(account.due_bytes == 0 for account in self._receiver._credit.senders)
        assert self._receiver.flow().leased_block_count == 0
        if self._landing is not None:
            with pytest.raises(TransferFailed):
                self._landing.mark(self._marked + 1, b"", 0)
        self._receiver.close()
        assert self._events.empty()


def test_no_random_calls_move_a_mark_or_lose_a_block() -> None:
    first = random.randrange(1 << 30)
    for seed in range(first, first + 300):
        try:
            _TransferRun(seed).carry_out()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("expires_in_s", [60.0, 0.0])
def test_nothing_lands_once_its_ticket_has_expired_even_if_no_timer_has_run(
    monkeypatch: pytest.MonkeyPatch, expires_in_s: float
) -> None:
    # As in a stalled process: timers do not fire.
    monkeypatch.setattr(Reporter, "call_after", lambda *_: None)
    events, answers = queue.Queue[TransferEvent](), list[tuple[bytes, str | None]]()
    with contextlib.closing(KvReceiver(KvPool(LAYOUT, 4), events.put, listen=(), epoch=1, transports=())) as receiver:
        ticket = receiver.grant((), 4, expires_in_s, first_block=1)
        credit = receiver.admit(lambda *_: None)
        landing = receiver.open(ticket.transfer_id, ticket.secret, 1, lambda *answer: answers.append(answer), credit)
        refusal = None if expires_in_s else "the ticket expired"
        with contextlib.nullcontext() if refusal is None else pytest.raises(TransferFailed, match=refusal):
            landing.finish(b"note")
        released = TransferReleased(ticket.transfer_id, "the ticket expired")
        assert events.get(timeout=SOON_S) == (released if refusal else TransferLanded(ticket.transfer_id, 0, b"note"))
        assert answers == [(ticket.transfer_id, refusal)]
