"""Copies of running requests' KV while their blocks are freed, and while holders have stopped reading."""

import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    Landed,
    LetGo,
    ReleaseFailed,
    ReplicaEnded,
    Replicated,
)
from kaveri.engine.copier import BlockPlace, Copier, ReplicaOptions
from kaveri.engine.copier_thread import Pace
from kaveri.engine.shared import Shared
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.errors import EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import NOTE_TOKENS_MAX, noted_tokens
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.transfer.push import IsIntact, PushAccepted, PushExtended, PushFailed, PushListener, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_conformance import make_request
from kaveri.testing.engine_recorder import EngineRecorder, wait_until_free
from kaveri.testing.engine_replication import ReplicaHoldingEngine

_LAYOUT = KvLayout("model", layer_count=2, block_tokens=4, kv_head_count=1, head_dim=4, dtype="float32")
_KEY = EngineKey("r", 1)


@dataclass(eq=False)
class _CopiedRequest:
    key: EngineKey
    done: bool = False
    is_copied: bool = False
    whole: int = 0
    generation: int = 0
    refusal: str | None = None
    is_stopped: bool = False
    stopped_tokens: int | None = None
    kept_as: ReplicaKey | None = None

    def places(self, index: int) -> BlockPlace:
        return BlockPlace(100 + index, self.generation)


class _Account:
    def __init__(self, *requests: _CopiedRequest) -> None:
        self.decodes = {request.key: request for request in requests}

    def whole_blocks(self, owner: _CopiedRequest) -> int:
        return owner.whole

    def place_of(self, owner: _CopiedRequest, index: int) -> BlockPlace:
        assert index < max(owner.whole, _LAYOUT.block_count(owner.stopped_tokens or 0))
        return owner.places(index)

    def tokens_of(self, owner: _CopiedRequest, start: int, stop: int) -> Sequence[int]:
        return range(start, stop)

    def stop(self, owner: _CopiedRequest) -> str | None:
        owner.is_stopped = not owner.refusal
        return owner.refusal

    def stopped_tokens(self, owner: _CopiedRequest) -> int | None:
        assert owner.is_stopped
        return owner.stopped_tokens

    def go_on(self, owner: _CopiedRequest) -> None:
        assert owner.is_stopped
        owner.is_stopped = False

    def end(self, owner: _CopiedRequest) -> None:
        owner.done = True


class _RecordingSender:
    """PushSender that records its calls; the test answers."""

    def __init__(self, listener: PushListener, is_intact: IsIntact) -> None:
        self.tell = listener
        self.is_intact = is_intact
        self.opened: list[bytes] = []
        self.written: list[tuple[bytes, int, int, tuple[int, ...]]] = []
        self.marks: list[tuple[bytes, int, tuple[int, ...]]] = []
        self.finished: list[tuple[bytes, tuple[int, ...]]] = []
        self.aborted: list[bytes] = []

    def open(self, ticket: Ticket) -> None:
        self.opened.append(ticket.transfer_id)

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        self.written.append((transfer_id, layer, first_index, tuple(source_blocks)))

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        for layer in layers:
            self.write(transfer_id, layer, first_index, source_blocks)

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        self.marks.append((transfer_id, block_count, noted_tokens(note)))

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        self.finished.append((transfer_id, noted_tokens(note)))

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        self.aborted.append(transfer_id)

    def close(self) -> None:
        """Nothing."""


