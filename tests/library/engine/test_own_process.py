"""An engine in a process of its own does what every engine must, and its end is that of its process."""

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine import own_process, own_process_server
from kaveri.engine.contract import EngineStats, EngineStopped, FirstToken, RequestFailed
from kaveri.engine.factory import build_engine
from kaveri.engine.own_process import OwnProcessEngine
from kaveri.engine.own_process_server import EngineServer
from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError, EngineError, NoCapacity, RequestAlreadyExists
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow, SenderFlow
from kaveri.testing.engine_conformance import make_request, running_pair
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder, wait_until_free, wait_until_idle
from tests.support.engine_suite import EngineSuite, ReplicaStores

_EOS = 0.02
_BLOCK_TOKENS = 16


def _settings(total_blocks: int = 400, **given: Any) -> EngineSettings:
    layout = FakeModel(block_tokens=_BLOCK_TOKENS).layout
    memory_bytes = total_blocks * layout.layer_count * layout.block_bytes
    settings = {"model": "made/up", "engine": "fake", "fake_eos_probability": _EOS, "block_tokens": _BLOCK_TOKENS}
    return EngineSettings(**settings | {"kv_transports": ("unix", "tcp"), "kv_cache_memory": memory_bytes} | given)


class _Forked:
    """own_process.StartedProcess that multiprocessing has started."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        return int(self._process.exitcode or 0)

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of the engines, which are forked from a process with preloaded imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kaveri.engine.own_process_server", "kaveri.engine.factory"])
    started: list[int] = []

    def start() -> tuple[Connection, _Forked]:
        ours, theirs = socket.socketpair()
        connection: Connection[Any, Any] = Connection(theirs.detach())
        process = context.Process(target=own_process_server.serve, args=(connection,))
        process.start()
        connection.close()
        assert process.pid is not None
        started.append(process.pid)
        return Connection(ours.detach()), _Forked(process)

    monkeypatch.setattr(own_process, "start_process", start)
    return started


def _started(**given: Any) -> tuple[OwnProcessEngine, EngineRecorder]:
    engine, recorder = OwnProcessEngine(_settings(**given)), EngineRecorder()
    engine.start(recorder)
    return engine, recorder


class _Harness(ReplicaStores):
    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> OwnProcessEngine:
        # Calls that follow an event arrive before the next step.
        given = {"max_model_len": max_model_len, "chunk_tokens": chunk_tokens, "fake_step_s": 0.005}
        return OwnProcessEngine(_settings(total_blocks, **given))

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> OwnProcessEngine:
        given = {"max_model_len": max_model_len, "chunk_tokens": chunk_tokens, "max_batch": max_batch}
        return OwnProcessEngine(_settings(total_blocks, **given))

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return FakeModel(eos_probability=_EOS).answer(token_ids, 0, token_count)


class TestEngineInItsOwnProcess(EngineSuite):
    @pytest.fixture
    def harness(self, pids: list[int], tmp_path: Path) -> _Harness:
        return _Harness(tmp_path)

    def test_request_that_is_live_already_is_refused(self, harness: _Harness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 60, 5)
            pair.prefill.prefill(request)
            pair.prefill.prefill(request)
            ticket = pair.reserve(request)
            with pytest.raises(RequestAlreadyExists):
                pair.decode.reserve(request, 60.0).result(SOON_S)
            pair.prefill.push_to(request.key, ticket)
            assert pair.answer(request) == harness.answer(request.token_ids, 5)


def test_the_end_of_the_process_stops_the_engine_and_fails_what_is_asked_of_it(pids: list[int]) -> None:
    engine, recorder = _started(fake_step_s=0.05)
    request = make_request(engine, "r", 40, 20)
    engine.prefill(request)
    os.kill(pids[0], signal.SIGKILL)
    engine._thread.join(SOON_S)
    assert [event for event in recorder.events if isinstance(event, EngineStopped)]
    with pytest.raises(EngineError, match="its process has ended"):
        engine.prefill(request)
    assert isinstance(engine.reserve(request, 1.0).exception(SOON_S), EngineError)
    engine.abort(request.key)
    engine.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
def test_the_process_of_an_engine_is_not_scheduled_as_the_instance_that_started_it() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        connection, started = own_process.start_process()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    process: Any = started
    give_up_s = time.monotonic() + SOON_S
    with connection, process:
        while os.sched_getscheduler(process.pid) != os.SCHED_OTHER:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        process.kill()


def test_a_process_that_stands_still_is_ended_and_stops_the_engine(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = _started()
    monkeypatch.setattr(own_process, "_INTEGRITY_TIMEOUT_S", 0.5)
    os.kill(pids[0], signal.SIGSTOP)
    engine.prefill(make_request(engine, "r", 40, 20))
    assert engine.stats().is_busy, "the watch of the instance finds an engine stuck that is busy and makes no step"
    with pytest.raises(EngineError, match="has not answered check_integrity"):
        engine.check_integrity()
    engine._thread.join(SOON_S)
    assert [event for event in recorder.events if isinstance(event, EngineStopped)]


def test_a_prompt_that_finds_no_room_against_what_the_last_message_said_fails(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = _started(total_blocks=8, max_model_len=120)
    first, second = (make_request(engine, name, 100, 5) for name in ("first", "second"))
    engine.prefill(first)
    with pytest.raises(NoCapacity):
        engine.prefill(second)
    engine.abort(first.key)
    wait_until_free(engine)
    monkeypatch.setattr(engine, "_sure_free_blocks", lambda: 8)
    third = make_request(engine, "third", 100, 5)
    engine.prefill(third)
    engine.prefill(second)
    assert "blocks" in recorder.wait_for(RequestFailed, second.key).reason
    assert recorder.wait_for(FirstToken, third.key)
    engine.close()


async def test_calls_of_one_turn_are_sent_together_and_in_order(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = _started()
    await asyncio.sleep(0)
    messages: list[Any] = []
    send = own_process.send
    monkeypatch.setattr(own_process, "send", lambda *given: (messages.append(given[1]), send(*given)))
    first, second = (make_request(engine, name, 40, 20) for name in ("first", "second"))
    engine.prefill(first)
    engine.prefill(second)
    engine.abort(second.key)
    assert not messages
    assert engine._sure_free_blocks() < 400, "prompts are counted from the call on"
    await asyncio.sleep(0)
    assert [[method for _, method, _ in calls] for calls in messages] == [["prefill", "prefill", "abort"]]
    engine.release(first.key, 1.0)
    engine.check_integrity()
    assert [method for _, method, _ in messages[-1]] == ["release", "check_integrity"]
    await asyncio.to_thread(engine.close)


def test_a_prompt_that_is_refused_does_not_keep_the_engine_busy(pids: list[int]) -> None:
    engine, recorder = _started()
    request = make_request(engine, "r", 40, 20)
    engine.prefill(request)
    assert recorder.wait_for(FirstToken, request.key)
    engine.prefill(request)
    assert engine.stats().is_busy, "it has not been heard to have taken the prompt"
    wait_until_idle(engine)
    engine.close()


class _Served:
    """EngineServer on a thread, and a connection to it that is used as a service would."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # The regular check of an idle engine is put off, so that only checks after calls send messages.
        monkeypatch.setattr(own_process_server, "_IDLE_S", 10 * SOON_S)
        monkeypatch.setattr(own_process_server, "_AFTER_CALL_S", 0.3)
        self._ours, theirs = multiprocessing.Pipe()
        self.server = EngineServer(theirs, engine)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()

    def call(self, *calls: tuple[Any, ...]) -> None:
        own_process.send(self._ours, list(calls))

    def received(self, fits: Callable[[int | None, EngineStats, KvFlow | None], bool]) -> KvFlow | None:
        """Wait for the next message for which fits(number, statistics, KvFlow) is true, and return its KvFlow."""
        while True:
            assert self._ours.poll(SOON_S), "nothing came"
            _, number, _, error, stats, kv_flow = own_process.receive(self._ours)
            assert error is None
            if fits(number, EngineStats(*stats), kv_flow):
                return kv_flow

    def close(self) -> None:
        self.call((9, "close", ()))
        self.received(lambda number, *_: number == 9)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


