"""The stepwise engine after exceptions, and when it is asked for the impossible."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    FirstToken,
    KvPushFailed,
    Landed,
    LandingFailed,
    PrefillStarted,
    RequestFailed,
)
from kaveri.engine.stepwise.fake import FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, NoToken, SequenceSlice
from kaveri.errors import ConfigError, EngineError, InvalidArgument
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_recorder import SOON_S, wait_until_free
from tests.library.engine.stepwise_bench import (
    MODEL,
    HeldRunner,
    StepwiseBench,
    make_stepwise_request,
    start_recording,
)
from tests.support.engine_suite import start_adopting


class _BrokenRunner(FakeRunner):
    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        if any(part.token_ids[0] == 13 for part in batch):
            raise RuntimeError("bad luck")
        return super().run(batch, on_layer)


def test_error_of_the_runner_stops_the_engine_loudly(bench: StepwiseBench) -> None:
    prefill, decode = bench.engine(_BrokenRunner(MODEL)), bench.engine()
    prefilled, decoded = start_recording(prefill), start_recording(decode)
    computed, unlucky = (
        make_stepwise_request("computed", 10, 5),
        EngineRequest(EngineKey("u", 1), (13, 1), 0, ResolvedParams()),
    )
    prefill.prefill(computed)
    prefilled.wait_for(FirstToken, computed.key)
    decode.reserve(computed, 60.0).result()
    prefill.prefill(unlucky)
    with pytest.raises(AssertionError, match="bad luck"):
        prefilled.wait_for(FirstToken, unlucky.key)
    assert isinstance(prefilled.events[-1], EngineStopped)
    with pytest.raises(EngineError, match="bad luck"):
        prefill.prefill(make_stepwise_request("later", 5, 5))
    with pytest.raises(EngineError, match="bad luck"):
        prefill.reserve(make_stepwise_request("later", 5, 5), 60.0).result(SOON_S)
    with pytest.raises(EngineError, match="bad luck"):
        prefill.admit(unlucky.key)
    prefill.abort(computed.key)
    prefill.close()
    wait_until_free(prefill)
    assert not decoded.of(Landed)


def _broken_by(bench: StepwiseBench, *requests: EngineRequest) -> list[EngineEvent]:
    """Compute these prompts in one step; return the engine's events until it stops."""
    engine, events, stopped = bench.engine(_BrokenRunner(MODEL), receives=False), list[EngineEvent](), threading.Event()

    def listen(news: Sequence[EngineEvent]) -> None:
        events.extend(news)
        if isinstance(events[-1], EngineStopped):
            stopped.set()

    for request in requests:
        engine.prefill(request)
    engine.start(listen)
    assert stopped.wait(SOON_S)
    return events


def _of_death(name: str, suspect_until: int = 0) -> EngineRequest:
    return EngineRequest(EngineKey(name, 1), (13, 1), 0, ResolvedParams(max_tokens=9, seed=1), suspect_until)


def test_a_step_that_raises_makes_each_of_its_requests_a_suspect(bench: StepwiseBench) -> None:
    going_on = replace(make_stepwise_request("going-on", 4, 9), generated_count=3)
    late = make_stepwise_request("late", 90, 9)
    events = _broken_by(bench, _of_death("deadly"), going_on, late, make_stepwise_request("in-line", 5, 9))
    assert not any(isinstance(event, RequestFailed) for event in events)
    suspects = {EngineKey("deadly", 1): 1, going_on.key: 4, late.key: 1}
    assert events[-1] == EngineStopped("RuntimeError('bad luck')", suspects)


def test_a_step_that_raises_with_a_suspect_in_it_blames_the_suspect_alone(bench: StepwiseBench) -> None:
    innocent = make_stepwise_request("innocent", 4, 9)
    events = _broken_by(bench, innocent, _of_death("deadly", suspect_until=1))
    failed = RequestFailed(EngineKey("deadly", 1), "RuntimeError('bad luck')", is_final=True)
    assert events[-2:] == [failed, EngineStopped("RuntimeError('bad luck')", {})]


def test_an_engine_that_breaks_outside_of_a_step_suspects_nobody(bench: StepwiseBench) -> None:
    engine, last, stopped = bench.engine(receives=False), list[EngineEvent](), threading.Event()

    def listen(news: Sequence[EngineEvent]) -> None:
        if not isinstance(news[-1], EngineStopped):
            raise RuntimeError("the listener is broken")
        last.append(news[-1])
        stopped.set()

    engine.start(listen)
    engine.prefill(make_stepwise_request("computed", 10, 5))
    assert stopped.wait(SOON_S)
    assert last == [EngineStopped("the listener raised RuntimeError('the listener is broken')")]
    with pytest.raises(EngineError, match="the listener is broken"):
        engine.prefill(make_stepwise_request("later", 5, 5))


class _NoTokenRunner(FakeRunner):
    """Draws no token after `token_count` tokens of a prompt that begins with token 13."""

    def __init__(self, token_count: int) -> None:
        super().__init__(MODEL)
        self._token_count = token_count
        self._unlucky: set[int] = set()

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        drawn = super().run(batch, on_layer)
        for index, part in enumerate(batch):
            if part.start == 0 and part.token_ids[0] == 13:
                self._unlucky.add(part.block_ids[0])
            if part.block_ids[0] in self._unlucky and part.start + len(part.token_ids) == self._token_count:
                drawn[index] = NoToken("not a number")
        return drawn


def _unlucky(prompt_tokens: int) -> EngineRequest:
    request = make_stepwise_request("unlucky", prompt_tokens, 9)
    return replace(request, token_ids=(13, *request.token_ids[1:]))