class _CopierBench:
    """A Copier whose advance() the test calls."""

    def __init__(self, *requests: _CopiedRequest, slot_count: int = 8, layout: KvLayout = _LAYOUT) -> None:
        self.layout = layout
        self.events: list[EngineEvent] = []
        self.staged: list[tuple[int, int]] = []
        self.while_staging: Callable[[], None] = lambda: None
        self.shared = Shared()
        self.shared.listener = self.events.extend
        self.senders: list[_RecordingSender] = []
        self.now_s = 100.0
        self.copier = Copier(
            layout,
            slot_count,
            self.shared,
            _Account(*requests),
            self._stage,
            self._sender,
            on_work=lambda: None,
            now_s=lambda: self.now_s,
        )

    @property
    def sender(self) -> _RecordingSender:
        return self.senders[0]

    def ticket(self, block_count: int, holder: str = "a") -> Ticket:
        return Ticket(
            transfer_id=secrets.token_bytes(16),
            secret=bytes(16),
            epoch=1,
            endpoints=(KvEndpoint("unix", holder),),
            block_ids=tuple(range(block_count)),
            token_count=block_count * self.layout.block_tokens,
            expires_in_s=60.0,
            layout=self.layout,
            is_open=True,
        )

    def replicate(self, request: _CopiedRequest, block_count: int, holder: str = "a") -> bytes:
        ticket = self.ticket(block_count, holder)
        self.copier.replicate(request.key, ticket)
        return ticket.transfer_id

    def run(self) -> None:
        while self.copier.advance():
            with self.shared.lock:
                self.copier.check_integrity()

    def _stage(self, block_id: int, slot: int, _: bool) -> int:
        self.while_staging()
        self.staged.append((block_id, slot))
        return block_id

    def _sender(self, listener: PushListener, is_intact: IsIntact) -> _RecordingSender:
        self.senders.append(_RecordingSender(listener, is_intact))
        return self.senders[0]


def copying(block_count: int = 10, holder: str = "a", **request: Any) -> tuple[_CopiedRequest, _CopierBench, bytes]:
    """Return a request, a bench on which its copy has begun, and the id of the push."""
    copied = _CopiedRequest(_KEY, **request)
    bench = _CopierBench(copied)
    return copied, bench, bench.replicate(copied, block_count, holder)


def test_blocks_are_copied_when_they_are_whole_and_marked_with_their_tokens() -> None:
    request, bench, push = copying()
    bench.run()
    assert not bench.staged
    for whole in (2, 3):
        request.whole = whole
        bench.run()
        bench.sender.tell(PushMarked(push, whole))
    assert [block_id for block_id, _ in bench.staged] == [100, 101, 102]
    assert [(layer, index) for _, layer, index, _ in bench.sender.written] == [
        (layer, index) for index in range(3) for layer in range(2)
    ]
    assert bench.sender.marks == [(push, 2, tuple(range(8))), (push, 3, tuple(range(8, 12)))]
    assert bench.events == [Replicated(_KEY, 8), Replicated(_KEY, 12)]


def test_no_more_is_written_than_the_holder_has_granted() -> None:
    _, bench, push = copying(2, whole=5)
    bench.run()
    assert [block_count for _, block_count, _ in bench.sender.marks] == [2]
    bench.sender.tell(PushExtended(push, 4))
    bench.run()
    assert [block_count for _, block_count, _ in bench.sender.marks] == [2, 4]


def test_long_prompt_is_marked_in_as_many_steps_as_its_tokens_need() -> None:
    layout = KvLayout("model", layer_count=1, block_tokens=300, kv_head_count=1, head_dim=4, dtype="float32")
    request = _CopiedRequest(_KEY, whole=7)
    bench = _CopierBench(request, slot_count=16, layout=layout)
    bench.replicate(request, 7)
    bench.run()
    assert [block_count for _, block_count, _ in bench.sender.marks] == [3, 6, 7]
    assert max(len(token_ids) for _, _, token_ids in bench.sender.marks) <= NOTE_TOKENS_MAX


@pytest.mark.parametrize("lost", ["preempted", "preempted and computed again", "ended"])
def test_blocks_that_their_request_lost_while_they_were_pushed_are_not_marked(lost: str) -> None:
    request, bench, push = copying(whole=2)
    bench.run()
    assert bench.sender.is_intact(push, 2)
    request.whole = 3
    bench.run()
    request.generation, request.whole, request.done = 1, 3 if lost.endswith("again") else 0, lost == "ended"
    bench.sender.tell(PushMarked(push, 2))
    assert not bench.sender.is_intact(push, 3)
    assert bench.sender.aborted == [push] * (lost != "ended")
    bench.sender.tell(PushFailed(push, "aborted"))
    preempted = ReplicaEnded(_KEY, "its request was preempted while blocks were copied")
    assert bench.events == ([] if lost == "ended" else [Replicated(_KEY, 8), preempted])
    assert not bench.sender.is_intact(push, 3), "the push is unknown"


def test_copy_of_a_block_that_was_given_up_meanwhile_is_thrown_away() -> None:
    request, bench, _ = copying(whole=2)

    def preempt() -> None:
        request.generation, request.whole = 1, 1
        bench.while_staging = lambda: None

    bench.while_staging = preempt
    bench.run()
    assert [block_id for block_id, _ in bench.staged] == [100, 100], "the copy of block 0 was made again"
    assert [index for _, layer, index, _ in bench.sender.written if layer == 0] == [0]