class _Granting:
    """Engine with constant statistics. A test completes reserve() by setting the result of `ticket`."""

    def __init__(self) -> None:
        self.ticket: Future[str] = Future()

    def stats(self) -> EngineStats:
        return EngineStats(1, 0, 0, 0, 0)

    def kv_flow(self) -> KvFlow:
        return KvFlow(SenderFlow(), ReceiverFlow())

    def reserve(self) -> Future[str]:
        return self.ticket

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


def test_what_calls_have_changed_is_sent_soon_also_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(_settings())
    served = _Served(engine, monkeypatch)
    request = make_request(engine, "r", 40, 20)
    served.call((None, "start", ()), (0, "reserve", (request, 10 * SOON_S)))
    served.received(lambda _, __, kv_flow: kv_flow is not None and kv_flow.receiving.leased_block_count > 0)
    served.call((None, "abort", (request.key,)))
    served.received(lambda _, stats, __: stats.free_blocks == engine.info.total_blocks)
    served.close()


def test_an_answer_has_no_kv_flow_if_one_follows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Granting()
    served = _Served(engine, monkeypatch)
    served.call((0, "reserve", ()), (1, "check_integrity", ()))
    served.received(lambda number, *_: number == 1)
    engine.ticket.set_result("a ticket")
    assert served.received(lambda number, *_: number == 0) is None
    assert served.received(lambda number, *_: number is None) is not None, "nothing else has changed"
    served.close()


def test_an_answer_after_the_check_has_a_kv_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Granting()
    served = _Served(engine, monkeypatch)
    served.call((0, "reserve", ()))
    served.received(lambda number, *_: number is None)
    engine.ticket.set_result("a ticket")
    assert served.received(lambda number, *_: number == 0) is not None
    served.close()


def test_a_check_right_after_a_call_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process_server, "_AFTER_CALL_S", SOON_S)
    server = EngineServer(multiprocessing.Pipe()[0], _Granting())
    server._called_s = time.monotonic()
    server._send_changes()
    assert server._check_at_s == server._called_s + SOON_S
    server._called_s -= SOON_S
    server._send_changes()
    assert server._check_at_s < time.monotonic() + SOON_S, "the regular check of an idle engine"


def test_a_setting_that_the_engine_refuses_is_refused_here(pids: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        OwnProcessEngine(_settings(kv_port=5, kv_transports=("tcp", "gloo")))
    assert caught.value.field == "kv_port"


@pytest.mark.timeout(60)
def test_settings_that_cannot_be_sent_are_an_error_and_nobody_waits(pids: list[int]) -> None:
    with pytest.raises(ConfigError, match="its process has ended while it was loaded"):
        OwnProcessEngine(_settings(engine_args={"hook": lambda: None}))


def test_a_process_that_dies_while_it_loads_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="its process has ended while it was loaded"):
        OwnProcessEngine(_settings())


def test_the_process_of_an_engine_that_is_started_as_services_start_it_ends_with_close() -> None:
    engine, recorder = _started()
    request = make_request(engine, "r", 40, 1)
    engine.prefill(request)
    recorder.wait_for_finish(request.key)
    engine.close()
    assert not engine._thread.is_alive()
    assert not [event for event in recorder.events if isinstance(event, EngineStopped)]
