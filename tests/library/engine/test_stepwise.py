"""The stepwise engine while a step is running, and with both sides in one engine."""

import random
import threading
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import (
    EngineEvent,
    EngineInfo,
    EngineKey,
    EngineRequest,
    FirstToken,
    KvPushed,
    KvPushFailed,
    Landed,
    Preempted,
    StepTokens,
)
from kaveri.engine.kv_plane import PoolPlane, Source
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.lifecycle import Lifecycle, min_free_blocks
from kaveri.engine.stepwise.runner import Drawn, DrawnToken, LayerListener, SequenceSlice
from kaveri.engine.stepwise.sequence import Sequence as StepwiseSequence
from kaveri.errors import NoCapacity, RequestCancelled
from kaveri.kv.replicas.replica import Kept, Replica
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder, wait_until_free
from tests.library.engine.stepwise_bench import (
    MODEL,
    HeldRunner,
    StepwiseBench,
    StepwisePair,
    make_stepwise_request,
    start_recording,
)


def test_layer_goes_out_while_later_layers_are_computed(bench: StepwiseBench) -> None:
    source, target = HeldRunner(), HeldRunner()
    pair = bench.pair(source, target)
    request = make_stepwise_request("r", 10, 5)
    ticket = pair.decode.reserve(request, 60.0).result()
    source.hold()
    pair.prefill.prefill(request)
    pair.prefill.push_to(request.key, ticket)
    source.wait_until_held()
    arrived = threading.Event()
    while not target.pool.memory[0, list(ticket.block_ids)].any(axis=1).all():
        assert not arrived.wait(0.002)
    assert not target.pool.memory[1].any()
    source.let_go()
    assert pair.decoded.wait_for_finish(request.key) is FinishReason.LENGTH


@pytest.mark.parametrize("prompt_tokens", [7, 40])
def test_ticket_that_comes_between_two_layers_of_a_step_gets_every_block_once(
    bench: StepwiseBench, prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = HeldRunner()
    written: list[tuple[int, int, int]] = []
    write_layers = KvSender.write_layers

    def recorded(
        self: KvSender, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]
    ) -> None:
        written.extend((layer, first_index, len(source_blocks)) for layer in layers)
        write_layers(self, transfer_id, layers, first_index, source_blocks)

    monkeypatch.setattr(KvSender, "write_layers", recorded)
    pair = bench.pair(runner)
    request = make_stepwise_request("r", prompt_tokens, 6)
    runner.hold()
    pair.prefill.prefill(request)
    runner.wait_until_held()
    pair.prefill.push_to(request.key, pair.decode.reserve(request, 60.0).result())
    # The step is behind layer 0 and computes 7 or 16 tokens: blocks of 4, the part-full one only with the last chunk.
    assert written == [(0, 0, 2 if prompt_tokens == 7 else 4)]
    runner.let_go()
    pair.decoded.wait_for_finish(request.key)
    block_count = pair.decode.info.layout.block_count(prompt_tokens)
    for layer in range(pair.decode.info.layout.layer_count):
        runs = [(first_index, count) for written_layer, first_index, count in written if written_layer == layer]
        assert [index for first_index, count in runs for index in range(first_index, first_index + count)] == list(
            range(block_count)
        )
    first = pair.prefilled.wait_for(FirstToken, request.key)
    assert [first.token_id, *pair.decoded.token_ids[request.key]] == MODEL.answer(request.token_ids, 0, 6)
    pair.prefilled.wait_for(KvPushed, request.key)
    wait_until_free(pair.prefill, pair.decode)


def test_blocks_of_a_running_step_outlive_an_abort(bench: StepwiseBench) -> None:
    runner = HeldRunner()
    engine = bench.engine(runner)
    recorder = start_recording(engine)
    request, next_request = make_stepwise_request("r", 10, 5), make_stepwise_request("next", 10, 1)
    runner.hold()
    engine.prefill(request)
    runner.wait_until_held()
    held = engine.stats().free_blocks
    engine.abort(request.key)
    assert engine.stats().free_blocks == held < engine.info.total_blocks
    engine.check_integrity()
    engine.prefill(next_request)
    runner.let_go()
    recorder.wait_for_finish(next_request.key)
    wait_until_free(engine)
    assert not recorder.of(FirstToken, request.key)