@pytest.mark.parametrize("are_confirmed", [True, False])
def test_blocks_may_change_once_they_were_read(are_confirmed: bool) -> None:
    request, bench, push = copying(whole=3)
    bench.run()
    assert bench.sender.is_intact(push, 3)
    if are_confirmed:
        bench.sender.tell(PushMarked(push, 3))
    request.generation, request.whole = 1, 4
    bench.run()
    assert bench.sender.is_intact(push, 4)


def test_replica_does_not_shrink_while_its_request_computes_its_blocks_again() -> None:
    request, bench, push = copying(whole=3)
    bench.run()
    bench.sender.tell(PushMarked(push, 3))
    request.generation, request.whole = 1, 0
    bench.run()
    request.whole = 4
    bench.run()
    bench.sender.tell(PushMarked(push, 4))
    assert [index for _, layer, index, _ in bench.sender.written if layer == 0] == [0, 1, 2, 3]
    assert bench.events == [Replicated(_KEY, 12), Replicated(_KEY, 16)]


@pytest.mark.parametrize("moment", ["between", "staging"])
def test_push_of_an_ended_request_is_given_up_and_nothing_is_said(moment: str) -> None:
    request, bench, push = copying(whole=3)

    def end() -> None:
        request.done = True

    if moment == "between":
        bench.run()
        end()
    else:
        bench.while_staging = end
    bench.run()
    assert bench.sender.aborted == [push]
    bench.sender.tell(PushMarked(push, 1))
    bench.sender.tell(PushFailed(push, "aborted"))
    assert bench.events == []
    assert not bench.copier.has_copies


def test_request_that_ended_before_its_copy_began_leaves_no_blocks_at_the_holder() -> None:
    bench = _CopierBench()
    ticket = bench.ticket(4)
    bench.copier.replicate(_KEY, ticket)
    assert (bench.sender.opened, bench.sender.aborted) == ([ticket.transfer_id], [ticket.transfer_id])


def test_released_request_ends_its_push_with_its_part_full_block() -> None:
    request, bench, push = copying(whole=2)
    bench.run()
    bench.copier.release(_KEY, 2.0)
    bench.run()
    assert request.is_stopped
    assert not bench.sender.finished, "a step is under way"
    request.whole, request.stopped_tokens = 3, 14
    bench.run()
    assert [index for _, layer, index, _ in bench.sender.written if layer == 0] == [0, 1, 2, 3]
    assert bench.sender.marks[-1] == (push, 3, tuple(range(8, 12))), "the part-full block is not marked"
    assert bench.sender.finished == [(push, (12, 13))]
    bench.sender.tell(PushAccepted(push, 1, "unix"))
    assert bench.events == [LetGo(_KEY, 14)]
    assert request.done
    assert not bench.copier.has_copies


def test_request_goes_on_when_its_holder_does_not_take_the_rest_in_time() -> None:
    request, bench, push = copying(2, whole=2, stopped_tokens=9)
    bench.copier.release(_KEY, 2.0)
    bench.run()
    bench.sender.tell(PushMarked(push, 2))
    bench.now_s += 1.9
    bench.run()
    assert not bench.sender.aborted
    bench.now_s += 0.1
    bench.run()
    assert bench.sender.aborted == [push]
    bench.sender.tell(PushFailed(push, "aborted"))
    reason = "the holder has not taken all in time"
    assert bench.events == [Replicated(_KEY, 8), ReplicaEnded(_KEY, reason), ReleaseFailed(_KEY, reason)]
    assert not request.is_stopped
    assert not request.done


def test_request_that_loses_its_blocks_is_not_released_and_keeps_its_replica() -> None:
    request, bench, push = copying(whole=2)
    bench.run()
    bench.copier.release(_KEY, 2.0)
    request.whole, request.generation, request.stopped_tokens = 0, 1, 0
    bench.run()
    bench.sender.tell(PushMarked(push, 2))
    assert bench.events == [ReleaseFailed(_KEY, "it was preempted"), Replicated(_KEY, 8)]
    assert not bench.sender.finished
    assert not bench.sender.aborted