@pytest.mark.parametrize("pushed", [False, True])
def test_request_without_a_first_token_fails_alone(bench: StepwiseBench, pushed: bool) -> None:
    pair = bench.pair(_NoTokenRunner(10))
    unlucky, other = _unlucky(10), make_stepwise_request("other", 30, 5)
    # Ends within this test only because the push is aborted.
    ticket = pair.decode.reserve(unlucky, 10 * SOON_S).result()
    pair.prefill.prefill(unlucky)
    if pushed:
        pair.prefill.push_to(unlucky.key, ticket)
    pair.hand_over(other)
    assert pair.prefilled.wait_for(RequestFailed, unlucky.key).reason == "not a number"
    pair.decoded.wait_for_finish(other.key)
    if pushed:
        pair.decoded.wait_for(LandingFailed, unlucky.key)
    pair.decode.abort(unlucky.key)
    wait_until_free(pair.prefill, pair.decode)
    told = [type(event) for event in pair.prefilled.events if getattr(event, "key", None) == unlucky.key]
    assert told == [PrefillStarted, RequestFailed]


def test_request_without_a_next_token_fails_alone(bench: StepwiseBench) -> None:
    engine = bench.engine(_NoTokenRunner(14), receives=False)
    recorder = start_adopting(engine)
    unlucky, other = _unlucky(10), make_stepwise_request("other", 30, 9)
    for request in (unlucky, other):
        engine.prefill(request)
    assert recorder.wait_for(RequestFailed, unlucky.key).reason == "not a number"
    assert len(recorder.token_ids[unlucky.key]) == 4
    recorder.wait_for_finish(other.key)
    assert recorder.token_ids[other.key] == MODEL.answer(other.token_ids, 0, 9)
    wait_until_free(engine)


def test_runner_that_ends_its_thread_stops_the_engine_loudly(bench: StepwiseBench) -> None:
    class LeavingRunner(FakeRunner):
        def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
            raise SystemExit("had enough")

    engine = bench.engine(LeavingRunner(MODEL), receives=False)
    recorder = start_recording(engine)
    request = make_stepwise_request("r", 5, 5)
    engine.prefill(request)
    with pytest.raises(AssertionError, match="had enough"):
        recorder.wait_for(FirstToken, request.key)
    assert isinstance(recorder.events[-1], EngineStopped)
    with pytest.raises(EngineError, match="had enough"):
        engine.prefill(make_stepwise_request("later", 5, 5))


@pytest.mark.parametrize("note", [b"\xff\xff", b"\x08\xff\xff\x03"], ids=["garbage", "a token beyond the vocabulary"])
def test_hand_over_that_makes_no_sense_fails_the_request_aloud(bench: StepwiseBench, note: bytes) -> None:
    decode = bench.engine()
    decoded = start_recording(decode)
    request = make_stepwise_request("r", 10, 5)
    ticket = decode.reserve(request, 60.0).result()
    layout = decode.info.layout
    pool = KvPool(layout, len(ticket.block_ids))
    sender = KvSender(pool, lambda event: None, transports=make_transports())
    try:
        sender.open(ticket)
        for layer in range(layout.layer_count):
            sender.write(ticket.transfer_id, layer, 0, range(len(ticket.block_ids)))
        sender.finish(ticket.transfer_id, note)
        assert "hand-over" in decoded.wait_for(RequestFailed, request.key).reason
        wait_until_free(decode)
    finally:
        sender.close()


def test_ticket_for_another_length_fails_the_push_and_keeps_the_kv(bench: StepwiseBench) -> None:
    pair = bench.pair()
    request = make_stepwise_request("r", 10, 5)
    pair.prefill.prefill(request)
    other = pair.decode.reserve(make_stepwise_request("other", 30, 5), 60.0).result()
    pair.prefill.push_to(request.key, other)
    assert "30 tokens" in pair.prefilled.wait_for(KvPushFailed, request.key).reason
    ticket = pair.decode.reserve(request, 60.0).result()
    pair.prefill.push_to(request.key, ticket)
    pair.decoded.wait_for_finish(request.key)


def test_second_ticket_while_a_push_is_open_is_refused(bench: StepwiseBench) -> None:
    runner = HeldRunner()
    pair = bench.pair(runner)
    request = make_stepwise_request("r", 10, 5)
    runner.hold()
    pair.hand_over(request)
    second = pair.decode.reserve(EngineRequest(EngineKey("r", 2), request.token_ids, 0, request.params), 60.0).result()
    with pytest.raises(InvalidArgument, match="ticket"):
        pair.prefill.push_to(request.key, second)
    runner.let_go()
    pair.decoded.wait_for_finish(request.key)


def test_pool_that_cannot_hold_one_longest_request_is_refused(bench: StepwiseBench) -> None:
    bench.engine(total_blocks=32)
    with pytest.raises(ConfigError, match=r"128 tokens need 32 KV blocks of 4 tokens; the pool has 31") as raised:
        bench.engine(total_blocks=31)
    assert raised.value.field == "max_model_len"


def test_engine_that_only_prefills_takes_no_reservation(bench: StepwiseBench) -> None:
    engine = bench.engine(receives=False)
    assert engine.info.kv_endpoints == ()
    with pytest.raises(EngineError, match="takes no pushes"):
        engine.reserve(make_stepwise_request("r", 5, 5), 60.0).result(SOON_S)


def test_closed_engine_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        bench = StepwiseBench(tmp_path, stack)
        pair = bench.pair()
        request = make_stepwise_request("r", 10, 5)
        pair.hand_over(request)
        pair.decoded.wait_for_finish(request.key)
    assert set(threading.enumerate()) <= before