def test_calls_do_not_wait_for_a_running_step(bench: StepwiseBench) -> None:
    runner = HeldRunner()
    engine, other = bench.engine(runner), bench.engine(receives=False)
    recorder = start_recording(engine, admit=True)
    start_recording(other)
    request = make_stepwise_request("r", 10, 5)
    runner.hold()
    engine.prefill(make_stepwise_request("long", 100, 5))
    runner.wait_until_held()
    ticket = engine.reserve(request, 60.0)
    assert ticket.done()
    other.prefill(request)
    other.push_to(request.key, ticket.result())
    recorder.wait_for(Landed, request.key)
    engine.prefill(make_stepwise_request("another", 10, 5))
    assert engine.stats().running_requests == 3
    engine.abort(EngineKey("another", 1))
    engine.abort(EngineKey("long", 1))
    engine.check_integrity()
    runner.let_go()
    recorder.wait_for_finish(request.key)


def test_abort_that_overtakes_the_opening_of_a_push_still_ends_it(
    bench: StepwiseBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = HeldRunner()
    prefill, decode = bench.engine(runner, receives=False), bench.engine()
    prefilled = start_recording(prefill)
    start_recording(decode)
    request = make_stepwise_request("r", 10, 5)
    open_push = PoolPlane.open_push

    def overtaken(self: PoolPlane, source: Source, ticket: Ticket) -> None:
        prefill.abort(request.key)
        open_push(self, source, ticket)

    monkeypatch.setattr(PoolPlane, "open_push", overtaken)
    runner.hold()
    prefill.prefill(request)
    runner.wait_until_held()
    prefill.push_to(request.key, decode.reserve(request, 10 * SOON_S).result())
    runner.let_go()
    wait_until_free(prefill)
    decode.abort(request.key)
    wait_until_free(decode)
    assert not prefilled.of(KvPushed) + prefilled.of(KvPushFailed)


def test_abort_that_overtakes_the_grant_of_a_ticket_cancels_the_reservation(
    bench: StepwiseBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = bench.engine()
    decoded = start_recording(decode)
    request = make_stepwise_request("r", 10, 5)
    lease = KvReceiver.lease

    def overtaken(self: KvReceiver, ticket: Ticket, parts: Sequence[Ticket]) -> None:
        decode.abort(request.key)
        decode.check_integrity()
        assert decode.stats().free_blocks < decode.info.total_blocks
        lease(self, ticket, parts)

    monkeypatch.setattr(KvReceiver, "lease", overtaken)
    with pytest.raises(RequestCancelled):
        decode.reserve(request, 10 * SOON_S).result(SOON_S)
    wait_until_free(decode)
    assert decoded.events == []


def test_events_of_a_step_come_in_one_call(bench: StepwiseBench) -> None:
    runner = HeldRunner()
    pair = bench.pair(target=runner, admit=False)
    requests = [make_stepwise_request(f"r{i}", 10 + i, 12) for i in range(4)]
    for request in requests:
        pair.hand_over(request)
        pair.decoded.wait_for(Landed, request.key)
    runner.hold()
    pair.decode.admit(requests[0].key)
    runner.wait_until_held()
    for request in requests[1:]:
        pair.decode.admit(request.key)
    runner.let_go()
    for request in requests:
        pair.decoded.wait_for_finish(request.key)
    steps = [call for call in pair.decoded.calls if any(isinstance(event, StepTokens) for event in call)]
    assert [len(call) for call in steps] == [1] * 12
    assert [len(call[0].steps) for call in steps if isinstance(call[0], StepTokens)] == [1, *[4] * 10, 3]


def test_runner_is_told_of_landed_blocks_before_it_reads_them(bench: StepwiseBench) -> None:
    runner = HeldRunner()
    pair = bench.pair(target=runner)
    request = make_stepwise_request("r", 18, 4)
    ticket = pair.hand_over(request)
    pair.decoded.wait_for_finish(request.key)
    assert tuple(runner.told_landed) == ticket.block_ids


def _landed(total_blocks: int, prompt_tokens: int) -> tuple[Lifecycle, StepwiseSequence, list[EngineEvent]]:
    """Return a lifecycle of total_blocks blocks, a landed request in it, and its events."""
    info = EngineInfo("fake", MODEL.layout, total_blocks, 128, 1000, frozenset(), 1, ())
    events: list[EngineEvent] = []
    lifecycle = Lifecycle(info, 16, 8, events.append, lambda: None)
    sequence = lifecycle.open_decode(make_stepwise_request("a", prompt_tokens, 20), None)
    assert lifecycle.land(sequence, 7) is None
    return lifecycle, sequence, events


@pytest.mark.parametrize("is_computed", [False, True])
def test_last_block_of_a_released_request_is_read_from_the_runner_only_if_it_has_it(is_computed: bool) -> None:
    """A runner on a device would overwrite the landed KV with what it has."""
    lifecycle, sequence, _ = _landed(20, 6)
    sequence.is_copied = True
    sequence.runner_unaware = not is_computed
    assert lifecycle.stop(sequence) is None
    assert lifecycle.last_blocks() == [(sequence, [sequence.block_ids[1]] if is_computed else [])]
    lifecycle.stopped(sequence)
    assert lifecycle.stopped_tokens(sequence) == 6


def test_blocks_that_are_brought_to_the_pool_are_not_free_when_their_request_is_aborted() -> None:
    """The copy would overwrite KV that has landed for the next owner."""
    lifecycle, sequence, _ = _landed(2, 6)
    sequence.runner_unaware = False
    assert lifecycle.stop(sequence) is None
    assert lifecycle.last_blocks() == [(sequence, [sequence.block_ids[1]])]
    lifecycle.abort(sequence.key)
    lifecycle.check_integrity()
    assert lifecycle.stats().free_blocks == 0
    lifecycle.stopped(sequence)
    lifecycle.check_integrity()
    assert lifecycle.stats().free_blocks == 2


def test_request_that_goes_on_while_its_last_blocks_are_read_gives_them_up_behind_that() -> None:
    lifecycle, sequence, events = _landed(2, 7)
    lifecycle.admit(sequence.key)
    planned = lifecycle.plan()
    assert lifecycle.stop(sequence) is None
    assert lifecycle.last_blocks() == [], "the step under way writes them"
    sequence.runner_unaware = False
    lifecycle.apply(planned, [DrawnToken(5, None)])
    assert [found for found, _ in lifecycle.last_blocks()] == [sequence]
    lifecycle.go_on(sequence)
    lifecycle.check_integrity()
    assert len(sequence.block_ids) == 2
    assert Preempted(sequence.key) not in events
    lifecycle.stopped(sequence)
    lifecycle.check_integrity()
    assert sequence.block_ids == []
    assert events[-1] == Preempted(sequence.key)


def test_runner_that_tells_of_no_layer_still_hands_over(bench: StepwiseBench) -> None:
    class Silent(FakeRunner):
        def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
            return super().run(batch, None)

    pair = bench.pair(Silent(MODEL))
    request = make_stepwise_request("r", 50, 4)
    pair.hand_over(request)
    pair.decoded.wait_for_finish(request.key)
    assert pair.decoded.token_ids[request.key] == MODEL.answer(request.token_ids, 0, 4)[1:]


def test_new_requests_do_not_take_the_blocks_that_a_preempted_one_waits_for(bench: StepwiseBench) -> None:
    decode = bench.engine(total_blocks=32)
    refusals: list[str] = []

    def reserve_more(event: EngineEvent) -> None:
        if isinstance(event, Preempted):
            assert decode.stats().free_blocks >= 1
            refused = decode.reserve(make_stepwise_request("small", 1, 5), 60.0).exception(SOON_S)
            assert isinstance(refused, NoCapacity)
            refusals.append(refused.reason)

    decoded = EngineRecorder(admit_to=decode, on_event=reserve_more)
    decode.start(decoded)
    prefill = bench.engine(receives=False)
    pair = StepwisePair(prefill, decode, start_recording(prefill), decoded)
    requests = [make_stepwise_request(f"r{i}", 50, 40) for i in range(2)]
    for request in requests:
        pair.hand_over(request)
    for request in requests:
        decoded.wait_for_finish(request.key)
        assert decoded.token_ids[request.key] == MODEL.answer(request.token_ids, 0, 40)[1:]
    assert refusals
    assert set(refusals) == {"a preempted request waits for blocks"}


def test_adoption_lets_a_preempted_request_go_on_before_the_adopted_one_is_admitted(bench: StepwiseBench) -> None:
    # 40 blocks of 4 tokens: room for both prompts, and not for the whole answer behind the first.
    engine = bench.engine(total_blocks=40, receives=False, chunk_tokens=256)
    recorder = start_recording(engine)
    first, second = make_stepwise_request("first", 40, 80), make_stepwise_request("second", 60, 10)
    for request in (first, second):
        engine.prefill(request)
    for request in (first, second):
        recorder.wait_for(FirstToken, request.key)
    engine.adopt(first.key)
    engine.admit(first.key)
    recorder.wait_for(Preempted, first.key)
    assert not recorder.finished
    # The last calls: an engine that slept now would sleep forever.
    engine.adopt(second.key)
    recorder.wait_for_finish(first.key)
    assert recorder.of(Preempted, second.key)
    engine.admit(second.key)
    recorder.wait_for_finish(second.key)
    for request, token_count in ((first, 80), (second, 10)):
        assert recorder.token_ids[request.key] == MODEL.answer(request.token_ids, 0, token_count)
    wait_until_free(engine)


def test_one_engine_may_push_to_itself(bench: StepwiseBench) -> None:
    model = FakeModel(max_model_len=128, block_tokens=4, eos_probability=0.05)
    engine = bench.engine(FakeRunner(model))
    recorder = start_recording(engine, admit=True)
    requests = [make_stepwise_request(f"r{i}", 3 + 7 * i, 30) for i in range(8)]
    for request in requests:
        ticket = engine.reserve(request, 60.0).result()
        engine.prefill(request)
        engine.push_to(request.key, ticket)
    for request in requests:
        expected = model.answer(request.token_ids, 0, 30)
        if 0 in expected:
            expected = expected[: expected.index(0) + 1]
        recorder.wait_for_finish(request.key)
        assert recorder.token_ids[request.key] == expected
        engine.abort(request.key)
    wait_until_free(engine)


@pytest.mark.parametrize("seed", range(2))
def test_calls_from_many_threads_leave_blocks_and_tokens_right(bench: StepwiseBench, seed: int) -> None:
    print(f"seed {seed}")
    prefill, decode = bench.engine(total_blocks=80, receives=False), bench.engine(total_blocks=48)
    prefilled, decoded = start_recording(prefill), start_recording(decode, admit=True)
    kept: list[EngineRequest] = []
    errors: list[BaseException] = []

    def serve(thread: int) -> None:
        rng = random.Random(1000 * seed + thread)
        try:
            for i in range(15):
                request = make_stepwise_request(f"{seed}-{thread}-{i}", rng.randrange(1, 60), rng.randrange(2, 40))
                aborts = rng.random() < 0.5
                moments = [rng.random() < 0.3 for _ in range(3)]
                ticket = _retry(lambda request=request: decode.reserve(request, 60.0).result())
                if aborts and moments[0]:
                    decode.abort(request.key)
                _retry(lambda request=request: prefill.prefill(request))
                if aborts and moments[1]:
                    prefill.abort(request.key)
                prefill.push_to(request.key, ticket)
                if aborts and moments[2] and not moments[1]:
                    prefilled.wait_for(FirstToken, request.key)
                    prefill.abort(request.key)
                if aborts:
                    decode.abort(request.key)
                    prefill.abort(request.key)
                else:
                    kept.append(request)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    for request in kept:
        decoded.wait_for_finish(request.key)
        answer = [prefilled.token_ids[request.key][0], *decoded.token_ids[request.key]]
        assert answer == MODEL.answer(request.token_ids, 0, request.params.max_tokens or 0)
    wait_until_free(prefill, decode)


def _retry(call):  # type: ignore[no-untyped-def]
    pause = threading.Event()
    for _ in range(10_000):
        try:
            return call()
        except NoCapacity:
            pause.wait(0.002)
    raise AssertionError("no room for 20 s")


def test_replicas_give_back_blocks_before_requests_run_out_of_them() -> None:
    lifecycle, sequence, _ = _landed(64, 6)
    assert lifecycle.wanted_blocks() == 0, "there are no replicas"
    lifecycle.replicas = Mock(spec=Replicas, evictable_blocks=30)
    lifecycle.residency.allocator.allocate(Replica(ReplicaKey("copied", 0, 1), Kept()), 30)
    lifecycle.check_integrity()
    assert lifecycle.stats().free_blocks == 62, "blocks of replicas count as free"
    assert lifecycle.wanted_blocks() == 0
    with pytest.raises(NoCapacity):
        lifecycle.open_decode(make_stepwise_request("long", 150, 20), None)
    assert lifecycle.wanted_blocks() == 38 - 32
    assert lifecycle.wanted_blocks() == 0, "each refusal counts once"
    lifecycle.residency.allocator.allocate(sequence, 30)
    assert lifecycle.wanted_blocks() == min_free_blocks(64) - 2