@pytest.mark.parametrize("copied", [True, False])
def test_request_that_cannot_be_released_hears_why(copied: bool) -> None:
    request = _CopiedRequest(_KEY, whole=2, refusal="not now")
    bench = _CopierBench(request)
    if copied:
        bench.replicate(request, 10)
    bench.copier.release(_KEY, 2.0)
    assert bench.events == [ReleaseFailed(_KEY, "not now" if copied else "it has no replica")]


def test_block_that_cannot_be_copied_ends_its_copy_and_no_other() -> None:
    request, other = _CopiedRequest(_KEY, whole=2), _CopiedRequest(EngineKey("other", 1), whole=2)
    bench = _CopierBench(request, other)
    push = bench.replicate(request, 10)

    def fail() -> None:
        bench.while_staging = lambda: None
        raise EngineError("a rank does not answer")

    bench.while_staging = fail
    bench.run()
    assert bench.events == [ReplicaEnded(_KEY, str(EngineError("a rank does not answer")))]
    assert bench.sender.aborted == [push]
    bench.sender.tell(PushFailed(push, "aborted"))
    assert len(bench.events) == 1
    again = bench.replicate(other, 10)
    bench.run()
    assert bench.sender.marks[-1] == (again, 2, tuple(range(8)))


def test_engine_outlives_a_copier_that_fails(tmp_path: Path, stack: ExitStack) -> None:
    model, engine, recorder, holder = _copying_engine(tmp_path, stack)
    request = _adopted(engine, recorder, "r", 20)

    def whole_blocks(owner: object) -> int:
        del engine._lifecycle.whole_blocks  # type: ignore[method-assign]
        raise ValueError("a fault of the copier")

    engine._lifecycle.whole_blocks = whole_blocks  # type: ignore[method-assign]
    holder.replicate(engine, request)
    recorder.wait_for(ReplicaEnded, request.key)
    holder.replicate(engine, request)
    recorder.wait_for(Replicated, request.key)
    engine.admit(request.key)
    recorder.wait_for_finish(request.key)
    assert recorder.token_ids[request.key] == model.answer(request.token_ids, 0, 20)


def test_pace_spreads_bytes_evenly_and_saves_nothing_up() -> None:
    pace = Pace(0.1, 0.0)
    assert [pace.wait_s(now_s) for now_s in (10.0, 10.0, 10.25, 20.0)] == pytest.approx([0, 0.1, 0, 0])
    assert pace.wait_s(20.05) == pytest.approx(0.05)
    unlimited = Pace(0.0, 0.0)
    assert [unlimited.wait_s(10.0) for _ in range(2)] == [0, 0]


def test_copies_rest_before_each_block_unless_a_request_stands_still() -> None:
    pace = Pace(0.0, 0.004)
    assert [pace.wait_s(now_s) for now_s in (10.0, 10.001, 20.0)] == pytest.approx([0.004] * 3)
    assert pace.wait_s(25.0, at_once=True) == 0
    limited = Pace(0.1, 0.01)
    limited.wait_s(10.0)
    assert limited.wait_s(10.01) == pytest.approx(0.1), "the rate limit counts from the start of a block"


def test_copies_wait_for_their_rate_and_requests_do_not(tmp_path: Path, stack: ExitStack) -> None:
    waits: list[float] = []
    _, engine, recorder, holder = _copying_engine(tmp_path, stack, ReplicaOptions(bytes_per_s=1))
    ending = engine._copier._ending
    ending.wait = lambda timeout=None: waits.append(timeout or 0) is None and False  # type: ignore[method-assign]
    request = _adopted(engine, recorder, "r", 20)
    holder.replicate(engine, request)
    recorder.wait_until(lambda: len(waits) >= 9, "wait between two blocks")
    engine.admit(request.key)
    recorder.wait_for_finish(request.key)
    assert set(waits[1:]) == {1.0}


def test_holder_that_answers_nothing_leaves_slots_to_the_others() -> None:
    silent = [_CopiedRequest(EngineKey(f"silent{i}", 1), whole=9) for i in range(6)]
    lively = _CopiedRequest(EngineKey("lively", 1), whole=20)
    bench = _CopierBench(*silent, lively, slot_count=8)
    for request in silent:
        bench.replicate(request, 9, "silent")
    bench.run()
    assert len(bench.staged) == 4, "one holder has taken more than half"
    push = bench.replicate(lively, 20, "lively")
    while True:
        bench.run()
        marked = [block_count for transfer_id, block_count, _ in bench.sender.marks if transfer_id == push]
        if marked[-1] == 20:
            break
        bench.sender.tell(PushMarked(push, marked[-1]))


def test_copy_whose_holder_answers_no_mark_for_long_is_given_up_and_another_holder_takes_its_place() -> None:
    request, bench, silent = copying(10, "silent", whole=2)
    bench.run()
    bench.now_s += 9
    bench.run()
    assert not bench.sender.aborted
    bench.now_s += 1
    bench.run()
    assert bench.sender.aborted == [silent]
    bench.sender.tell(PushFailed(silent, "aborted"))
    assert bench.events == [ReplicaEnded(_KEY, "the holder has answered nothing for 10 s")]
    again = bench.replicate(request, 10, "lively")
    bench.run()
    assert bench.sender.marks[-1] == (again, 2, tuple(range(8)))


def test_holder_that_answers_is_kept_however_long_its_request_completes_no_block() -> None:
    request, bench, push = copying(whole=2)
    bench.run()
    request.whole = 3
    bench.run()
    for block_count in (2, 3):
        bench.now_s += 9
        bench.sender.tell(PushMarked(push, block_count))
        bench.run()
    bench.now_s += 1000
    bench.run()
    assert not bench.sender.aborted


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _copying_engine(
    folder: Path, stack: ExitStack, replicas: ReplicaOptions | None = None, **shape: Any
) -> tuple[FakeModel, StepwiseEngine, EngineRecorder, ReplicaHoldingEngine]:
    model = FakeModel(max_model_len=400, block_tokens=4, **shape)
    listen = [KvEndpoint("unix", str(folder / "kv.sock"))]
    engine = StepwiseEngine(FakeRunner(model), 600, listen=listen, replicas=replicas or ReplicaOptions())
    stack.callback(engine.close)
    recorder = EngineRecorder()
    engine.start(recorder)
    listen = [KvEndpoint("unix", str(folder / "replicas.sock"))]
    store_bytes = 500 * 2 * model.layout.block_bytes
    store = HostReplicas(model.layout, store_bytes, listen=listen, transports=make_transports(), epoch=1)
    stack.callback(store.close)
    return model, engine, recorder, ReplicaHoldingEngine(store)


def _adopted(engine: StepwiseEngine, recorder: EngineRecorder, name: str, max_tokens: int) -> EngineRequest:
    request = make_request(engine, name, 40, max_tokens)
    engine.prefill(request)
    recorder.wait_until(lambda: request.key in recorder.token_ids, "first token")
    engine.adopt(request.key)
    return request


def test_requests_whose_holder_is_frozen_finish_and_free_their_blocks(tmp_path: Path, stack: ExitStack) -> None:
    staging_bytes = 16 * 2 * FakeModel(block_tokens=4).layout.block_bytes
    options = ReplicaOptions(staging_bytes=staging_bytes)
    model, engine, recorder, holder = _copying_engine(tmp_path, stack, options, step_s=0.0005)
    # A process that has stopped: its socket takes connections and reads nothing.
    frozen = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stack.callback(frozen.close)
    frozen.bind(str(tmp_path / "frozen.sock"))
    frozen.listen()
    requests = []
    for number in range(6):
        request = _adopted(engine, recorder, f"r{number}", 200)
        requests.append(request)
        if number % 2:
            holder.replicate(engine, request)
        else:
            address, name = KvEndpoint("unix", str(tmp_path / "frozen.sock")), secrets.token_bytes(16)
            block_ids = tuple(range(90))
            ticket = Ticket(name, bytes(16), 2, (address,), block_ids, 360, 60.0, model.layout, is_open=True)
            engine.replicate(request.key, ticket)
        engine.admit(request.key)
    for number, request in enumerate(requests):
        recorder.wait_for_finish(request.key)
        assert recorder.token_ids[request.key] == model.answer(request.token_ids, 0, 200)
        watermarks = [event.token_count for event in recorder.of(Replicated, request.key)]
        assert (max(watermarks, default=0) > 40) == bool(number % 2), watermarks
    wait_until_free(engine)
    assert not recorder.of(Landed)
